# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The report while a job runs, and the last lines of its log."""

import os
import threading
import time
from pathlib import Path

from nemo.utils import logging

from nemo_aligner.checkpoint.folders import CHECKPOINTS, complete_checkpoints
from nemo_aligner.report.charts import format_number
from nemo_aligner.report.page import write_report
from nemo_aligner.report.reading import read_run
from nemo_aligner.report.summary import alarms, what_it_learned

SHARE = 0.02  # of the time of a job that writing its report takes
USE = ("generate {0}", "convert nemo-to-hf {0} {1}")
NEXT = {
    "gpt_sft": ("train ppo pretrained_checkpoint.restore_from_path={0}", *USE),
    "training_rm": ("serve critic pretrained_checkpoint.restore_from_path={0}", USE[1]),
}


class LiveReport:
    """Keeps `report.html` in the `folder` of a running job current, from a thread."""

    def __init__(self, folder: Path):
        self._folder, self._pause_s = folder, 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def update(self, is_end: bool) -> None:
        """There are new metrics: write it soon, and at the end of the job now."""
        if is_end:
            self._write()
        elif self._timer is None:
            self._timer = threading.Timer(self._pause_s, self._write)
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        with self._lock:
            start, self._timer = time.monotonic(), None
            try:
                write_report(self._folder)
            except Exception as error:  # no reason for a job to fail
                logging.warning(f"report.html is not current: {type(error).__name__}: {error}")
            self._pause_s = (time.monotonic() - start) / SHARE


def last_lines(folder: Path, config_name: str) -> str:
    """How the finished job of `folder` went, what it has left there, and what to do next."""
    job = next(job for job in read_run(folder) if job.folder == folder)
    validations = []
    for found in what_it_learned(job):
        if found.key.startswith("val"):
            ends = sorted({min(found.curve), max(found.curve)})
            values = [f"{format_number(found.curve[step])} (step {step})" for step in ends]
            validations.append(f"{found.title.partition(',')[0]} {' -> '.join(values)}")
    record = alarms(job)
    rung = record.active if record else []
    place = Path(os.path.relpath(folder))
    place = folder if place.parts[:1] == ("..",) else place
    rows = [
        ("validation", "; ".join(validations) or "none"),
        ("alarms", f"in {len(rung)} steps, last in {rung[-1]}" if rung else "none"),
        *(("metrics", place / "metrics.jsonl"), ("report", place / "report.html")),
    ]
    checkpoints = place / CHECKPOINTS
    models = [path for path, _ in complete_checkpoints(checkpoints)[-1:]]
    models += sorted(checkpoints.glob("*.nemo"), key=os.path.getmtime)
    for model in models[-1:]:
        target = model.with_name(f"{model.stem}-hf")
        commands = (text.format(model, target) for text in NEXT.get(config_name, USE))
        rows += [("model", model), *(("next", f"nemo-aligner {text}") for text in commands)]
    return "\n".join(f"{name:>10}: {text}" for name, text in rows)
