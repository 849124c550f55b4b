# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""When the phases of a job began and how long they took: `timeline.jsonl` beside its metrics, a
line per phase, from which the report draws what the jobs of a run did at the same time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.core.interfaces import Logger

FILE = "timeline"  # .jsonl


def log_phase(logger: Logger, step: int, phase: str, start: float, seconds: float) -> None:
    """Append a phase to the timeline; `start` in seconds since the epoch, as jobs compare it."""
    logger.log_samples(FILE, [{"phase": phase, "start": start, "seconds": seconds}], step=step)


@contextmanager
def logged_phase(logger: Logger, step: int, phase: str) -> Iterator[None]:
    """Append the scope to the timeline of the job, unless it raises."""
    start, clock = time.time(), time.monotonic()
    yield
    log_phase(logger, step, phase, start, time.monotonic() - clock)
