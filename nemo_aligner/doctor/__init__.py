# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether jobs can run on this machine, and what to do where not: `nemo-aligner doctor`. Nothing
beyond Python's own library is imported without a safeguard: packages may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Finding:
    status: str  # `ok`; `warning`: jobs run, but slower or not all of them; `missing`: they do not
    subject: str  # the thing
    text: str  # what is there
    remedy: str = ""  # what to do; empty where nothing has to be done

    def line(self) -> str:
        text = " ".join(f"{self.text}. {self.remedy}".split()) if self.remedy else self.text
        return f"{self.status:<9}{self.subject:<20}{text}"


def graded(
    subject: str, text: str, value: float, low: float, enough: float, remedy: str
) -> Finding:
    """Missing below `low`, a warning below `enough`, else ok."""
    if value >= enough:
        return Finding(OK, subject, text)
    return Finding(MISSING if value < low else WARNING, subject, text, remedy)


def summary(findings: Sequence[Finding]) -> str:
    missing, warned = (
        ", ".join(finding.subject for finding in findings if finding.status == status)
        for status in (MISSING, WARNING)
    )
    if missing:
        return f"Jobs cannot run here: see {missing}."
    return "All jobs can run here" + (f" (warnings: {warned})." if warned else ".")
