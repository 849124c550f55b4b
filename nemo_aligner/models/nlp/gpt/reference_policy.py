# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference policy that a policy started from.

Shapes: B samples on this rank, S padded length, R total length of a sample.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.checkpoint.dist_ckpt import make_sharded_tensors_from_reference
from nemo_aligner.checkpoint.forms import REFERENCE
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.log_probs import LogProbsMixin


class ReferencePolicyMixin(LogProbsMixin):
    """A policy that can also compute as the reference policy: from a copy of its weights in host
    memory, or with its adapters switched off.

    Attributes:
        init_policy_state_dict: weights of the reference policy in host memory, from
            `set_reference_policy`, or None; with adapters it is the base, and this is None.
    """

    init_policy_state_dict: dict[str, Tensor] | None = None
    _is_reference = False  # the present weights are the reference's
    without_reference = ""  # what to do instead, for the message of `check_reference_policy`

    @property
    def ref_policy_state_dict(self) -> dict[str, Tensor] | None:
        """`init_policy_state_dict`, by the name in NeMo-Aligner's models of DPO and KTO."""
        return self.init_policy_state_dict

    @ref_policy_state_dict.setter
    def ref_policy_state_dict(self, weights: dict[str, Tensor] | None) -> None:
        self.init_policy_state_dict = weights

    def set_reference_policy(self) -> None:
        """Keep a copy of the present weights as the reference policy; with adapters do nothing:
        the reference policy is their base.

        Call it before a checkpoint is resumed.
        """
        if not self._reference_is_base():
            self.init_policy_state_dict = self.weights_to_cpu()

    @contextlib.contextmanager
    def as_reference_policy(self) -> Iterator[None]:
        """Inside, the present weights (with adapters: their base) are the reference policy, which
        needs no copy. For the time before training and before a checkpoint is resumed.
        """
        self._is_reference = True
        try:
            yield
        finally:
            self._is_reference = False

    def init_peft(self, peft_cfg: DictConfig | Mapping[str, Any] | None) -> None:
        super().init_peft(peft_cfg)
        if self._reference_is_base() and not self.starts_as_reference:
            logging.warning(
                "the reference policy is the base without the adapters that the policy starts "
                "from: the KL does not start at 0, nor the loss of DPO at log 2. For a reference "
                "with them, name them in pretrained_checkpoint.restore_from_path instead."
            )

    def _reference_is_base(self) -> bool:
        """Whether the reference policy is the model without its adapters."""
        return self.use_peft

    def check_reference_policy(self) -> None:
        is_there = self.init_policy_state_dict is not None or self._is_reference
        if not is_there and not self._reference_is_base():
            raise UserError(
                "the policy has no reference to compare with; call "
                "model.set_reference_policy() before training and before a checkpoint is resumed"
                f"{self.without_reference}."
            )

    def get_init_policy_logprobs(
        self, response_tokens: Tensor, response_lengths: Tensor | None = None
    ) -> Tensor:
        """`get_inference_log_probs` under the reference policy: swaps the weights once, and back,
        or switches the adapters off.

        Returns:
            float32 `[B, S-1]`.

        Raises:
            UserError: `set_reference_policy` was not called.
        """
        self.check_reference_policy()
        with self._reference_policy():
            return self.get_inference_log_probs(response_tokens, response_lengths=response_lengths)

    def _reference_policy(self) -> AbstractContextManager[None]:
        """Inside, the model computes as the reference policy."""
        if self._reference_is_base():
            return self.adapters_disabled()
        if self._is_reference:
            return contextlib.nullcontext()
        assert self.init_policy_state_dict is not None
        return self.swapped_weights(self.init_policy_state_dict)


class MovingReferenceMixin(ReferencePolicyMixin):
    """A policy whose reference is a former state of it, which changes during training. Checkpoints
    hold it, so that a job resumes with the same bits.

    With adapters the reference is the base with the adapters of that state.
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
        """Sharded state dict of the reference policy, split over the ranks as `weights`, that of
        the policy, is; empty if there is no reference policy. All ranks call it.

        Args:
            is_loading: make room for a reference policy, whose values `load_sharded_reference`
                fills in.
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
