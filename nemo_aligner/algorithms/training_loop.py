# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop over the steps that all trainers share, and how it logs: progress, timings, samples."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.algorithms.alarms import Alarms
from nemo_aligner.algorithms.parts import complete_outputs
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.endings import ExitCode, JobStopped
from nemo_aligner.core.interfaces import CheckpointWriter, Logger, Optimizer, RunTimer, Scheduler
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.training.schedule import check_progress, say_complete, warn_of_unreachable_steps
from nemo_aligner.training.stop_requests import stop_requests
from nemo_aligner.training.timers import ScopedTimer
from nemo_aligner.training.token_counts import forget_token_counts

if TYPE_CHECKING:
    import pandas as pd

TABLE_COLUMNS = ["step", "prompt", "response", "reward"]
TRAIN_TABLE_ROWS, VAL_TABLE_ROWS = 1, 5
# Loggers such as W&B upload the whole table each time; tables.jsonl has all rows.
KEPT_ROWS = 200
QUIET_S = 60.0  # between two states of the bar in a file
SHOWN = (  # metrics beside the bar, those of them that a job has
    "train_rewards",
    "train_global_rewards",
    "train_selected_rewards",
    "train_init_policy_kl",
    "train_generation_length",
    "train_global_response_lengths_mean",
    "train_generated_tokens_per_s",
    "train_loss",
    "train_critic_loss",
    "val_rewards",
    "val_global_rewards",
    "val_loss",
    "train_tokens_per_s",
    "train_mfu",
)


@dataclass(frozen=True)
class Parts:
    """What every trainer works with; logger and checkpoints may be NeMo-Aligner's (`parts.py`)."""

    cfg: DictConfig  # the trainer's section; missing keys take their values from the YAML file
    model: Any
    optimizer: Optimizer
    scheduler: Scheduler
    logger: Logger
    ckpt_callback: CheckpointWriter
    run_timer: RunTimer


