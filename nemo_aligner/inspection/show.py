# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples and findings as text for a terminal, in colour or with brackets, and as one HTML page in
the look of the training report.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from nemo_aligner.config.data_rules import holds_tokens
from nemo_aligner.core.tokenizer import decode_with_special_tokens
from nemo_aligner.data.nlp.sft import SFTDataset
from nemo_aligner.inspection.findings import (
    Finding,
    Findings,
    InspectedJob,
    Piece,
    Sample,
    histogram,
    pieces,
    visible,
)
from nemo_aligner.report.elements import document

MARKED, SPECIAL, PLAIN = "\033[32m", "\033[7m", "\033[0m"
BAR = 40  # characters of the longest bar
EXAMPLES, MOST_PLACES = 3, 200  # places that a finding names, on the terminal and on the page


def show(
    job: InspectedJob,
    samples: Sequence[Sample],
    findings: Findings,
    write: Callable[[Piece], str],
    most_places: int = EXAMPLES,
) -> str:
    """The whole text; `write`: a piece of a sample, or of the rest."""
    blocks = [summary(job, findings)]
    shown = [part for sample in samples for part in sample.parts]
    if any(part.name != "prompt" for part in shown):
        blocks.append(f"{shown[0].legend}: ")
    texts = [write(Piece("\n\n".join(blocks)))]
    texts += [write(Piece("so", marked=True))] if len(blocks) > 1 else []
    for number, sample in enumerate(samples, start=1):
        head = f"\n\n--- sample {number}: {sample.place}" + f"; {sample.note}" * bool(sample.note)
        texts.append(write(Piece(head)))
        for part in sample.parts:
            trained = f", {sum(part.marked)} {part.legend}"
            marked = "" if part.name == "prompt" or part.scored else trained
            texts.append(write(Piece(f"\n{part.name} ({len(part.tokens)} tokens{marked})\n")))
            texts += [
                write(piece._replace(text=visible(piece.text)))
                for piece in pieces(job.tokenizer, part)
            ]
    found = "\n".join(finding_text(finding, most_places) for finding in findings.bad)
    lengths = _lengths(findings) if len(findings.lengths) else ""
    end = "".join(f"\n\n{text}" for text in (lengths, found or "Nothing to report.") if text)
    return "".join([*texts, write(Piece(end))])


def in_colour(piece: Piece) -> str:
    """A piece for a terminal: what is trained on green, special tokens inverted."""
    codes = MARKED * piece.marked + SPECIAL * piece.special
    return f"{codes}{piece.text}{PLAIN}" if codes else piece.text


def in_brackets(piece: Piece) -> str:
    """A piece for a file: what is trained on in [[ ]]."""
    return f"[[{piece.text}]]" if piece.marked else piece.text


def render(job: InspectedJob, samples: Sequence[Sample], findings: Findings) -> str:
    """The same text as one HTML page, in the look of the training report."""

    def in_html(piece: Piece) -> str:
        classes = " ".join(["marked"] * piece.marked + ["special"] * piece.special)
        text = escape(piece.text)
        return f'<span class="{classes}">{text}</span>' if classes else text

    text = show(job, samples, findings, in_html, MOST_PLACES)
    return document("Data as the model sees them", f'<pre class="tokens">{text}</pre>')


def summary(job: InspectedJob, findings: Findings) -> str:
    """What was read, how texts begin, and the form of conversations that nobody asked for."""
    seen = (
        "" if findings.seen >= findings.served else f" (the first {findings.seen} are looked at)"
    )
    text = (
        f"{job.name} reads {', '.join(job.files)} with the tokenizer of {job.model}: "
        f"{findings.documents} samples, of which it uses {findings.served}{seen}.{_beginning(job)}"
    )
    form = job.dataset.form_of(job.dataset.lines[0])
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


def finding_text(finding: Finding, most_places: int = EXAMPLES) -> str:
    """A finding with its first places."""
    places = finding.places[:most_places]
    more = len(finding.places) - len(places)
    rest = f"\n    and {more} more" if more else ""
    listed = "".join(f"\n    {place}" for place in places)
    return f"{len(finding.places)} {finding.text}:{listed}{rest}"


def _lengths(findings: Findings) -> str:
    """Quantiles of the lengths, the limit, and how many there are of each."""
    low, middle, high, top = np.quantile(findings.lengths, [0, 0.5, 0.95, 1], method="higher")
    text = (
        f"lengths in tokens: shortest {low:g}, median {middle:g}, 95% up to {high:g}, longest "
        f"{top:g}; {findings.limit}"
    )
    bins = histogram(findings.lengths)
    most = max(count for _, _, count in bins)
    width = len(str(bins[-1][1]))
    rows = [
        f"{first:>{width}} to {last:>{width}}  {'█' * -(-BAR * count // most)} {count}"
        for first, last, count in bins
    ]
    return "\n".join([text, *rows])
