# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From NeMo's configuration keys to Megatron Core: `TransformerConfig` and the layer
specification.

On a GPU with Transformer Engine installed, the layers are Transformer Engine's. Elsewhere they are
Megatron Core's local ones with two parts of our own: `SDPAttention` (PyTorch's fused attention)
and norms that support sequence parallelism.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.models.nlp.gpt.megatron_experts import Experts, Router, expert_settings
from nemo_aligner.parallel.context_parallel import gather_shares, share_positions

# activation name -> (function, gated)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "fast-gelu": (F.gelu, False),
    "geglu": (F.gelu, True),
    "fast-geglu": (F.gelu, True),
    "relu": (F.relu, False),
    "reglu": (F.relu, True),
    "fast-reglu": (F.relu, True),
    "squared-relu": (lambda x: torch.pow(F.relu(x), 2), False),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
    "fast-swiglu": (F.silu, True),
}
NORMALIZATIONS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
PRECISIONS = {
    "32": torch.float32,
    "32-true": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
}


def torch_dtype(precision: str | int) -> torch.dtype:
    """Compute dtype of `trainer.precision`: float32 or bfloat16.

    Raises:
        ConfigError: another precision.
    """
    try:
        return PRECISIONS[str(precision).lower()]
    except KeyError:
        raise ConfigError(
            f"trainer.precision={precision!r} is not supported; use one of {sorted(PRECISIONS)}."
        ) from None


@functools.cache
def use_transformer_engine() -> bool:
    """Whether this machine has CUDA and Transformer Engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def pad_vocab_size(vocab_size: int, multiple: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding table: the next size that `multiple` and the number of TP ranks
    divide.

    NeMo pads to `multiple` x TP. With the least common multiple the table, and so the initial
    weights, do not depend on TP in most cases.
    """
    multiple = math.lcm(multiple, tensor_model_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def build_transformer_config(cfg: DictConfig) -> TransformerConfig:
    """Megatron Core's configuration.

    Args:
        cfg: complete `model` section (`config.defaults.complete_model`).

    Raises:
        ConfigError: an activation, normalization, precision or mixture of experts that is not
            supported.
    """
    dtype = torch_dtype(cfg.precision)
    optional = {"kv_channels": cfg.kv_channels} if cfg.kv_channels else {}
    return TransformerConfig(
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        ffn_hidden_size=cfg.ffn_hidden_size,
        num_attention_heads=cfg.num_attention_heads,
        num_query_groups=cfg.num_query_groups,
        **optional,
        **_activation_settings(cfg),
        **_normalization_settings(cfg),
        add_bias_linear=cfg.bias,
        add_qkv_bias=cfg.add_qkv_bias,
        hidden_dropout=cfg.hidden_dropout,
        attention_dropout=cfg.attention_dropout,
        apply_query_key_layer_scaling=cfg.apply_query_key_layer_scaling,
        attention_softmax_in_fp32=cfg.attention_softmax_in_fp32,
        rotary_interleaved=cfg.rotary_interleaved,
        init_method_std=cfg.init_method_std,
        use_cpu_initialization=not torch.cuda.is_available()
        if cfg.use_cpu_initialization is None
        else cfg.use_cpu_initialization,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        recompute_granularity=cfg.activations_checkpoint_granularity,
        recompute_method=cfg.activations_checkpoint_method,
        recompute_num_layers=cfg.activations_checkpoint_num_layers,
        **_parallel_settings(cfg),
        **_fusion_settings(cfg),
        **expert_settings(cfg),
    )


def _activation_settings(cfg: DictConfig) -> dict[str, Any]:
    name = str(cfg.activation).lower()
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model.activation={name!r} is not supported; use one of {sorted(ACTIVATIONS)}."
        )
    function, gated = ACTIVATIONS[name]
    return {"activation_func": function, "gated_linear_unit": gated}


def _normalization_settings(cfg: DictConfig) -> dict[str, Any]:
    name = str(cfg.normalization).lower()
    if name not in NORMALIZATIONS:
        raise ConfigError(
            f"model.normalization={cfg.normalization!r} is not supported; use one of "
            f"{sorted(NORMALIZATIONS)}."
        )
    zero_centered = name == "layernorm1p"
    if zero_centered and not use_transformer_engine():
        raise ConfigError(
            "model.normalization=layernorm1p needs Transformer Engine on a GPU; use layernorm or "
            "rmsnorm."
        )
    return {
        "normalization": NORMALIZATIONS[name],
        "layernorm_zero_centered_gamma": zero_centered,
        "layernorm_epsilon": cfg.layernorm_epsilon,
    }


