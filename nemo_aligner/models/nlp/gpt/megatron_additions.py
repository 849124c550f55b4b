# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's norms in the form that Megatron Core's layers take, and what some models compute
beside those layers: norms after attention and MLP (OLMo 2, Gemma 2, GLM 4), norms of queries and
keys over all heads (OLMo 2), attention beside the MLP (Cohere), two rotations (Gemma 3), and
factors of embeddings, branches and logits (Granite).

A *branch* is what is added to the hidden states: attention, or MLP. Its last linear layer gets a
hook, so that adapters, and Transformer Engine's layers, are as they are without.
"""

import copy
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_aligner.models.nlp.gpt.megatron_config import GPTConfig, use_transformer_engine
from nemo_aligner.parallel.cpu_operations import rms_norm
from nemo_aligner.parallel.megatron_switches import parts_of
from nemo_aligner.parallel.vocab_parallel import scaled_logits


class _ZeroCentered:
    """A norm whose weight is stored as its distance from 1 (`layernorm_zero_centered_gamma`). It
    computes in float32 like Transformer Engine: in bf16, 1 + weight would lose the last bits.
    """

    weight: torch.nn.Parameter

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]  # of the norm beside this class
        torch.nn.init.zeros_(self.weight)


class ZeroCenteredLayerNorm(_ZeroCentered, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with a scale of 1 + weight (NeMo's `layernorm1p`)."""

    def forward(self, input: Tensor) -> Tensor:
        scale, bias = 1 + self.weight.float(), None if self.bias is None else self.bias.float()
        output = F.layer_norm(input.float(), self.normalized_shape, scale, bias, self.eps)
        return output.to(input.dtype)


class ZeroCenteredRMSNorm(_ZeroCentered, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with a scale of 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.weight.float()
        output = F.rms_norm(x.float(), self.normalized_shape, scale, self.eps)
        return output.to(x.dtype)


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
        norm_class: type[torch.nn.Module]
        if config.layernorm_zero_centered_gamma:
            kinds = {"LayerNorm": ZeroCenteredLayerNorm, "RMSNorm": ZeroCenteredRMSNorm}
        else:
            kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": RMSNorm}
        norm_class = kinds[config.normalization]
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
    """In the place of the norm before an MLP that stands beside the attention: gives what the norm
    before that gave.
    """

    normed: Tensor | None = None

    def __init__(self, **_kwargs: Any):
        super().__init__()

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


def change_layer(layer: ModuleSpec, config: GPTConfig, capped_attention: type) -> None:
    """Change the specification of a layer, Transformer Engine's or a local one; the former has no
    `capped_attention`.
    """
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
        attention.core_attention = capped_attention


def add_to_module(module: Any, scale_embeddings: bool) -> None:
    """Complete a built `GPTModel`, or one with another head; `scale_embeddings`: multiply its
    embeddings by sqrt(hidden size) (`apply_embedding_scaling`).
    """
    config = module.config
    if module.pre_process:
        _multiply_embeddings(module, config, scale_embeddings)
    for layer in module.decoder.layers:
        _end_branches(layer, config)
        if config.parallel_attention:
            keep = functools.partial(_keep_norm, layer.pre_mlp_layernorm)
            layer.input_layernorm.register_forward_hook(keep)
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


def _keep_norm(receiver: NormOfAttention, _norm: Any, _inputs: Any, output: Tensor) -> None:
    receiver.normed = output


def _multiply_embeddings(module: Any, config: GPTConfig, by_size: bool) -> None:
    """A shared output layer is not affected."""
    factor = config.embedding_multiplier

    def multiply(_embedding: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if by_size:
            # The factor is rounded to the dtype of the embeddings, as in Gemma and NeMo.
            output = output * torch.tensor(math.sqrt(config.hidden_size), dtype=output.dtype)
        return output if factor == 1 else output * factor

    if by_size or factor != 1:
        module.embedding.register_forward_hook(multiply)


class _BranchEnd:
    """What becomes of a branch before it is added to the hidden states."""

    def __init__(self, norm: torch.nn.Module | None, factor: float):
        self.norm, self.factor = norm, factor

    def __call__(self, branch: Tensor) -> Tensor:
        branch = branch if self.norm is None else self.norm(branch)
        return branch if self.factor == 1 else branch * self.factor


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
        linear.branch_end = _BranchEnd(norm, config.residual_multiplier)
        linear.register_forward_hook(end)


def _rotate_twice(module: Any, config: GPTConfig) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

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
