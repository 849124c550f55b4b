# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Durations of named phases, the timeline of a job, and the wall-clock limit of a run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.loggers import CustomLoggerWrapper

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda durations: sum(durations) / len(durations),
    "sum": sum,
    "max": max,
    "min": min,
}


class ScopedTimer:
    """Times named scopes; the durations are collected once per step.

        with timer("generate"):
            ...
        metrics |= timer.consume_durations()     # {"generate": 1.25}, and the timer is empty again

    Args:
        reduction: of several durations of one name: "mean", "sum", "max" or "min".
        sync_cuda: wait for the GPU before and after a scope, so that its work counts in it.
        buffer_size: most durations of a name before they are consumed; -1: any number.
        on_scope: called after each scope with its row of the timeline.
    """

    def __init__(
        self,
        reduction: str = "mean",
        sync_cuda: bool = True,
        buffer_size: int = 1,
        on_scope: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if reduction not in _REDUCTIONS:
            known = ", ".join(_REDUCTIONS)
            raise ValueError(f"reduction={reduction!r} is unknown; choose one of {known}")
        self._reduce = _REDUCTIONS[reduction]
        self._sync_cuda = sync_cuda
        self._buffer_size = buffer_size
        self._on_scope = on_scope
        self._durations: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the scope, unless it raises. `ValueError`: `buffer_size` durations of it wait."""
        if len(self._durations.get(name, ())) == self._buffer_size:
            remedy = "call consume_durations() before timing it again"
            raise ValueError(f"timer {name!r} already holds a duration; {remedy}")
        start, began = self._now(), time.time()
        with progress.in_phase(name):
            yield
        duration = self._now() - start
        self._durations.setdefault(name, []).append(duration)
        if self._on_scope is not None:
            self._on_scope({"phase": name, "start": began, "seconds": duration})

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """Inside, an error forgets all durations: whoever catches it can time the names again."""
        try:
            yield
        except BaseException:
            self._durations.clear()
            raise

    def consume_durations(self) -> dict[str, float]:
        """Return the seconds by name, and forget them."""
        durations, self._durations = self._durations, {}
        return {name: self._reduce(values) for name, values in durations.items()}

    def _now(self) -> float:
        if self._sync_cuda and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.monotonic()


class SyncTimer(ScopedTimer):
    """NeMo-Aligner's older timer, with durations that are the same on all data-parallel ranks."""

    def __init__(
        self,
        reduction: str = "mean",
        sync_cuda: bool = True,
        buffer_size: int = 1,
        reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX,
    ) -> None:
        super().__init__(reduction, sync_cuda, buffer_size)
        self.reduce_op = reduce_op
        self._started: dict[str, float] = {}
        self._stopped: dict[str, list[float]] = {}
        self.stored_results: dict[str, list[float]] = {}

    def start(self, name: str = "") -> None:
        self._started[name] = self._now()

    def stop(self, name: str = "") -> None:
        """Keep the seconds since `start(name)`, which must have been: else `ValueError`."""
        if name not in self._started:
            raise ValueError(f"timer {name!r} was not started")
        kept = self._stopped.setdefault(name, [])
        kept.append(self._now() - self._started.pop(name))
        if self._buffer_size > 0:
            del kept[: -self._buffer_size]

    def get(self, name: str = "") -> float:
        """The kept seconds of `name`, reduced."""
        return self._reduce(self._stopped[name])

    def stop_and_get_time(self, name: str = "") -> float:
        self.stop(name)
        return self.get(name)

    def sync_time(self, list_to_sync: Sequence[float]) -> torch.Tensor:
        """float32 `[len(list_to_sync)]`, reduced over data-parallel ranks, which all call it."""
        group = parallel_state.get_data_parallel_group()
        times = torch.tensor(list_to_sync, dtype=torch.float32, device=get_device())
        return all_reduce(times, group, self.reduce_op)

    def get_synced(self, name: str = "") -> float:
        """`get`, reduced over the data-parallel ranks, which all call it."""
        return float(self.sync_time([self.get(name)]).item())

    def store(self, name: str = "") -> None:
        """Put `get(name)` aside for `sync_and_consume_over_stored_time`."""
        self.stored_results.setdefault(name, []).append(self.get(name))

    def sync_and_consume_over_stored_time(self, name: str = "") -> Iterator[float]:
        """What was stored, reduced over the data-parallel ranks, which iterate to the end."""
        if name in self.stored_results:
            yield from self.sync_time(self.stored_results.pop(name)).tolist()


class Timer:
    """The wall-clock limit of a run, "DD:HH:MM:SS" or a `timedelta`; on all ranks the same."""

    def __init__(self, duration: str | timedelta | None) -> None:
        self.duration_s = _seconds(duration)
        self._start: float | None = None

    def start_time(self) -> None:
        """Start the clock; later calls change nothing."""
        if self._start is None:
            self._start = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start; 0 before it."""
        return 0.0 if self._start is None else time.monotonic() - self._start

    def get_time_elapsed(self) -> float:
        """`elapsed_s` by NeMo-Aligner's name."""
        return self.elapsed_s()

    def get_time_remaining(self) -> float:
        """Seconds until the limit; infinite without one."""
        return self.duration_s - self.elapsed_s()

    def is_finished(self) -> bool:
        """True once the time is over. All ranks call it; rank 0 decides, because clocks differ."""
        finished = self.elapsed_s() >= self.duration_s
        if self.duration_s == float("inf") or not torch.distributed.is_initialized():
            return finished
        decision = torch.tensor([int(finished)], device=get_device())
        dist.broadcast(decision, src=0)
        return bool(decision.item())


def _seconds(duration: str | timedelta | None) -> float:
    if duration is None:
        return float("inf")
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    parts = str(duration).strip().split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        form = "DD:HH:MM:SS, for example 00:03:45:00"
        raise ConfigError(f"max_time_per_run={duration!r} is not of the form {form}")
    days, hours, minutes, seconds = map(int, parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


# ----------------------------------------------------------------------------------- the timeline

FILE = "timeline"  # .jsonl


@contextmanager
def logged_phase(logger: CustomLoggerWrapper, step: int, phase: str) -> Iterator[None]:
    """Append the scope to the timeline of the job, unless it raises."""
    start, clock = time.time(), time.monotonic()
    yield
    row = {"phase": phase, "start": start, "seconds": time.monotonic() - clock}
    logger.log_samples(FILE, [row], step=step)
