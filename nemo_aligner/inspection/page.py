# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What was found as one HTML page, in the look of the training report."""

from collections.abc import Sequence
from html import escape

from nemo_aligner.inspection.findings import Finding, Findings, histogram
from nemo_aligner.inspection.jobs import InspectedJob
from nemo_aligner.inspection.samples import Piece, Sample, pieces, visible
from nemo_aligner.inspection.terminal import length_text, summary
from nemo_aligner.report.elements import document, folded

MOST_PLACES = 200  # that a finding lists


def render(job: InspectedJob, samples: Sequence[Sample], findings: Findings) -> str:
    """The page."""
    body = f"<p>{escape(summary(job, findings))}</p>{_findings(findings)}"
    for number, sample in enumerate(samples, start=1):
        body += _sample(job, number, sample)
    if len(findings.lengths):
        body += _lengths(findings)
    return document("Data as the model sees them", body)


def _sample(job: InspectedJob, number: int, sample: Sample) -> str:
    note = f"; {sample.note}" if sample.note else ""
    body = f"<h2>Sample {number}</h2><p>{escape(sample.place + note)}</p>"
    for part in sample.parts:
        text = "".join(map(_piece, pieces(job.tokenizer, part)))
        marked = "" if part.name == "prompt" else ' <span class="marked">so</span>'
        facts = f"{part.name}, {len(part.tokens)} tokens; {part.legend}"
        body += f'<p>{escape(facts)}{marked}</p><pre class="tokens">{text}</pre>'
    return body


def _piece(piece: Piece) -> str:
    classes = " ".join(
        name for name, holds in (("marked", piece.marked), ("special", piece.special)) if holds
    )
    text = escape(visible(piece.text))
    return f'<span class="{classes}">{text}</span>' if classes else text


def _findings(findings: Findings) -> str:
    if not findings.bad:
        return '<p class="good">Nothing to report.</p>'
    return "".join(map(_finding, findings.bad))


def _finding(finding: Finding) -> str:
    places = finding.places[:MOST_PLACES]
    listed = "".join(f"<li>{escape(place)}</li>" for place in places)
    more = len(finding.places) - len(places)
    rest = f"<p>and {more} more</p>" if more else ""
    text = f"{len(finding.places)} {finding.text}"
    return f'<p class="bad">{escape(text)}</p>{folded("where", f"<ul>{listed}</ul>{rest}")}'


def _lengths(findings: Findings) -> str:
    bins = histogram(findings.lengths)
    most = max(count for _, _, count in bins)
    rows = "".join(
        f'<tr><td>{first} to {last}</td><td><span class="bar" style="width: '
        f'{12 * count / most:.2f}em"></span></td><td>{count}</td></tr>'
        for first, last, count in bins
    )
    return f"<h2>Lengths</h2><p>{escape(length_text(findings))}</p><table>{rows}</table>"
