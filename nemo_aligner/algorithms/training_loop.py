# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop over the steps that all trainers share, how it logs, and the door for users' parts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.algorithms.alarms import Alarms
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.endings import ExitCode, JobStopped
from nemo_aligner.core.errors import SaveError, ServerRequestError, UserError, cause_of
from nemo_aligner.core.types import Optimizer, Rollout, Scheduler, Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.futures import FutureScores, OtherFuture, await_on_source, wait_for_all
from nemo_aligner.training import schedule
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.passes import forget_token_counts
from nemo_aligner.training.stop_requests import stop_requests

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
    """What every trainer works with; logger and checkpoints may be NeMo-Aligner's or a user's."""

    cfg: DictConfig  # the trainer's section; missing keys take their values from the YAML file
    model: Any
    optimizer: Optimizer
    scheduler: Scheduler
    logger: CustomLoggerWrapper
    ckpt_callback: CheckpointCallback
    run_timer: schedule.Timer


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
            schedule.warn_of_unreachable_steps(self.section, self.cfg, *steps)
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
                run_val, save_model, is_train_end = schedule.check_progress(
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
            logging.warning(
                f"step {self.step} of {self.max_steps}: training is already complete, nothing was "
                f"trained; raise {self.section}.max_steps or max_epochs to continue, or give "
                "another job a folder of its own (exp_manager.explicit_log_dir)."
            )
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


def consume_timings(*timers: schedule.ScopedTimer) -> dict[str, float]:
    """Seconds by name since the last call, of the slowest rank; all ranks call it."""
    durations: dict[str, float] = {}
    for timer in timers:
        durations |= timer.consume_durations()
    return all_reduce_dict(durations, op=torch.distributed.ReduceOp.MAX)


def empty_table() -> pd.DataFrame:
    import pandas as pd  # takes a second to import

    return pd.DataFrame(columns=TABLE_COLUMNS, index=pd.RangeIndex(0))


def log_table(
    logger: CustomLoggerWrapper,
    key: str,
    table: pd.DataFrame,
    rows: list[dict[str, Any]],
    step: int,
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


# ------------------------------------------------------------------------- parts that a user wrote
# NeMo-Aligner's interface of each part is enough, and what it lacks of this package's is added; a
# complete part comes back as it is.


class _Completed:
    def __init__(self, part: Any, added: Mapping[str, Any]):
        self._part, self._added = part, added

    def __getattr__(self, name: str) -> Any:
        return self._added[name] if name in self._added else getattr(self._part, name)


def _takes(function: Callable[..., Any], argument: str) -> bool:
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of a method that a part need not have."""


# --------------------------------------------------------------------------------- remote models


class _RankZeroOutcome(OtherFuture):
    """What a user's future gives on rank 0, on every rank; there may be none on the others."""

    def result(self) -> Any:
        own = SimpleNamespace(done=self.done, result=super().result)
        wait_for_all([own])  # each rank asks its own: there may be collectives in it
        return await_on_source(own, 0, dist.group.WORLD if dist.is_initialized() else None)


def scores_of(infer: Callable[[Rollout], Any]) -> Callable[[Rollout], FutureScores]:
    """`infer_rm` or `infer_rm_critic`; its future need not have `scores()`: see `_read_scores`."""

    def ask(rollout: Rollout) -> FutureScores:
        future: Any = infer(rollout)
        if not hasattr(future, "scores"):
            future = OtherFuture(future, lambda got: _read_scores(got, rollout))
        return cast(FutureScores, future)

    return ask


def _read_scores(got: Any, rollout: Rollout) -> Scores:
    """Scores from rewards `[b]` or `[b, 1]`, or from these and values `[b, S-1]`."""
    is_pair = isinstance(got, (tuple, list)) and hasattr(got[0], "shape")
    rewards, values = got if is_pair else (got, None)
    rewards = torch.as_tensor(rewards, device=get_device()).float().flatten()
    samples, width = rollout["response_tokens"].shape
    if len(rewards) != samples:
        raise UserError(f"the client gave {len(rewards)} rewards for {samples} responses.")
    if values is not None:  # of the responses' own width, or of a wider batch
        values = torch.as_tensor(values, device=get_device()).float()[:, : width - 1]
        values = torch.nn.functional.pad(values, (0, width - 1 - values.shape[1]))
    return Scores(rewards, values)


def complete_critic(client: Any) -> Any:
    """A critic client, of which `infer_rm_critic`, `train(data)` and `save()` are enough."""

    def warn(*_args: Any) -> None:
        logging.warning(
            f"{type(client).__name__} has no check_status; when you restart one job, see to it "
            "that the other one loads the checkpoint of the same step."
        )

    added = {
        "train": lambda data: _RankZeroOutcome(client.train(data), _read_loss),
        "save": lambda actor_step=None: _RankZeroOutcome(client.save(), _nothing),
        "check_status": warn,
    }
    return client if hasattr(client, "check_status") else _Completed(client, added)


def _read_loss(got: Any) -> float | None:
    loss = got.get("loss_mean") if isinstance(got, Mapping) else got
    return None if loss is None else float(torch.as_tensor(loss).flatten()[0])


# ------------------------------------------------------------------------------ models, and others


def log_probs(compute: Callable[..., Tensor], tokens: Tensor, lengths: Tensor) -> Tensor:
    """A model's `get_inference_log_probs` or `get_init_policy_logprobs`, maybe without lengths."""
    if _takes(compute, "response_lengths"):
        return compute(tokens, response_lengths=lengths)
    return compute(tokens)


def complete_outputs(logger: Any, callback: Any) -> tuple[CustomLoggerWrapper, Any]:
    """What every trainer writes with. Enough are a logger without `log_samples`, and a
    `CheckpointCallback` with `custom_save(monitor_candidates, is_train_end)` alone, whose
    checkpoints are complete when that returns, and are not known afterwards.
    """
    if not hasattr(logger, "log_samples"):
        logger = _Completed(logger, {"log_samples": _nothing})
    optional: dict[str, Any] = {"is_saving": False, "saved_at": lambda counter: {}}
    optional |= dict.fromkeys(("check_save", "finish_save", "finish_export"), _nothing)
    added = {name: value for name, value in optional.items() if not hasattr(callback, name)}
    if callback is not None and not _takes(callback.custom_save, "trainer_state"):
        added["custom_save"] = functools.partial(_save, callback)
    return logger, _Completed(callback, added) if added else callback


def _save(
    callback: Any, monitor_candidates: Mapping[str, Any], is_train_end: bool, trainer_state: Any
) -> None:
    """Call `callback` as NeMo-Aligner does, with tensors; an error of one rank is all's."""
    numbers = {k: v for k, v in monitor_candidates.items() if isinstance(v, (int, float, Tensor))}
    candidates = {name: torch.as_tensor(number) for name, number in numbers.items()}
    failed = []
    try:
        callback.custom_save(monitor_candidates=candidates, is_train_end=is_train_end)
    except Exception as error:
        failed = [ServerRequestError(cause_of(error))]
    try:
        wait_for_all(failed)
    except ServerRequestError as error:
        raise SaveError(f"{type(callback).__name__}.custom_save: {error}") from None
