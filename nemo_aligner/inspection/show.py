# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples and findings as text for a terminal, in colour or with brackets, and as one HTML page in
the look of the training report.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from nemo_aligner.config.data_rules import holds_tokens
from nemo_aligner.core.tokenizer import decode_with_special_tokens
from nemo_aligner.data.nlp.sft import SFTDataset
from nemo_aligner.inspection.findings import (
    EXAMPLES,
    Finding,
    Findings,
    Piece,
    Sample,
    form_of,
    histogram,
    pieces,
    visible,
)
from nemo_aligner.inspection.jobs import InspectedJob
from nemo_aligner.report.elements import document, folded

MARKED, SPECIAL, PLAIN = "\033[32m", "\033[7m", "\033[0m"
BAR = 40  # characters of the longest bar


def show(job: InspectedJob, samples: Sequence[Sample], findings: Findings, colored: bool) -> str:
    """The whole text; `colored`: what is trained on green, special tokens inverted, else [[ ]]."""
    blocks = [summary(job, findings)]
    shown = [part for sample in samples for part in sample.parts]
    if any(part.name != "prompt" for part in shown):
        blocks.append(f"{shown[0].legend}: {_piece(Piece('so', True, False), colored)}")
    for number, sample in enumerate(samples, start=1):
        head = f"--- sample {number}: {sample.place}" + (f"; {sample.note}" * bool(sample.note))
        parts = []
        for part in sample.parts:
            text = "".join(_piece(piece, colored) for piece in pieces(job.tokenizer, part))
            trained = f", {sum(part.marked)} {part.legend}"
            marked = "" if part.name == "prompt" or part.scored else trained
            parts.append(f"{part.name} ({len(part.tokens)} tokens{marked})\n{text}")
        blocks.append("\n".join([head, *parts]))
    if len(findings.lengths):
        blocks.append(_lengths(findings))
    blocks.append("\n".join(map(finding_text, findings.bad)) or "Nothing to report.")
    return "\n\n".join(blocks)


def summary(job: InspectedJob, findings: Findings) -> str:
    """What was read, how texts begin, and the form of conversations that nobody asked for."""
    seen = (
        "" if findings.seen >= findings.served else f" (the first {findings.seen} are looked at)"
    )
    text = (
        f"{job.name} reads {', '.join(job.files)} with the tokenizer of {job.model}: "
        f"{findings.documents} samples, of which it uses {findings.served}{seen}.{_beginning(job)}"
    )
    form = form_of(job.dataset, job.dataset.lines[0])
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


def finding_text(finding: Finding) -> str:
    """A finding with its first places."""
    places = finding.places[:EXAMPLES]
    more = len(finding.places) - len(places)
    rest = f"\n    and {more} more" if more else ""
    listed = "".join(f"\n    {place}" for place in places)
    return f"{len(finding.places)} {finding.text}:{listed}{rest}"


def length_text(findings: Findings) -> str:
    """Quantiles of the lengths, and the limit."""
    low, middle, high, top = np.quantile(findings.lengths, [0, 0.5, 0.95, 1], method="higher")
    return (
        f"lengths in tokens: shortest {low:g}, median {middle:g}, 95% up to {high:g}, longest "
        f"{top:g}; {findings.limit}"
    )


def _lengths(findings: Findings) -> str:
    bins = histogram(findings.lengths)
    most = max(count for _, _, count in bins)
    width = len(str(bins[-1][1]))
    rows = [
        f"{first:>{width}} to {last:>{width}}  {'█' * -(-BAR * count // most)} {count}"
        for first, last, count in bins
    ]
    return "\n".join([length_text(findings), *rows])


def _piece(piece: Piece, colored: bool) -> str:
    text = visible(piece.text)
    if not colored:
        return f"[[{text}]]" if piece.marked else text
    codes = MARKED * piece.marked + SPECIAL * piece.special
    return f"{codes}{text}{PLAIN}" if codes else text


MOST_PLACES = 200  # that a finding lists


def render(job: InspectedJob, samples: Sequence[Sample], findings: Findings) -> str:
    """The page."""
    body = f"<p>{escape(summary(job, findings))}</p>{_html_findings(findings)}"
    for number, sample in enumerate(samples, start=1):
        body += _html_sample(job, number, sample)
    if len(findings.lengths):
        body += _html_lengths(findings)
    return document("Data as the model sees them", body)


def _html_sample(job: InspectedJob, number: int, sample: Sample) -> str:
    note = f"; {sample.note}" if sample.note else ""
    body = f"<h2>Sample {number}</h2><p>{escape(sample.place + note)}</p>"
    for part in sample.parts:
        text = "".join(map(_html_piece, pieces(job.tokenizer, part)))
        marked = "" if part.name == "prompt" else ' <span class="marked">so</span>'
        facts = f"{part.name}, {len(part.tokens)} tokens; {part.legend}"
        body += f'<p>{escape(facts)}{marked}</p><pre class="tokens">{text}</pre>'
    return body


def _html_piece(piece: Piece) -> str:
    classes = " ".join(
        name for name, holds in (("marked", piece.marked), ("special", piece.special)) if holds
    )
    text = escape(visible(piece.text))
    return f'<span class="{classes}">{text}</span>' if classes else text


def _html_findings(findings: Findings) -> str:
    if not findings.bad:
        return '<p class="good">Nothing to report.</p>'
    return "".join(map(_html_finding, findings.bad))


def _html_finding(finding: Finding) -> str:
    places = finding.places[:MOST_PLACES]
    listed = "".join(f"<li>{escape(place)}</li>" for place in places)
    more = len(finding.places) - len(places)
    rest = f"<p>and {more} more</p>" if more else ""
    text = f"{len(finding.places)} {finding.text}"
    return f'<p class="bad">{escape(text)}</p>{folded("where", f"<ul>{listed}</ul>{rest}")}'


def _html_lengths(findings: Findings) -> str:
    bins = histogram(findings.lengths)
    most = max(count for _, _, count in bins)
    rows = "".join(
        f'<tr><td>{first} to {last}</td><td><span class="bar" style="width: '
        f'{12 * count / most:.2f}em"></span></td><td>{count}</td></tr>'
        for first, last, count in bins
    )
    return f"<h2>Lengths</h2><p>{escape(length_text(findings))}</p><table>{rows}</table>"
