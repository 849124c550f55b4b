# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of a language model and of the reference policy that it started from, and their
losses. Shapes: B samples on this rank, b in a micro-batch, S padded length, R total length.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.checkpoint.dist_ckpt import make_sharded_tensors_from_reference
from nemo_aligner.checkpoint.forms import REFERENCE
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.losses import loss_weights, sft_loss
from nemo_aligner.core.tensors import one_row_per_sample
from nemo_aligner.core.types import SFTBatch
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import changed
from nemo_aligner.parallel.vocab_parallel import (
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
)
from nemo_aligner.training.megatron_steps import Batch, forward_collect

REFERENCE_PREFIX = "ref_policy_log_probs_"


class LogProbsMixin(NLPAdapterModelMixin):
    """A language model that gives the log-probs of samples, at `temperature` and
    `forward_micro_batch_size` samples per forward pass, and learns by losses of them.
    """

    temperature = 1.0
    forward_micro_batch_size: int

    def logprobs(
        self, logits: Tensor, tokens: Tensor, inference_only: bool, labels: bool = False
    ) -> Tensor:
        """Log-probs `[b, S-1]` of the tokens of a micro-batch from its vocabulary-parallel logits
        (which a backward pass overwrites); `labels`: `[b, S]`, of the label of each token.
        """
        return from_parallel_logits_to_logprobs(
            logits,
            tokens,
            inference_only=inference_only,
            ignore_last=not labels,
            **self._distribution(),
        )

    def _distribution(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            # As in sampling: ids in the padding of the vocabulary are not tokens.
            "vocab_size": self.tokenizer.vocab_size,
            "overwrite_logits": True,
        }

    def compute_loss(
        self,
        loss: Callable[..., tuple[Tensor, Batch]],
        columns: Batch,
        forward_only: bool,
        **options: Any,
    ) -> tuple[float, dict[str, float]]:
        """A loss of a global batch by the log-probs of its tokens, and its gradient unless
        `forward_only`; all ranks call it. Returns it and its metrics, equal on every rank.

        Args:
            loss: `loss(**tensors) -> (loss, metrics)`, partial sums of a micro-batch (those of
                `core/losses.py`, or your own); `loss` is a metric by itself. By the names of its
                parameters it gets `logprobs` float32 `[b, S-1]` (if there are `labels`, theirs,
                `[b, S]`), `entropy` `[b, S-1]`, and the other columns.
            columns: this rank's share: `tokens` int64 `[B, S]` and what `loss` needs; `labels`
                int64 `[B, S]` and `packed_position_ids` if the batch has them.
            options: of `run_loss`, such as `mask`.
        """
        names = inspect.signature(loss).parameters

        def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            given = {name: micro_batch[name] for name in names if name in micro_batch}
            labels = "labels" in micro_batch
            tokens = micro_batch["labels" if labels else "tokens"]
            if "entropy" in names and not labels:
                given["logprobs"], given["entropy"] = logprobs_and_entropy(
                    logits, tokens, inference_only=forward_only, **self._distribution()
                )
            else:
                given["logprobs"] = self.logprobs(logits, tokens, forward_only, labels)
            value, metrics = loss(**given)
            return value, {"loss": value.detach(), **metrics}

        metrics, _ = self.run_loss(loss_fn, columns, forward_only, **options)
        return metrics["loss"], metrics

    def compute_sft_loss(
        self, batch: SFTBatch, forward_only: bool, loss_reduction: str, micro_batch_size: int
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood of the labels of a global batch, and its gradient unless
        `forward_only`; all ranks call it with their share. Metrics: `loss`, and `weights`, the
        number of what `loss_reduction` averages over.
        """
        mask = batch["loss_mask"].to(get_device())
        columns = {"tokens": batch["tokens"], "labels": batch["labels"]}
        if "packed_position_ids" in batch:
            columns["packed_position_ids"] = batch["packed_position_ids"]
            if loss_reduction == "sequence":
                mask = one_row_per_sample(mask, batch["packed_position_ids"].to(get_device()))
        weights = loss_weights(mask, loss_reduction, micro_batch_size, sum_over_dp, self.longest)
        # Of the rows of a pack's samples, a column has a weight in one.
        columns["weights"] = weights.reshape(len(batch["tokens"]), -1, weights.size(1)).sum(1)
        loss, metrics = self.compute_loss(
            sft_loss,
            columns,
            forward_only,
            loss_reduction=loss_reduction,
            micro_batch_size=micro_batch_size,
        )
        metrics["weights"] = self.count_of_loss(mask, loss_reduction, micro_batch_size)
        return loss, metrics

    def get_inference_log_probs(
        self,
        response_tokens: Tensor,
        forward_micro_batch_size: int | None = None,
        response_lengths: Tensor | None = None,
    ) -> Tensor:
        """float32 `[B, S-1]`: column t has the log-prob of token t+1 given those before it, 0 from
        column R-1 on; every rank of a TP x PP x CP group calls it with the same samples.

        Args:
            response_tokens: int64 `[B, S]`.
            response_lengths: int64 `[B]`, R; None: S. Only as many tokens are computed.
        """
        return forward_collect(
            self.model,
            {"tokens": response_tokens},
            micro_batch_size=forward_micro_batch_size or self.forward_micro_batch_size,
            output_fn=lambda logits, batch: self.logprobs(
                logits, batch["tokens"], inference_only=True
            ),
            lengths=response_lengths,
            micro_batch_tokens=None if forward_micro_batch_size else self.micro_batch_tokens,
            by_position=True,
        )


class ReferencePolicyMixin(LogProbsMixin):
    """A policy that can also compute as the reference policy: from a copy of its weights in host
    memory, `init_policy_state_dict`, or with its adapters switched off (then that is None).
    """

    # Log-probs of the reference, in `get_ref_policy_logprobs`' order, and the masks of tokens.
    REFERENCE_COLUMNS: ClassVar[Mapping[str, str]] = {}
    init_policy_state_dict: dict[str, Tensor] | None = None
    _is_reference = False  # the present weights are the reference's
    without_reference = ""  # what to do instead, for the message of `check_reference_policy`

    # `init_policy_state_dict`, by the name in NeMo-Aligner's models of DPO and KTO.
    ref_policy_state_dict = property(
        attrgetter("init_policy_state_dict"),
        lambda self, weights: setattr(self, "init_policy_state_dict", weights),
    )

    def set_reference_policy(self) -> None:
        """Keep a copy of the present weights as the reference policy, before a checkpoint is
        resumed; with adapters do nothing: the reference policy is their base.
        """
        if not self._reference_is_base():
            self.init_policy_state_dict = self.weights_to_cpu()

    def as_reference_policy(self) -> AbstractContextManager[None]:
        """Inside, the present weights (with adapters: their base) are the reference policy,
        without a copy. For the time before training and before a checkpoint is resumed.
        """
        return changed([(self, "_is_reference", True)])

    def init_peft(self, peft_cfg: DictConfig | Mapping[str, Any] | None) -> None:
        super().init_peft(peft_cfg)
        if self._reference_is_base() and not self.starts_as_reference:
            logging.warning(
                "the reference policy is the base without the adapters that the policy starts "
                "from. For one with them, name them in pretrained_checkpoint.restore_from_path."
            )

    def _reference_is_base(self) -> bool:
        return self.use_peft

    def check_reference_policy(self) -> None:
        is_there = self.init_policy_state_dict is not None or self._is_reference
        if not is_there and not self._reference_is_base():
            raise UserError(
                "the policy has no reference; call model.set_reference_policy() before training "
                f"and before a checkpoint is resumed{self.without_reference}."
            )

    def get_init_policy_logprobs(
        self, response_tokens: Tensor, response_lengths: Tensor | None = None
    ) -> Tensor:
        """`get_inference_log_probs` under the reference, with one swap of the weights and back."""
        self.check_reference_policy()
        with self._reference_policy():
            return self.get_inference_log_probs(response_tokens, response_lengths=response_lengths)

    def get_ref_policy_logprobs(self, batch: Mapping[str, Any]) -> Tensor:
        """Log-probs float32 `[nB, S-1]` of a batch's n `REFERENCE_COLUMNS`, one after the other,
        under the reference policy, without dropout. All ranks call it; `UserError`: there is none.
        """
        masks = self.REFERENCE_COLUMNS.values()
        names = [name.removeprefix(REFERENCE_PREFIX) for name in self.REFERENCE_COLUMNS]
        self.set_eval()
        logprobs = self.get_init_policy_logprobs(
            torch.cat([batch[name] for name in names]),
            torch.cat([batch[mask.replace("mask", "length")] for mask in masks]),
        )
        self.set_train()
        return logprobs

    def _check_reference_columns(self, batch: Mapping[str, Any]) -> None:
        if next(iter(self.REFERENCE_COLUMNS)) not in batch:
            remedy = "add those of model.get_ref_policy_logprobs(batch), as the trainer does."
            raise UserError(f"the batch has no log-probs of the reference policy; {remedy}")

    def _reference_policy(self) -> AbstractContextManager[None]:
        if self._reference_is_base():
            return self.adapters_disabled()
        if self._is_reference:
            return contextlib.nullcontext()
        assert self.init_policy_state_dict is not None
        return self.swapped_weights(self.init_policy_state_dict)


class MovingReferenceMixin(ReferencePolicyMixin):
    """A policy whose reference is a former state of it (with adapters: the base with theirs),
    which changes during training. Checkpoints hold it: a job resumes with the same bits.
    """

    def _reference_is_base(self) -> bool:
        return False

    def set_reference_policy(self) -> None:
        """Keep a copy of the present weights, or adapters, in place of the reference before."""
        self.init_policy_state_dict = self.weights_to_cpu(into=self.init_policy_state_dict)

    def forget_reference_policy(self) -> None:
        """Give the memory of the reference policy back; checkpoints no longer hold it."""
        self.init_policy_state_dict = None

    @contextlib.contextmanager
    def reference_policy(self) -> Iterator[None]:
        """Inside, the model computes as the reference, by one swap and back; else `UserError`."""
        self.check_reference_policy()
        with self._reference_policy(), self.as_reference_policy():
            yield

    def sharded_reference(
        self, weights: dict[str, dict[str, Any]], is_loading: bool
    ) -> dict[str, dict[str, Any]]:
        """Sharded state dict of the reference policy, split as the policy's `weights`; empty if
        there is none. All ranks call it; with `is_loading` it makes room for values that
        `load_sharded_reference` fills in.
        """
        if is_loading:
            self.set_reference_policy()
        reference = self.init_policy_state_dict
        if reference is None:
            return {}
        return {
            chunk: {
                name: make_sharded_tensors_from_reference(
                    entry, reference[_place(chunk, name)], REFERENCE
                )
                for name, entry in entries.items()
                if isinstance(entry, ShardedTensor | ShardedTensorFactory)
            }
            for chunk, entries in weights.items()
        }

    def load_sharded_reference(self, loaded: dict[str, dict[str, Any]]) -> None:
        """Take over what `dist_checkpointing.load` returned for `sharded_reference`."""
        reference = self.init_policy_state_dict
        assert reference is not None
        for chunk, entries in loaded.items():
            for name, value in entries.items():
                reference[_place(chunk, name)].copy_(value)


def _place(chunk: str, name: str) -> str:
    """Key in `weights_to_cpu` of a weight of `sharded_weights`."""
    return f"{chunk.removeprefix('model')}.{name.removeprefix('model.')}"
