# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""When a training loop validates, saves and stops: its arithmetic, the wall-clock limit of a run,
durations of named phases, and the timeline of a job.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import ConfigError, UserError, unknown
from nemo_aligner.core.types import PromptSampler
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce, on_rank_zero
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.loggers import CustomLoggerWrapper


def compute_limit_batches(number_of_batches: int, limit_batches: int | float | None) -> int:
    """Batches to use: `limit_batches` is a fraction (a float; at least one batch unless 0), a cap
    (an int), or None for all. `ConfigError`: a negative limit, or a float above 1.
    """
    if limit_batches is None:
        return number_of_batches
    if limit_batches < 0:
        raise ConfigError(
            f"limit_train_batches / limit_val_batches = {limit_batches} must not be negative."
        )
    if isinstance(limit_batches, float):
        if limit_batches > 1:
            raise ConfigError(
                f"limit_train_batches / limit_val_batches = {limit_batches}: a float is at most "
                f"1.0; write {int(limit_batches)} without the point for a number of batches."
            )
        # 100 * 0.29 is 28.999...: the small addend keeps the floor at 29.
        share = int(number_of_batches * limit_batches + 1e-6)
        limit_batches = max(share, 1) if limit_batches else 0
    return min(number_of_batches, limit_batches)


def interval_in_steps(key: str, interval: int | float, steps_per_epoch: int) -> int:
    """Steps between two validations or checkpoints (`key`); 0 and below: never. `interval` is in
    steps, or a float: a part of an epoch, of at least one step (else `ConfigError`).
    """
    if not isinstance(interval, float):
        return interval
    if not 0 <= interval <= 1:
        raise ConfigError(
            f"{key}={interval}: a float is a part of an epoch, from 0.0 to 1.0; write "
            f"{int(interval)} without the point for a number of steps."
        )
    return compute_limit_batches(steps_per_epoch, interval)


def compute_num_steps_per_epoch(
    sampler: PromptSampler, limit_train_batches: int | float | None = 1.0
) -> int:
    """Whole global batches in an epoch of a sampler that drops incomplete ones (`ConfigError`)."""
    if not sampler.drop_last:
        raise ConfigError("training needs drop_last=True: an incomplete batch makes no step.")
    batches = sampler.total_samples // sampler.global_batch_size
    return compute_limit_batches(batches, limit_train_batches)


def compute_max_steps(num_steps_per_epoch: int, max_epochs: int, max_steps: int) -> int:
    """Steps of a run: all epochs, capped by `max_steps` unless that is negative."""
    total = num_steps_per_epoch * max_epochs
    return min(total, max_steps) if max_steps >= 0 else total


def warn_of_unreachable_steps(section: str, cfg: Any, reached: int, steps_per_epoch: int) -> None:
    """Say that the data end before `max_steps`."""
    asked = cfg.max_steps
    if asked is None or asked <= reached:
        return
    step = steps_per_epoch * cfg.get("max_iterations", 1)
    logging.warning(
        f"{section}.max_steps={asked} is not reached: {section}.max_epochs={cfg.max_epochs} ends "
        f"the job after step {reached}, with {steps_per_epoch} steps in an epoch of the data; set "
        f"{section}.max_epochs={cfg.max_epochs - (reached - asked) // step}."
    )


def endless_batches(dataloader: Any, counters: Any) -> Iterator[Any]:
    """The batches, epoch after epoch, of a loader with a sampler of `data/nlp/samplers.py`, from
    the position of a trainer (`counters`) on; `UserError`: there is none.
    """
    while True:
        # Set here: the sampler of a loader with workers runs ahead of the training.
        dataloader.batch_sampler.consumed_samples = counters.sampler_start
        started_at = counters.consumed_samples
        yield from dataloader
        if counters.consumed_samples == started_at:
            raise UserError(
                f"no training data left after {started_at} samples, at step {counters.step} of "
                f"{counters.max_steps}: the data set or the batch size has changed since the "
                "checkpoint."
            )


