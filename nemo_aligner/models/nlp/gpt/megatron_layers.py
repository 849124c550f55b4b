# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The layers of a GPT, as a specification for Megatron Core: Transformer Engine's on a GPU that
has it, else Megatron Core's local ones with PyTorch's attention and sequence-parallel norms; and
what some models compute beside those layers: norms after attention and MLP (OLMo 2, Gemma 2,
GLM 4), norms of queries and keys over all heads (OLMo 2), attention beside the MLP (Cohere), two
rotations (Gemma 3), and factors of embeddings, branches and logits (Granite).

A *branch* is what is added to the hidden states: attention, or MLP. Its last linear layer gets a
hook, so that adapters, and Transformer Engine's layers, are as they are without.
"""

import copy
import functools
import math
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
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
from nemo_aligner.models.nlp.gpt.megatron_config import GPTConfig, use_transformer_engine
from nemo_aligner.parallel.collectives import gather_shares, share_positions
from nemo_aligner.parallel.device import SwiGLU, rms_norm
from nemo_aligner.parallel.megatron_switches import parts_of, with_class
from nemo_aligner.parallel.vocab_parallel import scaled_logits

if find_spec("megatron.core.models.hybrid") is None:  # 0.16
    from megatron.core.models.gpt.gpt_model import GPTModel
else:
    from nemo_aligner.models.nlp.gpt.hybrid_model import (
        HybridGPTModel as GPTModel,  # noqa: F401  (for all that build one)
    )


class _ZeroCentered:
    """A norm whose weight is stored as its distance from 1 (`layernorm_zero_centered_gamma`). It
    computes in float32 like Transformer Engine: in bf16, 1 + weight would lose the last bits.
    """

    def reset_parameters(self: Any) -> None:
        super().reset_parameters()  # type: ignore[misc]  # of the norm beside this class
        torch.nn.init.zeros_(self.weight)

    def forward(self: Any, x: Tensor) -> Tensor:
        wide, shape, scale = x.float(), self.normalized_shape, 1 + self.weight.float()
        if isinstance(self, torch.nn.RMSNorm):
            return F.rms_norm(wide, shape, scale, self.eps).to(x.dtype)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(wide, shape, scale, bias, self.eps).to(x.dtype)


class ZeroCenteredLayerNorm(_ZeroCentered, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with a scale of 1 + weight (NeMo's `layernorm1p`)."""


