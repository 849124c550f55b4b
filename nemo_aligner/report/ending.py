# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The report while a job runs, and the last lines of its log."""

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from nemo.utils import logging

from nemo_aligner.checkpoint.folders import CHECKPOINTS, STATE_FILE, complete_checkpoints
from nemo_aligner.config.fields import RESTORE_KEY
from nemo_aligner.report.elements import format_number
from nemo_aligner.report.page import write_report
from nemo_aligner.report.reading import alarms, ends_of, read_run, what_it_learned

PACKAGE = Path(__file__).resolve().parents[1]
SHARE = 0.02  # of the time of a job that writing its report takes
FIRST_S = 10.0  # after the first metrics: a shorter job writes it once, at its end
DATA = "'model.data.data_prefix={train: [MY.jsonl]}'"
USE = ("generate MODEL", "convert nemo-to-hf MODEL TARGET")
# Names in capitals are filled in: MODEL, BASED and TARGET here, those of the notes by the user.
NEXT = {
    "gpt_sft": (*USE, f"train rm BASED {DATA}  # before PPO; MY.jsonl: your pairs"),
    "training_rm": (
        "serve critic BASED",
        f"train ppo {RESTORE_KEY}=SFT.nemo {DATA}  # beside it; SFT.nemo, MY.jsonl: yours",
        USE[1],
    ),
}


class LiveReport:
    """Keeps `report.html` in the `folder` of a running job current, from a thread, by a process of
    its own: an allocator gives back little of the memory that a page takes.
    """

    def __init__(self, folder: Path):
        self._folder, self._pause_s = folder, FIRST_S
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def update(self, is_end: bool) -> None:
        """There are new metrics: write it soon, at the end of the job now."""
        if is_end:
            if self._timer is not None:
                self._timer.cancel()
            self._keep_current(lambda: write_report(self._folder))
        elif self._timer is None:
            self._timer = threading.Timer(self._pause_s, self._keep_current, [self._write_apart])
            self._timer.daemon = True
            self._timer.start()

    def _write_apart(self) -> None:
        command = [sys.executable, "-m", "nemo_aligner.report", str(self._folder)]
        command += ["--parent", str(os.getpid())]
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            check=True,
            capture_output=True,
            start_new_session=True,  # Ctrl-C is for the job
        )

    def _keep_current(self, write: Callable[[], Any]) -> None:
        with self._lock:
            start, self._timer = time.monotonic(), None
            try:
                write()
            except Exception as error:  # no reason for a job to fail
                logging.warning(f"report.html is not current: {type(error).__name__}: {error}")
            self._pause_s = (time.monotonic() - start) / SHARE


def last_lines(folder: Path, config_name: str, nothing_is_kept: str | None = None) -> str:
    """How the finished job of `folder` went, what it has left there (no model by the setting
    `nothing_is_kept`), and what to do next.
    """
    job = next(job for job in read_run(folder) if job.folder == folder)
    validations = []
    for key, title in what_it_learned(job).items():
        if key.startswith("val"):
            ends = ends_of(job.series[key])
            values = [f"{format_number(value)} (step {step})" for step, value in ends.items()]
            validations.append(f"{title.partition(',')[0]} {' -> '.join(values)}")
    _steps, rung = alarms(job)
    place = Path(os.path.relpath(folder))
    place = folder if place.parts[:1] == ("..",) else place
    rows = [
        ("validation", "; ".join(validations) or "none"),
        ("alarms", f"in {len(rung)} steps, last in {rung[-1]}" if rung else "none"),
        *(("metrics", place / "metrics.jsonl"), ("report", place / "report.html")),
    ]
    checkpoints = place / CHECKPOINTS
    # The `.nemo` of a save is written after its checkpoint; an older one is of another job.
    times = {path: path / STATE_FILE for path, _ in complete_checkpoints(checkpoints)}
    times |= {path: path for path in checkpoints.glob("*.nemo")}
    if nothing_is_kept or not times:
        rows.append(("model", f"none ({nothing_is_kept})" if nothing_is_kept else "none"))
    else:
        model = max(times, key=lambda path: times[path].stat().st_mtime_ns)
        rows.append(("model", model))
        target = model.with_name(f"{model.name.removesuffix('.nemo')}-hf")
        is_plain = re.fullmatch(r"[\w./-]+", str(model), re.ASCII)  # else with quotes for Hydra
        word = model if is_plain else QuotedString(str(model), Quote.double).with_quotes()
        filled = {"MODEL": str(model), "TARGET": str(target), "BASED": f"{RESTORE_KEY}={word}"}
        for command in NEXT.get(config_name, USE):
            if "TARGET" not in command or not target.exists():
                words = [shlex.quote(filled[w]) if w in filled else w for w in command.split(" ")]
                rows.append(("next", " ".join(["nemo-aligner", *words])))
    return "\n".join(f"{name:>10}: {text}" for name, text in rows)
