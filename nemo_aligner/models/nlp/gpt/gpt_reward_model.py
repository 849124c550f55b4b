# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTRewardModel`: a GPT of Megatron Core with a small linear head in place of the output layer,
for one number per sample (a reward), several (attributes), or one per position (values).

Notation: B samples, S positions, H hidden size, A numbers that the head computes per position.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from nemo_aligner.models.nlp.gpt.megatron_layers import GPTModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gather_shares
from nemo_aligner.parallel.megatron_switches import changed

# Arguments of NeMo-Aligner's `GPTRewardModel.forward` after `input_ids`.
NEMO_ALIGNER_ORDER = tuple(
    "lengths position_ids attention_mask decoder_input labels inference_params".split()
)


class RewardModelHead(RowParallelLinear):
    """Linear map from hidden states to rewards or values; split along H over tensor-parallel
    ranks. It keeps its own dtype when the whole model is converted (`model.bfloat16()`). Its
    initial weights do not depend on the split.

    Args:
        input_size, output_size: H, A.
        config: of the model; with `sequence_parallel` the hidden states arrive split along S.
        output_sequence: give one number per position instead of A numbers per sample.
        use_avg_pool: pool by the mean over a sample's positions instead of its last token.
        merge_attributes: reduce the A numbers to their weighted sum.
        attributes_weights: the A weights of that sum; 1/A each by default.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
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
            count = len(attributes_weights)
            raise ValueError(f"{count} attribute weights for {output_size} attributes")
        weights = torch.tensor(attributes_weights, dtype=torch.float32)
        self.register_buffer("attributes_weights", weights, persistent=False)
        self.output_sequence = output_sequence
        self.use_avg_pool = use_avg_pool
        self.merge_attributes = merge_attributes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RewardModelHead":
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def forward(self, hidden_states: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Rewards or values; all ranks of the tensor-parallel group call it.

        Args:
            hidden_states: [S, B, H]; under context parallelism this rank's share, [S / CP, B, H];
                with sequence parallelism 1 / TP of that.
            lengths: int64 [B], from 1, without padding; not needed with `output_sequence`.

        Returns float32 [B, S] with `output_sequence`, [B, 1] with `merge_attributes`, else, in the
        head's dtype, [B, A].
        """
        if self.input_is_sequence_parallel:
            # Every rank computes the same from here on, so each has the whole gradient already.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = hidden_states.to(self.weight.dtype)
            if self.output_sequence:
                attributes = gather_shares(super().forward(hidden_states)[0], 0)  # [S, B, A]
                return self._merge(attributes).transpose(0, 1).contiguous()
            assert lengths is not None, "pooling needs the lengths"
            # Pooling first is cheaper; but under context parallelism the gradient of the weights
            # must be that of this rank's own positions.
            if parallel_state.get_context_parallel_world_size() == 1:
                pooled = super().forward(self._pool(hidden_states, lengths))[0]
            else:
                pooled = self._pool(gather_shares(super().forward(hidden_states)[0], 0), lengths)
            attributes = pooled.squeeze(0)  # [B, A]
            return self._merge(attributes).unsqueeze(-1) if self.merge_attributes else attributes

    def _merge(self, attributes: Tensor) -> Tensor:
        """Weighted sum over the last dimension, in float32: bfloat16 would make rewards equal."""
        return attributes.float() @ self.attributes_weights

    def _pool(self, states: Tensor, lengths: Tensor) -> Tensor:
        """[1, B, n] from [S, B, n]: one vector per sample."""
        if not self.use_avg_pool:
            samples = torch.arange(lengths.numel(), device=lengths.device)
            return states[lengths - 1, samples].unsqueeze(0)
        positions = torch.arange(states.size(0), device=lengths.device).unsqueeze(-1)
        inside = (positions < lengths).unsqueeze(-1)  # [S, B, 1]
        # A selection, not a product: 0 * NaN is NaN.
        return torch.where(inside, states, 0).sum(0, keepdim=True) / lengths.unsqueeze(-1)


class GPTRewardModel(GPTModel):
    """GPT with a `RewardModelHead`, `rm_head`, on the last pipeline stage; input and output
    embeddings are never shared. `ValueError`: `config.fp8` is set.

    Args:
        config, and arguments not named here: as `GPTModel`'s, in NeMo-Aligner's order, which
            differs after `rotary_base`; give the rest by name.
        output_sequence, use_avg_pool, merge_attributes, num_attributes: of the head.
        attribute_weights, attributes_weights: two names for the head's `attributes_weights`.
        head_dtype, head_seed: of the head (None: float32) and of its initial weights.

    The class flag `return_rm_head_in_state_dict` False leaves the head out of state dicts, so that
    the weights of a language model can be loaded strictly.
    """

    return_rm_head_in_state_dict = True

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        seq_len_interpolation_factor: float | None = None,
        output_sequence: bool = False,
        use_avg_pool: bool = False,
        head_dtype: torch.dtype | None = None,
        num_attributes: int = 1,
        attribute_weights: Sequence[float] | None = None,
        merge_attributes: bool = False,
        *,
        attributes_weights: Sequence[float] | None = None,
        head_seed: int = 1234,
        **kwargs: Any,
    ):
        if config.fp8:
            raise ValueError("a reward model's head is too small for fp8; use bf16.")
        super().__init__(
            config,
            transformer_layer_spec,
            vocab_size,
            max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=fp16_lm_cross_entropy,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=False,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            **kwargs,
        )
        self.outputs_per_token = num_attributes
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
                dtype=head_dtype or torch.float32,
                merge_attributes=merge_attributes,
                attributes_weights=(
                    attribute_weights if attributes_weights is None else attributes_weights
                ),
            )

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`GPTModel.forward` with the head (`RewardModelHead.forward`) after the last layer.

        Further arguments by name, or in one of two orders, which the second argument tells apart:
        NeMo-Aligner's, `lengths` (int64 [B], without padding; not needed for values of all
        positions), position_ids, attention_mask, decoder_input, labels, inference_params; or
        `GPTModel`'s, position_ids [B, S], attention_mask, ...
        """
        # No position ids at all, before further arguments, can only be missing lengths.
        if args and (args[0].dim() == 1 if args[0] is not None else len(args) > 2):
            given = dict(zip(NEMO_ALIGNER_ORDER, args, strict=False))
            if len(args) > len(NEMO_ALIGNER_ORDER) or given.keys() & kwargs.keys():
                names = ", ".join(NEMO_ALIGNER_ORDER)
                raise TypeError(f"GPTRewardModel.forward takes input_ids, {names}, each once")
            args, kwargs = (), {**given, **kwargs}
        lengths = kwargs.pop("lengths", None)
        if kwargs.get("inference_params", ...) is None:
            del kwargs["inference_params"]  # Megatron Core's older name of inference_context
        with changed([(self, "post_process", False)]):  # it ends before the output layer
            hidden = super().forward(input_ids, *args, **kwargs)
        return self.rm_head(hidden, lengths) if self.post_process else hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Weights for a checkpoint that loads at any split; the head is a matter of its flag."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        # Not `GPTModel`'s and `LanguageModule`'s own, which expect an output layer.
        sharded = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        head = f"{prefix}rm_head."
        left_out = f"{head}_extra_state" if self.return_rm_head_in_state_dict else head
        return {name: value for name, value in sharded.items() if not name.startswith(left_out)}