def safe_is_divisible(a: int, b: int) -> bool:
    """Whether `b` divides `a`; 0 divides nothing."""
    return b != 0 and a % b == 0


def check_progress(
    step: int,
    max_steps: int,
    val_check_interval: int,
    save_interval: int,
    limit_val_batches: int | float | None,
    run_time_exceeded: bool = False,
    must_save: bool = False,
) -> tuple[bool, bool, bool]:
    """What to do after `step` finished steps: (run validation, save a checkpoint, training is at
    its end). Each of the first two is on if its interval is positive (and there are batches), and
    happens at its multiples, at the end, and when the time is over; a validation also with a save
    at its interval, whose checkpoint is ranked by it; a save also when the job must end
    (`must_save`).
    """
    validates, saves = limit_val_batches != 0 and val_check_interval > 0, save_interval > 0
    is_train_end = step == max_steps
    last = is_train_end or run_time_exceeded
    save_due = saves and (last or step % save_interval == 0)
    run_val = validates and (last or save_due or step % val_check_interval == 0)
    return run_val, save_due or (saves and must_save), is_train_end


def supervised_max_steps(
    trainer_cfg: DictConfig, train_dataloader: Any, more_steps: int = 0
) -> int:
    """Optimizer updates of a supervised job, the horizon of its learning rate, from its complete
    section `trainer.sft`, ... (`max_iterations`, of SPIN: repetitions of its epochs) and the
    `more_steps` of epochs that had another global batch size for some time. `ConfigError`: neither
    epochs nor steps say when training ends.
    """
    max_epochs, max_steps = trainer_cfg.max_epochs, trainer_cfg.max_steps
    limits = [] if max_steps is None or max_steps < 0 else [max_steps]
    if max_epochs is not None:
        steps_per_epoch = compute_num_steps_per_epoch(
            train_dataloader.batch_sampler, trainer_cfg.limit_train_batches
        )
        epochs = trainer_cfg.get("max_iterations", 1) * max_epochs
        limits.append(epochs * steps_per_epoch + more_steps)
    if not limits:
        raise ConfigError("max_epochs=null needs max_steps: set one, so that training ends.")
    return min(limits)


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
            raise unknown("reduction", reduction, _REDUCTIONS)
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
        self.duration_s = float("inf")
        if isinstance(duration, timedelta):
            self.duration_s = duration.total_seconds()
        elif duration is not None:
            parts = str(duration).strip().split(":")
            if len(parts) != 4 or not all(part.isdecimal() for part in parts):
                form = "DD:HH:MM:SS, for example 00:03:45:00"
                raise ConfigError(f"max_time_per_run={duration!r} is not of the form {form}")
            days, hours, minutes, seconds = map(int, parts)
            self.duration_s = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        self._start: float | None = None

    def start_time(self) -> None:
        """Start the clock; later calls change nothing."""
        if self._start is None:
            self._start = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start; 0 before it."""
        return 0.0 if self._start is None else time.monotonic() - self._start

    def get_time_elapsed(self) -> float:
        """`elapsed_s`, by NeMo-Aligner's name."""
        return self.elapsed_s()

    def get_time_remaining(self) -> float:
        """Seconds until the limit; infinite without one."""
        return self.duration_s - self.elapsed_s()

    def is_finished(self) -> bool:
        """True once the time is over. All ranks call it; rank 0 decides, because clocks differ."""
        if self.duration_s == float("inf"):
            return False
        return on_rank_zero(lambda: self.elapsed_s() >= self.duration_s)


# ----------------------------------------------------------------------------------- the timeline

FILE = "timeline"  # .jsonl


@contextmanager
def logged_phase(logger: CustomLoggerWrapper, step: int, phase: str) -> Iterator[None]:
    """Append the scope to the timeline of the job, unless it raises."""
    start, clock = time.time(), time.monotonic()
    yield
    row = {"phase": phase, "start": start, "seconds": time.monotonic() - clock}
    logger.log_samples(FILE, [row], step=step)
