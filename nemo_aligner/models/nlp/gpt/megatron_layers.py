# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The layers of a GPT, as a specification for Megatron Core: Transformer Engine's on a GPU that
has it, else Megatron Core's local ones with PyTorch's attention and sequence-parallel norms.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_aligner.generation.cache import attention, visible
from nemo_aligner.models.nlp.gpt.megatron_additions import LocalNorm, change_layer
from nemo_aligner.models.nlp.gpt.megatron_config import GPTConfig, use_transformer_engine
from nemo_aligner.parallel.context_parallel import gather_shares, share_positions
from nemo_aligner.parallel.cpu_operations import swiglu
from nemo_aligner.parallel.megatron_switches import parts_of, with_class

if find_spec("megatron.core.models.hybrid") is None:  # 0.16
    from megatron.core.models.gpt.gpt_model import GPTModel
else:
    from nemo_aligner.models.nlp.gpt.hybrid_model import (
        HybridGPTModel as GPTModel,  # noqa: F401  (for all that build one)
    )


class SDPAttention(MegatronModule):
    """Core attention with `torch.nn.functional.scaled_dot_product_attention`.

    Queries `[s, b, np, hn]`, keys and values `[s, b, ng, hn]` (np, ng: heads and query groups on
    this rank), output `[s, b, np*hn]`. Without a mask, each position attends to itself and to all
    before it; `attention_mask` is True where a position must *not* be attended to. With
    `packed_seq_params` several samples lie one behind the other in `[t, np, hn]`, and the output
    is `[t, np*hn]`; each sample attends to itself alone.

    Under context parallelism these are this rank's share of the positions
    (`parallel.context_parallel`); keys and values of one layer at a time are gathered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        given = attention_dropout
        self.attention_dropout = config.attention_dropout if given is None else given
        self.softmax_scale = softmax_scale
        self.window: int | None = None  # positions before its own that each position attends to
        self.softcap = getattr(config, "attn_logit_softcapping", None)
        skipped = config.window_attn_skip_freq
        if is_layer_window_attention(config.window_size, skipped, layer_number):
            self.window = config.window_size[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            lengths = [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]
            samples = (x.unsqueeze(1).split(lengths) for x in (query, key, value))
            return torch.cat([self(*sample)[:, 0] for sample in zip(*samples, strict=True)])
        mask = None if attention_mask is None else ~attention_mask
        positions = None  # of the queries, where a mask must be made for them
        if self.config.context_parallel_size > 1:
            if mask is not None:
                raise ValueError("context parallelism supports no mask other than the causal one")
            # One exchange for both. Each rank's queries contribute to their gradients, which are
            # summed.
            key, value = gather_shares(torch.stack([key, value]), 1, sum_gradients=True)
            positions = share_positions(key.size(0), key.device)
        # [b, heads, s, hn]
        queries, keys, values = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        width = keys.size(2)
        narrow = self.window is not None and width > self.window + 1
        if positions is None and narrow:
            positions = torch.arange(width, device=query.device)
        if positions is not None:
            in_window = visible(positions, width, self.window)
            mask = in_window if mask is None else mask & in_window
        arguments = queries, keys, values, mask, self.softmax_scale, self.softcap
        if self.training and self.attention_dropout > 0:
            # Heads are split over TP ranks (and queries over CP ranks): each draws its own mask.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return attention(*arguments, self.attention_dropout)
        return attention(*arguments)


class SwiGLUMLP(MLP):
    """Megatron Core's feed-forward layer with the activation SwiGLU, without a fused kernel."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`[s, b, h]`, and the bias that is still to be added or None."""
        if per_token_scale is not None:  # of an expert
            return super().forward(hidden_states, per_token_scale, **more)
        both, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(both if bias is None else both + bias))


class Router(TopKRouter):
    """Megatron Core's router without Transformer Engine, whose names its `gating` uses."""

    def gating(self, input: Tensor) -> Tensor:
        """Float32 logits `[s, b, experts]` of the hidden states `[s, b, h]`."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: there is no expert bias, and Megatron Core's would need a C++ compiler."""


class Experts(SequentialMLP):
    """Megatron Core's sequential experts, with initial weights that do not depend on the split:
    each rank draws those of all experts of its layer and keeps its own. Megatron Core's CPU
    initialization would give the first expert of every rank the same.
    """

    local_experts: Any

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,  # since 0.19 the name of the module
    ):
        assert pg_collection is not None, "Megatron Core passes its groups"
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        super().__init__(
            num_local_experts * ranks, config, submodules, pg_collection=pg_collection, **more
        )
        mine: Any = self.local_experts[rank * num_local_experts : (rank + 1) * num_local_experts]
        self.local_experts = torch.nn.ModuleList(mine)
        self.num_local_experts = num_local_experts
        for expert in mine:
            # The dispatcher brings the tokens, so there is nothing to sum over ranks. Megatron
            # Core leaves the sum out only with several; with one, autograd rejects the bias added
            # to the sum in place.
            expert.linear_fc2.explicit_expert_comm = True


def compute_swiglu_at_once(model: Any) -> None:
    """Use `SwiGLUMLP`s in a built model: Megatron Core warns of a specification that names
    another.
    """
    config = model.config
    if config.gated_linear_unit and config.activation_func is F.silu:
        for module in model.modules():
            if type(module) is MLP and not use_transformer_engine():
                module.__class__ = SwiGLUMLP


def compute_logits_batch_first(model: Any) -> None:
    """Make the output layer of a `GPTModel` compute its logits as `[B, S, V/TP]`, which `GPTModel`
    returns: it would copy them, and their gradient. Here the far smaller hidden states are copied
    (not with sequence parallelism, which gathers along their first dimension).
    """
    if model.config.sequence_parallel:
        return

    def hidden_batch_first(_layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        return (hidden.transpose(0, 1).contiguous(), *others)

    def as_expected(_layer: torch.nn.Module, _inputs: Any, output: tuple[Any, ...]) -> Any:
        logits, bias = output
        return logits.transpose(0, 1), bias  # the copy that follows finds it in order

    model.output_layer.register_forward_pre_hook(hidden_batch_first)
    model.output_layer.register_forward_hook(as_expected)


def build_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layers of a GPT for this stage: Transformer Engine's if it is available, else local ones."""
    engine = use_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config, engine, normalization=config.normalization, vp_stage=vp_stage
    )
    if not engine:
        block.layer_norm = LocalNorm
        for layer in block.layer_specs:
            _use_our_parts(layer, config)
    if isinstance(config, GPTConfig):  # else one of Megatron Core, with its layers
        for layer in block.layer_specs:
            change_layer(layer, config, SDPAttention)
        if not config.layernorm_bias:
            block.layer_norm = LocalNorm
    return block


def _use_our_parts(layer: ModuleSpec, config: TransformerConfig) -> None:
    submodules: Any = layer.submodules
    submodules.input_layernorm = LocalNorm
    submodules.pre_mlp_layernorm = LocalNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = SDPAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal
    parts = parts_of(submodules.mlp)
    if isinstance(parts, MoESubmodules):
        # In checkpoints the norm before experts has its own name, as with Transformer Engine.
        names = submodules.sharded_state_dict_keys_map
        submodules.sharded_state_dict_keys_map = {
            name: stored for name, stored in names.items() if name != "pre_mlp_layernorm."
        }
        parts.router = Router
        parts.experts = with_class(parts.experts, Experts)
