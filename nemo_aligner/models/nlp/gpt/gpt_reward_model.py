# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTRewardModel`: a GPT of Megatron Core that ends in a small linear head instead of a
vocabulary.

The head gives one number per sequence (a reward), a few (attributes), or one per position (a
critic's values).
Notation: B rows, S positions, H hidden size, A numbers that the head computes per position.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.context_parallel import gather_shares


class RewardModelHead(RowParallelLinear):
    """Linear map from hidden states to rewards or values, split over tensor-parallel ranks along
    H.

    It computes in a dtype of its own, which conversions of the whole model (`model.bfloat16()`)
    leave alone. Its initial weights are drawn for the whole matrix, so they do not depend on the
    split.

    Args:
        input_size: H.
        output_size: A.
        config: of the model; with `sequence_parallel` the hidden states arrive split along S.
        output_sequence: give a number for every position instead of one row of A for the sequence.
        use_avg_pool: the sequence's vector is the mean over its positions, not the one of its last
            token.
        dtype: of weights and arithmetic.
        merge_attributes: weigh the A numbers into one.
        attributes_weights: A weights for that; 1/A each by default.
        init_method, bias, input_is_parallel, stride, keep_master_weight_for_test, skip_bias_add:
            as `RowParallelLinear`'s.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Callable,
        bias: bool = True,
        input_is_parallel: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        output_sequence: bool = False,
        use_avg_pool: bool = False,
        dtype: torch.dtype = torch.float32,
        merge_attributes: bool = False,
        attributes_weights: Sequence[float] | None = None,
    ):
        self.input_is_sequence_parallel = config.sequence_parallel
        config = copy.copy(config)
        # The sequence is gathered here, before the linear map.
        config.sequence_parallel = False
        config.use_cpu_initialization = True
        config.params_dtype = dtype
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            stride=stride,
            keep_master_weight_for_test=keep_master_weight_for_test,
            skip_bias_add=skip_bias_add,
        )
        if attributes_weights is None:
            attributes_weights = [1.0 / output_size] * output_size
        if len(attributes_weights) != output_size:
            raise ValueError(
                f"{len(attributes_weights)} attribute weights for {output_size} attributes"
            )
        self.register_buffer(
            "attributes_weights",
            torch.tensor(attributes_weights, dtype=torch.float32),
            persistent=False,
        )
        self.output_sequence = output_sequence
        self.use_avg_pool = use_avg_pool
        self.merge_attributes = merge_attributes

    def _apply(self, fn, recurse=True):
        """Moves to another device, but keeps the dtype."""

        def move(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def forward(self, hidden_states: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Rewards or values; all ranks of the tensor-parallel group call it.

        Args:
            hidden_states: [S, B, H]; this rank's share of it, [S / CP, B, H], under context
                parallelism; with sequence parallelism of that again 1 / TP.
            lengths: int64 [B], tokens of each row without its padding, at least 1; not needed with
            `output_sequence`.

        Returns:
            [B, S] with `output_sequence`, else [B, 1] merged, both float32; or [B, A] in the
            head's dtype.
        """
        if self.input_is_sequence_parallel:
            # Every rank computes the same from here on, so each one's gradient is the whole one:
            # nothing to sum.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = hidden_states.to(self.weight.dtype)
            if self.output_sequence:
                attributes = gather_shares(super().forward(hidden_states)[0], 0)  # [S, B, A]
                return self._merge(attributes).transpose(0, 1).contiguous()
            # The map is linear, so pooling may come before or after it. Before is cheaper; but
            # where positions are shared out, the gradient of the weights must be that of a rank's
            # own positions.
            if parallel_state.get_context_parallel_world_size() == 1:
                attributes = (
                    super().forward(self._pool(hidden_states, lengths))[0].squeeze(0)
                )  # [B, A]
            else:
                attributes = self._pool(
                    gather_shares(super().forward(hidden_states)[0], 0), lengths
                ).squeeze(0)
            return self._merge(attributes).unsqueeze(-1) if self.merge_attributes else attributes

    def _merge(self, attributes: Tensor) -> Tensor:
        """The weighted sum over the last dimension, in float32: bfloat16 would make different
        rewards equal.
        """
        return attributes.float() @ self.attributes_weights

    def _pool(self, states: Tensor, lengths: Tensor) -> Tensor:
        """[1, B, n] from [S, B, n]: one vector per row."""
        if not self.use_avg_pool:
            rows = torch.arange(lengths.numel(), device=lengths.device)
            return states[lengths - 1, rows].unsqueeze(0)
        positions = torch.arange(states.size(0), device=lengths.device).unsqueeze(-1)
        inside = (positions < lengths).unsqueeze(-1)  # [S, B, 1]
        # A selection: 0 * NaN would stay NaN.
        return torch.where(inside, states, 0).sum(0, keepdim=True) / lengths.unsqueeze(-1)


class GPTRewardModel(GPTModel):
    """GPT with a `RewardModelHead`, `rm_head`, on the last pipeline stage; embeddings are never
    shared.

    Args:
        config, and all that is not named here: as `GPTModel`'s.
        output_sequence, use_avg_pool, merge_attributes, attributes_weights: of the head.
        num_attributes: A of the head.
        head_dtype: of the head.
        head_seed: of the head's initial weights.

    Attributes:
        return_rm_head_in_state_dict: class flag; False leaves the head out of state dicts, so that
            the weights of a plain language model can be loaded strictly.
    """

    return_rm_head_in_state_dict = True

    def __init__(
        self,
        config,
        *args,
        output_sequence: bool = False,
        use_avg_pool: bool = False,
        head_dtype: torch.dtype = torch.float32,
        num_attributes: int = 1,
        merge_attributes: bool = False,
        attributes_weights: Sequence[float] | None = None,
        head_seed: int = 1234,
        **kwargs,
    ):
        if config.fp8:
            raise ValueError(
                "a reward model cannot be trained in fp8: its head is too small; use bf16."
            )
        super().__init__(config, *args, **{**kwargs, "share_embeddings_and_output_weights": False})
        self._lengths = None
        if not self.post_process:
            return
        del self.output_layer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(head_seed)
            self.rm_head = RewardModelHead(
                config.hidden_size,
                num_attributes,
                config=config,
                init_method=config.init_method,
                output_sequence=output_sequence,
                use_avg_pool=use_avg_pool,
                dtype=head_dtype,
                merge_attributes=merge_attributes,
                attributes_weights=attributes_weights,
            )

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        *args,
        lengths: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """As `GPTModel.forward` up to the last hidden states; then the head (see
        `RewardModelHead.forward`).

        Args:
            lengths: int64 [B], tokens of each row without its padding; not needed for values of
                all positions.
        """
        self._lengths = lengths
        try:
            return super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)
        finally:
            self._lengths = None

    def _postprocess(self, hidden_states: Tensor, **_kwargs) -> Tensor:
        """The head in the place of `GPTModel`'s output layer and loss."""
        return self.rm_head(hidden_states, self._lengths) if self.post_process else hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Weights for a checkpoint that loads at any split; without the head unless
        `return_rm_head_in_state_dict`.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        # Not `GPTModel`'s and `LanguageModule`'s own, which expect an output layer.
        sharded = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        head = f"{prefix}rm_head."
        left_out = f"{head}_extra_state" if self.return_rm_head_in_state_dict else head
        return {name: value for name, value in sharded.items() if not name.startswith(left_out)}
