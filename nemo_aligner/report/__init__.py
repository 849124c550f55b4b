# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about a run, also a running one, or several over each other:
`nemo-aligner report RUN_DIR [--out FILE]`.

Every folder below RUN_DIR with a `metrics.jsonl` is a job (`training/loggers.py` describes the
files). `reading.py` reads them, `elements.py` draws, `page.py` puts the page together, `ending.py`
writes it while a job runs.
"""

from nemo_aligner.report.page import render, write_report
from nemo_aligner.report.reading import JobRecord, read_run

__all__ = ["JobRecord", "read_run", "render", "write_report"]
