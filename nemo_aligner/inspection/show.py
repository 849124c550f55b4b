# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples and findings as text for a terminal, and as one HTML page in the look of the report."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from nemo_aligner.config.data_rules import holds_tokens
from nemo_aligner.core.tokenizer import decode_with_special_tokens
from nemo_aligner.data.nlp.sft import SFTDataset
from nemo_aligner.inspection.findings import (
    Finding,
    InspectedJob,
    Piece,
    Sample,
    histogram,
    pieces,
    visible,
)

MARKED, SPECIAL, PLAIN = "\033[32m", "\033[7m", "\033[0m"
BAR = 40  # characters of the longest bar
EXAMPLES, MOST_PLACES = 3, 200  # places that a finding names, on the terminal and on the page
Write = Callable[[Piece], str]  # a piece of a sample as text


def show(
    job: InspectedJob,
    samples: Sequence[Sample],
    lengths: np.ndarray,
    findings: Sequence[Finding],
    write: Write,
) -> str:
    """The whole text, with what `look` has found. With `write=in_html` it is HTML."""
    plain: Callable[[str], str] = escape if write is in_html else str
    blocks = [plain(summary(job, len(lengths)))]
    shown = [part for sample in samples for part in sample.parts]
    if any(part.name != "prompt" for part in shown):  # prompts have no marked tokens
        blocks.append(f"{shown[0].legend}: {write(Piece('so', marked=True))}")
    for number, sample in enumerate(samples, start=1):
        note = f"; {sample.note}" * bool(sample.note)
        lines = [plain(f"--- sample {number}: {sample.place}{note}")]
        for part in sample.parts:
            trained = f", {sum(part.marked)} {part.legend}"
            marked = "" if part.name == "prompt" or part.scored else trained
            text = "".join(
                write(piece._replace(text=visible(piece.text)))
                for piece in pieces(job.tokenizer, part)
            )
            lines += [plain(f"{part.name} ({len(part.tokens)} tokens{marked})"), text]
        blocks.append("\n".join(lines))
    if len(lengths):
        low, middle, high, top = np.quantile(lengths, [0, 0.5, 0.95, 1], method="higher")
        text = f"shortest {low:g}, median {middle:g}, 95% up to {high:g}, longest {top:g}"
        text = plain(f"lengths in tokens: {text}; {job.dataset.limit()}")
        blocks.append("\n".join([text, *bars(lengths)]))
    most, found = MOST_PLACES if write is in_html else EXAMPLES, []
    for text, places in findings:
        more = [f"and {len(places) - most} more"] if len(places) > most else []
        lines = [f"{len(places)} {text}:", *places[:most], *more]
        found.append(plain("\n    ".join(lines)))
    blocks.append("\n".join(found) or "Nothing to report.")
    return "\n\n".join(blocks)


def in_colour(piece: Piece) -> str:
    """A piece for a terminal: what is trained on green, special tokens inverted."""
    codes = MARKED * piece.marked + SPECIAL * piece.special
    return f"{codes}{piece.text}{PLAIN}" if codes else piece.text


def in_brackets(piece: Piece) -> str:
    """A piece for a file: what is trained on in [[ ]]."""
    return f"[[{piece.text}]]" if piece.marked else piece.text


def in_html(piece: Piece) -> str:
    """A piece for a page, in the classes of its style sheet."""
    classes = " ".join(["marked"] * piece.marked + ["special"] * piece.special)
    text = escape(piece.text)
    return f'<span class="{classes}">{text}</span>' if classes else text


def summary(job: InspectedJob, count: int) -> str:
    """What was read, how texts begin, and the form of conversations that nobody asked for."""
    dataset = job.dataset
    documents = len(dataset.lines) // dataset.lines_per_document
    seen = "" if count >= len(dataset) else f" (the first {count} are looked at)"
    text = (
        f"{job.name} reads {', '.join(job.files)} with the tokenizer of {job.model}: "
        f"{documents} samples, of which it uses {len(dataset)}{seen}.{_beginning(job)}"
    )
    form = dataset.form_of(dataset.lines[0])
    return f"{text} C{form.default[1:]}." if form is not None and form.default else text


def _beginning(job: InspectedJob) -> str:
    """How plain texts begin, and why; empty where the job reads no plain texts."""
    encoder: Any = getattr(job.dataset, "encoder", None)
    data, key = job.cfg.data, "model.data.add_bos"
    if isinstance(job.dataset, SFTDataset):
        reader, data, key = job.dataset, data.train_ds, "model.data.train_ds.add_bos"
    elif encoder is None or holds_tokens(data.data_impl):
        return ""
    elif encoder.form and not encoder.form.default:
        return ""
    else:
        reader = encoder.encode_text
    asked = data.get("add_bos")
    reason = f"as the tokenizer itself does ({key}=null)" if asked is None else f"by {key}={asked}"
    if not reader.add_bos:
        return f" Texts begin without a bos token, {reason}."
    bos: Any = job.tokenizer.bos_id
    text = decode_with_special_tokens(job.tokenizer, [bos])
    return f" Texts begin with the bos token {text!r}, {reason}."


def bars(lengths: np.ndarray) -> list[str]:
    """How many samples there are of each length."""
    bins = histogram(lengths)
    most = max(count for _, _, count in bins)
    width = len(str(bins[-1][1]))
    return [
        f"{first:>{width}} to {last:>{width}}  {'█' * -(-BAR * count // most)} {count}"
        for first, last, count in bins
    ]