class ZeroCenteredRMSNorm(_ZeroCentered, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with a scale of 1 + weight."""


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, with a faster gradient in float32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32 is self.weight.dtype and x.device.type == "cpu":
            assert self.eps is not None
            return rms_norm(x, self.weight, self.eps)
        return super().forward(x)


class LocalNorm:
    """`torch.nn.LayerNorm` or `RMSNorm`, or their zero-centered forms, whose parameters have the
    attribute `sequence_parallel` (Megatron Core's wrapper does not set it). A class: Megatron's
    specifications treat a function as something already built.
    """

    def __new__(  # type: ignore[misc]  # gives PyTorch's own class
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: Any
    ) -> torch.nn.Module:
        kinds: dict[str, tuple[Any, Any]] = {
            "LayerNorm": (torch.nn.LayerNorm, ZeroCenteredLayerNorm),
            "RMSNorm": (RMSNorm, ZeroCenteredRMSNorm),
        }
        norm_class = kinds[config.normalization][config.layernorm_zero_centered_gamma]
        has_bias = getattr(config, "layernorm_bias", True)  # of `GPTConfig`
        without_bias = config.normalization == "LayerNorm" and not has_bias
        norm = norm_class(hidden_size, eps=eps, **({"bias": False} if without_bias else {}))
        for parameter in norm.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        return norm


class AllHeadsRMSNorm(torch.nn.Module):
    """RMS norm of `[s, b, ..., hn]` over the heads of all ranks of `group`. Each rank holds the
    weight of all heads; Megatron Core adds up its gradients over them, as those of one head's.
    """

    group: Any = None  # that of training

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(2).float()
        squares, width = wide.square().sum(-1, keepdim=True), wide.size(-1)
        weight: Tensor = self.weight
        if width < len(weight):
            # Every rank's output depends on the sum: forwards and backwards it is over all ranks.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
            weight = weight[torch.distributed.get_rank(self.group) * width :][:width]
        normed = wide * torch.rsqrt(squares / len(self.weight) + self.eps)
        return (weight.float() * normed).to(x.dtype).view_as(x)


class NormOfAttention(torch.nn.Module):
    """In place of the norm of an MLP beside the attention: gives what the norm before gave."""

    normed: Tensor | None = None

    def __init__(self, **_kwargs: Any):
        super().__init__()

    def keep(self, _norm: Any, _inputs: Any, output: Tensor) -> None:
        self.normed = output

    def forward(self, _hidden: Tensor) -> Tensor:
        normed, self.normed = self.normed, None
        assert normed is not None
        return normed


class TwoRotations(torch.nn.Module):
    """The angles of both rotations side by side, of all layers (`whole`) and of those with a
    window (`local`), in the place of a `GPTModel`'s `rotary_pos_emb`.
    """

    def __init__(self, whole: Any, local: Any):
        super().__init__()
        self.whole, self.local = whole, local
        self.get_rotary_seq_len = whole.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole, local = self.whole(*args, **kwargs), self.local(*args, **kwargs)
        if isinstance(whole, tuple):  # of YaRN
            return torch.cat([whole[0], local], -1), whole[1]
        return torch.cat([whole, local], -1)


def change_layer(layer: ModuleSpec, config: GPTConfig) -> None:
    """Change the specification of a layer."""
    submodules: Any = layer.submodules
    attention = submodules.self_attention.submodules
    if config.qk_layernorm_all_heads:
        for name, heads in (
            ("q_layernorm", config.num_attention_heads),
            ("k_layernorm", config.num_query_groups),
        ):
            setattr(attention, name, ModuleSpec(AllHeadsRMSNorm, params={"heads": heads}))
    own_norms = config.norm_position == "after" or config.parallel_attention
    if own_norms or not config.layernorm_bias:
        submodules.input_layernorm = submodules.pre_mlp_layernorm = LocalNorm
        if use_transformer_engine():  # whose norms are parts of the linear layers
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.linear_qkv = parts_of(submodules.mlp).linear_fc1 = TEColumnParallelLinear
            submodules.sharded_state_dict_keys_map = {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
    if config.norm_position == "after":
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
    if config.parallel_attention:
        submodules.pre_mlp_layernorm = NormOfAttention
    if config.attn_logit_softcapping is not None and use_transformer_engine():
        attention.core_attention = SDPAttention  # Transformer Engine's has no cap


def add_to_module(module: Any, scale_embeddings: bool) -> None:
    """Complete a built `GPTModel`, or one with another head; `scale_embeddings`: multiply its
    embeddings by sqrt(hidden size) (`apply_embedding_scaling`).
    """
    config = module.config
    factor = config.embedding_multiplier

    def multiply(_embedding: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if scale_embeddings:
            # The factor is rounded to the dtype of the embeddings, as in Gemma and NeMo.
            output = output * torch.tensor(math.sqrt(config.hidden_size), dtype=output.dtype)
        return output if factor == 1 else output * factor

    if module.pre_process and (scale_embeddings or factor != 1):
        module.embedding.register_forward_hook(multiply)  # not of a shared output layer
    for layer in module.decoder.layers:
        _end_branches(layer, config)
        if config.parallel_attention:
            layer.input_layernorm.register_forward_hook(layer.pre_mlp_layernorm.keep)
        if config.qk_layernorm_all_heads:
            attention = layer.self_attention
            for norm in (attention.q_layernorm, attention.k_layernorm):
                norm.group = attention.pg_collection.tp
    if config.rotary_base_local is not None:
        _rotate_twice(module, config)
    if hasattr(module, "output_layer") and (
        config.logits_scaling != 1 or config.final_logit_softcapping is not None
    ):
        module.output_layer.register_forward_hook(
            lambda _layer, _inputs, output: (scaled_logits(output[0], config), output[1])
        )


def _branch_end(norm: torch.nn.Module | None, factor: float, branch: Tensor) -> Tensor:
    """What becomes of a branch before it is added to the hidden states."""
    branch = branch if norm is None else norm(branch)
    return branch if factor == 1 else branch * factor


def _end_branches(layer: Any, config: GPTConfig) -> None:
    has_norm = config.norm_position != "before"
    if not has_norm and config.residual_multiplier == 1:
        return

    def end(linear: Any, _inputs: Any, output: Any) -> tuple[Tensor, None]:
        branch, bias = output
        return linear.branch_end(branch if bias is None else branch + bias), None

    for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
        norm = None
        if has_norm:
            norm = LocalNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
            linear.post_layernorm = norm.to(linear.weight)
        linear.branch_end = functools.partial(_branch_end, norm, config.residual_multiplier)
        linear.register_forward_hook(end)


def _rotate_twice(module: Any, config: GPTConfig) -> None:
    local = RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=module.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        rotary_base=config.rotary_base_local,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=module.rotary_pos_emb.cp_group,
    )
    module.rotary_pos_emb = TwoRotations(module.rotary_pos_emb, local)
    for layer in module.decoder.layers:
        attention = layer.self_attention
        skipped = config.window_attn_skip_freq
        is_local = is_layer_window_attention(config.window_size, skipped, layer.layer_number)
        if is_local:
            attention.config = _without_yarn(attention.config)

        def choose(_attention: Any, args: Any, kwargs: Any, half: int = int(is_local)) -> Any:
            angles = kwargs["rotary_pos_emb"].chunk(2, dim=-1)[half].contiguous()
            return args, {**kwargs, "rotary_pos_emb": angles}

        attention.register_forward_pre_hook(choose, with_kwargs=True)


def _without_yarn(config: GPTConfig) -> GPTConfig:
    """A copy: Megatron Core scales all rotations with a configuration that has YaRN's fields."""
    plain = copy.copy(config)
    plain.__class__ = GPTConfig
    for name in [name for name in vars(plain) if name.startswith("yarn_")]:
        delattr(plain, name)
    return plain


class SDPAttention(MegatronModule):
    """Core attention with `torch.nn.functional.scaled_dot_product_attention`.

    Queries `[s, b, np, hn]`, keys and values `[s, b, ng, hn]` (np, ng: heads and query groups on
    this rank), output `[s, b, np*hn]`. Without a mask, each position attends to itself and to all
    before it; `attention_mask` is True where a position must *not* be attended to. With
    `packed_seq_params` several samples lie one behind the other in `[t, np, hn]`, and the output
    is `[t, np*hn]`; each sample attends to itself alone.

    Under context parallelism these are this rank's share of the positions
    (`parallel.collectives`); keys and values of one layer at a time are gathered.
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
        return self.linear_fc2(SwiGLU.apply(both if bias is None else both + bias))


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
    """Use `SwiGLUMLP`s in a built model: a specification that names them would give a warning."""
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
    if not model.config.sequence_parallel:
        model.output_layer.register_forward_pre_hook(
            lambda _layer, inputs: (inputs[0].transpose(0, 1).contiguous(), *inputs[1:])
        )
        model.output_layer.register_forward_hook(  # the copy that follows finds it in order
            lambda _layer, _inputs, output: (output[0].transpose(0, 1), output[1])
        )


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
            submodules: Any = layer.submodules
            submodules.input_layernorm = submodules.pre_mlp_layernorm = LocalNorm
            attention = submodules.self_attention.submodules
            attention.core_attention = SDPAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = LocalNorm
            submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal
            parts = parts_of(submodules.mlp)
            if isinstance(parts, MoESubmodules):
                # In checkpoints the norm before experts has its own name, as with the engine.
                names = submodules.sharded_state_dict_keys_map
                submodules.sharded_state_dict_keys_map = {
                    name: stored for name, stored in names.items() if name != "pre_mlp_layernorm."
                }
                parts.router = Router
                parts.experts = with_class(parts.experts, Experts)
    if isinstance(config, GPTConfig):  # else one of Megatron Core, with its layers
        for layer in block.layer_specs:
            change_layer(layer, config)
        if not config.layernorm_bias:
            block.layer_norm = LocalNorm
    return block
