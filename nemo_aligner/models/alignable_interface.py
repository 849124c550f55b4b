# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The roles that a model can play. Trainers and servers know models through these classes only.

All ranks of the job call every method together, those of one tensor x pipeline parallel group with
the same samples, each data-parallel rank with its own. Results are on every rank of the group.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.core.types import InferenceBatch, Rollout


class SupervisedInterface(ABC):
    """A model that learns from batches: one call of `get_loss_and_metrics` per optimizer update.
    `cfg` is the `model` section of the configuration, with `seed` and `global_batch_size`.
    """

    cfg: DictConfig

    @abstractmethod
    def get_loss_and_metrics(
        self, batch: Any, forward_only: bool
    ) -> tuple[float, Mapping[str, float | Tensor]]:
        """Loss of a global batch, and its gradient unless `forward_only`. `batch`: this
        data-parallel rank's samples of it, a dict of `core/types.py`; the model cuts it into
        micro-batches. Returns loss and metrics over the global batch, equal on all ranks: Python
        numbers, or moments (`core/metrics.py`), float64 tensors on the CPU.
        """

    @abstractmethod
    def prepare_for_training_step(self) -> None:
        """Called before the `get_loss_and_metrics` of an update."""

    @abstractmethod
    def finish_training_step(self) -> None:
        """Called after that `get_loss_and_metrics`, before the optimizer step."""

    def prepare_for_validation_step(self) -> None:  # noqa: B027  (optional)
        """Called before a `get_loss_and_metrics` with `forward_only`."""

    def finish_validation_step(self) -> None:  # noqa: B027
        """Called after that `get_loss_and_metrics`."""

    def unwrapped(self) -> list[torch.nn.Module]:
        """This rank's bare model chunks, whose weights the alarms compare with their replicas."""
        return []

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Metrics to report, from those of `get_loss_and_metrics` averaged over batches (weighted
        by `weights`); a model whose metrics hold moments overrides it.
        """
        return {key: float(value) for key, value in metrics.items()}


class Inferrable(ABC):
    """A model that runs inference between `prepare_for_inference` and `finish_inference`."""

    @abstractmethod
    def prepare_for_inference(self) -> None:
        """Enter inference: no dropout, and memory that only training needs may be given back."""

    @abstractmethod
    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs for this data-parallel rank's inputs; the model says which."""

    @abstractmethod
    def finish_inference(self) -> None:
        """Leave inference."""


class _TakesTurns(SupervisedInterface, Inferrable):
    """Training and inference alternate."""

    @abstractmethod
    def prepare_for_training(self) -> None:
        """Called before a series of updates and before a checkpoint is written."""

    def finish_training(self) -> None:  # noqa: B027  (optional)
        """Called after those updates, or after the checkpoint is written."""


class CriticModelInterface(_TakesTurns):
    """A critic."""

    @abstractmethod
    def infer_rm_critic(self, *args: Any, **kwargs: Any) -> Any:
        """(rewards, values) of the same sequences, in this order."""

    def infer_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """The rewards alone; a model whose values cost more than that overrides it."""
        return self.infer_rm_critic(*args, **kwargs)[0]


class AlignableGenerativeInterface(_TakesTurns):
    """A policy, which generates with `infer`. `tokenizer.eos_id` ends responses and pads them;
    `starts_as_reference`: policy and reference must agree before the first update (False if the
    policy starts from earlier adapters, for example).
    """

    tokenizer: Tokenizer
    starts_as_reference = True

    def check_reference_policy(self) -> None:  # noqa: B027  (optional)
        """Raise `UserError` if there is to be a reference and something was forgotten."""

    @abstractmethod
    def infer(self, inference_batch: InferenceBatch) -> Rollout:
        """One response to each prompt."""

    def infer_all(
        self, batches: Iterable[InferenceBatch]
    ) -> Iterator[tuple[InferenceBatch, Rollout]]:
        """One response to each prompt of all batches, in groups as the model finishes them: the
        prompts of a group (their one-dimensional columns), and its responses.
        """
        for batch in batches:
            yield batch, self.infer(batch)

    @abstractmethod
    def get_inference_log_probs(
        self,
        response_tokens: Tensor,
        forward_micro_batch_size: int | None = None,
        response_lengths: Tensor | None = None,
    ) -> Tensor:
        """Log-probs float32 `[B, S-1]` of the tokens int64 `[B, S]`, at the sampling temperature;
        anything beyond the lengths int64 `[B]`, R.
        """


class PolicyWithReference(AlignableGenerativeInterface):
    """A policy that can also compute the log-probs of the policy that training started from."""

    @abstractmethod
    def get_init_policy_logprobs(
        self, response_tokens: Tensor, response_lengths: Tensor | None = None
    ) -> Tensor:
        """`get_inference_log_probs` under the reference."""