def _parallel_settings(cfg: DictConfig) -> dict[str, Any]:
    tp, virtual = cfg.tensor_model_parallel_size, cfg.virtual_pipeline_model_parallel_size
    if virtual == 1:  # Megatron Core would demand two pipeline stages for it
        virtual = None
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": cfg.context_parallel_size,
        "sequence_parallel": bool(cfg.sequence_parallel) and tp > 1,
        # Virtual stages with PP=2 get wrong gradients from batched p2p communication.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }


def _fusion_settings(cfg: DictConfig) -> dict[str, bool]:
    """Fused kernels; all need Transformer Engine."""
    accelerated = use_transformer_engine()
    fused_activation = cfg.bias and str(cfg.activation).lower() in (
        "gelu",
        "swiglu",
        "fast-swiglu",
    )
    has_weight_gradient_kernel = (
        importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )
    return {
        "gradient_accumulation_fusion": accelerated
        and bool(cfg.gradient_accumulation_fusion)
        and has_weight_gradient_kernel,
        "persist_layer_norm": accelerated and bool(cfg.persist_layer_norm),
        "masked_softmax_fusion": accelerated and bool(cfg.masked_softmax_fusion),
        "bias_dropout_fusion": accelerated and bool(cfg.bias_dropout_add_fusion),
        "bias_activation_fusion": accelerated and bool(fused_activation),
        "apply_rope_fusion": accelerated and bool(cfg.apply_rope_fusion),
    }


class SDPAttention(MegatronModule):
    """Core attention with `torch.nn.functional.scaled_dot_product_attention`.

    Queries `[sq, b, np, hn]`, keys and values `[sk, b, ng, hn]` (np, ng: heads and query groups on
    this rank), output `[sq, b, np*hn]`. Without a mask, the queries are the last `sq` of the `sk`
    positions and attend to themselves and all before: training and prefill have sq == sk, a
    decoding step with a KV cache has sq < sk. `attention_mask` is True where a position must *not*
    be attended to, as everywhere in Megatron Core.

    Under context parallelism queries, keys and values are this rank's share of the positions
    (`nemo_aligner.parallel.context_parallel`). Keys and values are gathered, so each rank holds
    those of the whole sequence for one layer at a time.

    Raises:
        ConfigError: `apply_query_key_layer_scaling` is set.
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
        self.attention_dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.softmax_scale = softmax_scale
        if config.apply_query_key_layer_scaling:
            raise ConfigError(
                "model.apply_query_key_layer_scaling=True is only for fp16 training; set it to "
                "False."
            )

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
        mask = None if attention_mask is None else ~attention_mask
        if self.config.context_parallel_size > 1:
            if mask is not None:
                raise ValueError("context parallelism supports no mask other than the causal one")
            # One exchange for both. Each rank's queries contribute to their gradients, which are
            # summed.
            key, value = gather_shares(torch.stack([key, value]), 1, sum_gradients=True)
            width = key.size(0)
            mask = share_positions(width, key.device).unsqueeze(1) >= torch.arange(
                width, device=key.device
            )
        # [b, heads, s, hn]
        queries, keys, values = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        sq, sk = queries.size(2), keys.size(2)
        if mask is None and 1 < sq < sk:
            mask = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(diagonal=sk - sq)

        def attend(dropout_p: float) -> Tensor:
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                dropout_p=dropout_p,
                is_causal=mask is None and sq == sk and sq > 1,
                scale=self.softmax_scale,
                enable_gqa=queries.size(1) != keys.size(1),
            )

        if self.training and self.attention_dropout > 0:
            # Heads are split over TP ranks (and queries over CP ranks), so each draws its own
            # dropout mask.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                context = attend(self.attention_dropout)
        else:
            context = attend(0.0)
        return context.permute(2, 0, 1, 3).reshape(sq, queries.size(0), -1)


class LocalNorm:
    """`torch.nn.LayerNorm` or `RMSNorm` whose parameters have the attribute `sequence_parallel`
    that Megatron Core reads.

    Megatron Core's own wrapper refuses sequence parallelism because it does not set it. This is a
    class because Megatron's specifications treat a function as something already built.
    """

    def __new__(  # type: ignore[misc]  # gives PyTorch's own class
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: Any
    ) -> torch.nn.Module:
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps)
        for parameter in norm.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        return norm


def build_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers of a GPT for this pipeline stage: Transformer Engine's where it is available, else
    the local ones.
    """
    if use_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization
    )
    submodules = layer.submodules
    submodules.input_layernorm = LocalNorm
    submodules.pre_mlp_layernorm = LocalNorm
    submodules.self_attention.submodules.core_attention = SDPAttention
    submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal
    if config.num_moe_experts:
        submodules.mlp.submodules.router = Router
        submodules.mlp.submodules.experts.module = Experts
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=LocalNorm
    )