class TrainingLoop(ABC):
    """Runs the steps of a trainer; see `fit`. `step` counts the finished ones."""

    bar = "Training steps"  # name of the progress bar
    max_steps: int
    num_steps_per_epoch: int
    val_check_interval: int
    save_interval: int
    run_init_validation: bool

    def __init__(self, parts: Parts, job: tuple[str, str], section: str | None = None):
        """`job`: YAML file and section of the defaults; `section`: name of `cfg` in messages."""
        self.cfg, self.section = complete(parts.cfg, *job), section or job[1]
        self.model, self.optimizer, self.scheduler = parts.model, parts.optimizer, parts.scheduler
        self.run_timer = parts.run_timer
        self.logger, self.ckpt_callback = complete_outputs(parts.logger, parts.ckpt_callback)
        self.alarms = Alarms(f"{self.section}.alarms", self.cfg.alarms)
        self.step = self.consumed_samples = 0

    @property
    @abstractmethod
    def limit_val_batches(self) -> int | float | None:
        """How many batches a validation has; 0: there is none."""

    def fit(self) -> None:
        """Train until the last step, or until the job is asked to end; all ranks call it.

        Validates and saves if the intervals say so, at the end, and when the time is over; saves
        also if a signal asks the job to end. `JobStopped`: after that save.
        """
        self.run_timer.start_time()
        forget_token_counts()
        is_complete = self.step >= self.max_steps
        if is_complete:
            with self.ready_to_save():
                self.ckpt_callback.finish_export()
        else:
            steps = self.max_steps, self.num_steps_per_epoch
            warn_of_unreachable_steps(self.section, self.cfg, *steps)
        if self.step == 0:
            self.before_first_step()

        val_metrics: dict[str, Any] = {}
        stop: JobStopped | None = None
        with (
            progress_bar(self.bar, self.step, self.max_steps) as progress,
            stop_requests.in_loop(self.step, self.max_steps, self.save_interval > 0),
        ):
            while self.step < self.max_steps and stop is None:
                train_metrics = self.run_step()
                self.step += 1
                self.ckpt_callback.check_save()

                stop = stop_requests.after_step(self.step, self.run_timer)
                run_val, save_model, is_train_end = check_progress(
                    self.step,
                    self.max_steps,
                    self.val_check_interval,
                    self.save_interval,
                    self.limit_val_batches,
                    run_time_exceeded=stop is not None and stop.code == ExitCode.TIME,
                    must_save=stop is not None,
                )
                if run_val:
                    val_metrics = self.validate()
                candidates = show_progress(progress, train_metrics, val_metrics)
                if save_model:  # a validation of an earlier step would not be of these weights
                    self.save(
                        candidates if run_val else _prefixed("train_", train_metrics),
                        is_train_end=is_train_end,
                    )
                    stop = stop or stop_requests.signalled()
            if stop is None:
                self.after_last_step()
            self.finish_saves()
        self.logger.finalize()
        if is_complete:
            say_complete(self.step, self.max_steps, self.section)
        if stop is not None:
            stop_requests.leave(stop)

    def before_first_step(self) -> None:
        if self.run_init_validation and self.limit_val_batches != 0:
            self.validate()

    def after_last_step(self) -> None:  # noqa: B027
        """What a run does after its last step, and again if it was complete: it may have died."""

    @abstractmethod
    def run_step(self) -> dict[str, Any]:
        """One step; returns its metrics, for the progress bar and to rank checkpoints by."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Validate and log; returns the metrics that checkpoints are ranked by."""

    def save(
        self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False
    ) -> None:
        """Save a checkpoint, which may be ranked by `extra_candidates`; all ranks call it."""
        with self.ready_to_save():
            self.write_checkpoint(extra_candidates, is_train_end)

    def ready_to_save(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def write_checkpoint(
        self, extra_candidates: dict[str, Any] | None, is_train_end: bool
    ) -> None:
        state = self.state_dict()
        self.ckpt_callback.custom_save(
            monitor_candidates=state | (extra_candidates or {}),
            is_train_end=is_train_end,
            trainer_state=state,
        )

    def finish_saves(self) -> None:
        """Wait for what is being saved in the background; all ranks call it."""
        self.ckpt_callback.finish_save()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The counters, which `load_state_dict` takes."""


def consume_timings(*timers: ScopedTimer) -> dict[str, float]:
    """Seconds by name since the last call, of the slowest rank; all ranks call it."""
    durations: dict[str, float | Tensor] = {
        name: seconds for timer in timers for name, seconds in timer.consume_durations().items()
    }
    return all_reduce_dict(
        durations, dtype=torch.float64, group=None, op=torch.distributed.ReduceOp.MAX
    )


def empty_table() -> pd.DataFrame:
    import pandas as pd  # takes a second to import

    return pd.DataFrame(columns=TABLE_COLUMNS, index=pd.RangeIndex(0))


def log_table(
    logger: Logger, key: str, table: pd.DataFrame, rows: list[dict[str, Any]], step: int
) -> pd.DataFrame:
    """`table` with the `rows` of `step`, logged: the newest `KEPT_ROWS`, numbered as in all."""
    import pandas as pd

    new = pd.DataFrame([{"step": step} | row for row in rows], columns=TABLE_COLUMNS)
    new.index = pd.RangeIndex(table.index.stop, table.index.stop + len(new))
    # An empty table has columns of no type, which must not decide those of the result.
    table = pd.concat([table, new]).tail(KEPT_ROWS) if len(table) else new.tail(KEPT_ROWS)
    logger.log_table(key=key, dataframe=table, step=step)
    return table


def progress_bar(name: str, step: int, max_steps: int) -> tqdm:
    """A bar over the steps of a run, on rank 0; in a file, a line for every `QUIET_S` seconds."""
    watched = sys.stderr.isatty()
    return tqdm(
        total=max_steps,
        initial=step,
        desc=name,
        disable=parallel_state.get_rank() != 0,
        dynamic_ncols=watched,
        file=sys.stderr if watched else _Lines(),
        mininterval=0.1 if watched else QUIET_S,
        maxinterval=10.0 if watched else QUIET_S,
        miniters=1,
    )


class _Lines:
    def write(self, text: str) -> None:
        text = text.strip("\r\n ")
        if text:
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def show_progress(
    progress: tqdm, train_metrics: Mapping[str, Any], val_metrics: Mapping[str, Any]
) -> dict[str, float]:
    """Advance the bar; returns all metrics as `train_*` and `val_*`, to rank checkpoints by."""
    metrics = _prefixed("train_", train_metrics) | _prefixed("val_", val_metrics)
    shown = {key.removeprefix("train_"): key for key in SHOWN if key in metrics}
    values = {name: f"{metrics[key]:.4g}" for name, key in shown.items()}
    progress.set_postfix(values, refresh=False)
    progress.update(1)
    return metrics


def _prefixed(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    return {f"{prefix}{key}": float(value) for key, value in metrics.items()}
