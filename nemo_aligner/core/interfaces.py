# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What trainers expect of the parts that are not models (those: `models/alignable_interface.py`).

A class fulfils a protocol by having its methods, as the remote clients and the fakes of the tests
do; `algorithms/training_loop.py` completes parts that have NeMo-Aligner's only. Unless a method
says otherwise, every rank of the job calls it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from nemo_aligner.core.types import InferenceBatch, PPOTrainBatch, Rollout, Scores

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The outcome of a request that was sent to another process."""

    def result(self) -> T_co:
        """Wait for the outcome, on every rank; or raise `ServerRequestError` there, with cause."""


class PendingScores(Protocol):
    """The scores of one rollout micro-batch, while a server computes them. `pending`: what this
    rank itself waits for (`servers/futures.py:wait_for_all`); empty where another rank tells it.
    """

    pending: tuple[Any, ...]

    def scores(self) -> Scores:
        """Wait for the scores and return them on every rank; raises as `Pending.result`."""


class RewardSource(Protocol):
    """One or several remote reward models."""

    def infer_rm(self, rollout_batch: Rollout) -> PendingScores:
        """Send a micro-batch to be scored; returns at once. The scores have no values."""


class Teacher(Protocol):
    """What gives log-probs of a policy's own tokens."""

    def beside(self, scores: PendingScores, rollout_batch: Rollout) -> PendingScores:
        """Send a micro-batch off; returns at once. The result is `scores` with the log-probs."""


class Critic(Protocol):
    """A remote critic and reward model; or reward models alone, with the same methods."""

    def infer_rm_critic(self, rollout_batch: Rollout) -> PendingScores:
        """Send a micro-batch to be scored; returns at once."""

    def train(self, rollout_batch: PPOTrainBatch) -> Pending[float | None]:
        """Send this rank's share of a rollout for an update; returns at once. The outcome is the
        mean loss, or None without a critic to train.
        """

    def save(self, actor_step: int | None = None) -> Pending[int | None]:
        """Have the critic write a checkpoint that belongs to `actor_step`; returns at once."""

    def check_status(self, expected_actor_step: int, checkpoints: dict[int, str]) -> None:
        """Raise `UserError`, on every rank, unless the critic's weights belong to this actor's
        step (0: a new run), or it can go back to them. `checkpoints`: the actor's, by step.
        """


class Logger(Protocol):
    """Where metrics and samples go (`training/loggers.py`)."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at `step`."""

    def log_table(self, key: str, dataframe: Any, step: int | None = None) -> None:
        """Log a table as a whole."""

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int | None = None) -> None:
        """Log prompts with their responses."""

    def finalize(self) -> None:
        """Write what is still in memory."""


class CheckpointWriter(Protocol):
    """Writes checkpoints (`checkpoint/checkpointing.py`)."""

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background; the same on all ranks."""

    def custom_save(
        self,
        monitor_candidates: Mapping[str, Any],
        is_train_end: bool = False,
        trainer_state: dict[str, Any] | None = None,
    ) -> Any:
        """Write a checkpoint, ranked by one of `monitor_candidates`, or begin to."""

    def check_save(self) -> None:
        """Complete what is written in the background, if that has ended."""

    def finish_save(self) -> None:
        """Wait for what is written in the background, and complete it."""

    def finish_export(self) -> None:
        """Write what is still missing beside the loaded last checkpoint of a finished training."""

    def saved_at(self, counter: str) -> dict[int, str]:
        """Folder of each complete checkpoint, by the counter `counter` of its `trainer_state`."""


class RunTimer(Protocol):
    """The wall-clock limit of this run (`training/schedule.py`)."""

    def start_time(self) -> None:
        """Start the clock."""

    def is_finished(self) -> bool:
        """True on every rank once the time is over."""


# Megatron Core's, or what has the same: `param_groups`, `zero_grad()` and `step() -> (succeeded,
# norm of the gradient, number of zeros in it)` the first, `step(increment=updates)` the second.
Optimizer = Any
Scheduler = Any


class PromptSampler(Protocol):
    """Yields the dataset indices of this rank's micro-batches, one rollout after the other."""

    total_samples: int
    consumed_samples: int
    global_batch_size: int  # prompts of one rollout, over all ranks
    micro_batch_size: int
    drop_last: bool

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of one micro-batch after the other."""


class PromptLoader(Protocol):
    """A data loader of prompts."""

    batch_sampler: PromptSampler
    dataset: Any

    def __iter__(self) -> Iterator[InferenceBatch]:
        """The micro-batches."""


PromptLoaderBuilder = Callable[..., PromptLoader]  # called as builder(consumed_samples=...)
PromptIterator = Callable[..., Iterable[InferenceBatch]]  # see data/nlp/samplers.py
