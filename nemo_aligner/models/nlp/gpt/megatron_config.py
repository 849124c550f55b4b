# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From NeMo's configuration keys to Megatron Core: `TransformerConfig` and the layer
specification.

With Transformer Engine installed on a GPU the layers are Transformer Engine's. Elsewhere they are
Megatron Core's
local ones with two parts of our own: `SDPAttention` (PyTorch's fused attention) and norms that
know sequence parallelism.
"""

import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.models.nlp.gpt.megatron_experts import Experts, Router, expert_settings
from nemo_aligner.parallel.context_parallel import gather_shares, share_positions

# activation name -> (function, gated)
ACTIVATIONS = {
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
PRECISIONS = {
    "32": torch.float32,
    "32-true": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
}


def torch_dtype(precision) -> torch.dtype:
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
    """True on a machine with CUDA and Transformer Engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def pad_vocab_size(vocab_size: int, multiple: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding table: the next size that `multiple` and the TP ranks divide.

    NeMo pads to `multiple` x TP; with the least common multiple the table, and so the initial
    weights, mostly do not depend on TP.
    """
    multiple = math.lcm(multiple, tensor_model_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def build_transformer_config(cfg) -> TransformerConfig:
    """Megatron Core's configuration from a NeMo-style model configuration `cfg` (a `DictConfig`).

    Raises:
        ConfigError: an activation, normalization or precision that does not exist here.
    """
    name = str(cfg.get("activation", "gelu")).lower()
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model.activation={name!r} is not supported; use one of {sorted(ACTIVATIONS)}."
        )
    activation, gated = ACTIVATIONS[name]
    normalization = {
        "layernorm": "LayerNorm",
        "layernorm1p": "LayerNorm",
        "rmsnorm": "RMSNorm",
    }.get(str(cfg.get("normalization", "layernorm")).lower())
    if normalization is None:
        raise ConfigError(
            f"model.normalization={cfg.get('normalization')!r} is not supported; use layernorm, "
            "layernorm1p or "
            "rmsnorm."
        )
    zero_centered = str(cfg.get("normalization", "")).lower() == "layernorm1p"
    if zero_centered and not use_transformer_engine():
        raise ConfigError(
            "model.normalization=layernorm1p needs Transformer Engine on a GPU; use layernorm or "
            "rmsnorm."
        )

    dtype = torch_dtype(cfg.get("precision", 32))
    init_std = cfg.get("init_method_std", 0.02)
    accelerated = use_transformer_engine()
    tp = cfg.get("tensor_model_parallel_size", 1) or 1
    pp = cfg.get("pipeline_model_parallel_size", 1) or 1
    vpp = cfg.get("virtual_pipeline_model_parallel_size", None)
    vpp = (
        None if vpp == 1 else vpp
    )  # Megatron Core takes 1 for virtual stages that need two pipeline stages
    bias = cfg.get("bias", True)
    hidden_dropout = cfg.get("hidden_dropout", 0.0)
    kv_channels = cfg.get("kv_channels", None)
    return TransformerConfig(
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        ffn_hidden_size=cfg.get("ffn_hidden_size", None) or 4 * cfg.hidden_size,
        num_attention_heads=cfg.num_attention_heads,
        num_query_groups=cfg.get("num_query_groups", None) or cfg.num_attention_heads,
        **({"kv_channels": kv_channels} if kv_channels else {}),
        activation_func=activation,
        gated_linear_unit=gated,
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        layernorm_epsilon=cfg.get("layernorm_epsilon", 1e-5),
        add_bias_linear=bias,
        add_qkv_bias=cfg.get("add_qkv_bias", cfg.get("qkv_bias", False)) or False,
        hidden_dropout=hidden_dropout,
        attention_dropout=cfg.get("attention_dropout", 0.0),
        apply_query_key_layer_scaling=cfg.get("apply_query_key_layer_scaling", False),
        attention_softmax_in_fp32=cfg.get("attention_softmax_in_fp32", True),
        init_method_std=init_std,
        use_cpu_initialization=cfg.get("use_cpu_initialization", not torch.cuda.is_available()),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cfg.get("context_parallel_size", 1) or 1,
        sequence_parallel=bool(cfg.get("sequence_parallel", False)) and tp > 1,
        # VPP with PP=2 gives wrong gradients with batched p2p communication.
        overlap_p2p_comm=bool(vpp and vpp > 1),
        batch_p2p_comm=not (vpp and vpp > 1),
        recompute_granularity=cfg.get("activations_checkpoint_granularity", None),
        recompute_method=cfg.get("activations_checkpoint_method", None),
        recompute_num_layers=cfg.get("activations_checkpoint_num_layers", None),
        rotary_interleaved=cfg.get("rotary_interleaved", False),
        gradient_accumulation_fusion=accelerated
        and bool(cfg.get("gradient_accumulation_fusion", False))
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        persist_layer_norm=accelerated and bool(cfg.get("persist_layer_norm", True)),
        masked_softmax_fusion=accelerated and bool(cfg.get("masked_softmax_fusion", True)),
        bias_dropout_fusion=accelerated and bool(cfg.get("bias_dropout_add_fusion", True)),
        bias_activation_fusion=accelerated and bias and name in ("gelu", "swiglu", "fast-swiglu"),
        apply_rope_fusion=accelerated and bool(cfg.get("apply_rope_fusion", False)),
        **expert_settings(cfg),
    )


class SDPAttention(MegatronModule):
    """Core attention through `torch.nn.functional.scaled_dot_product_attention`.

    Queries `[sq, b, np, hn]`, keys and values `[sk, b, ng, hn]` (np, ng: heads and query groups on
    this rank), output `[sq, b, np*hn]`. Without a mask, queries are the last `sq` of the `sk`
    positions and see themselves and all
    before: training and prefill have sq == sk, a decoding step with a KV cache has sq < sk.
    `attention_mask` is True where a position must *not* be seen, as everywhere in Megatron Core.

    Under context parallelism queries, keys and values are this rank's share of the positions
    (`nemo_aligner.parallel.context_parallel`); keys and values are gathered, so each rank holds
    those of the whole sequence of one layer at a time.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
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
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        mask = None if attention_mask is None else ~attention_mask
        if self.config.context_parallel_size > 1:
            if mask is not None:
                raise ValueError("no attention mask but the causal one under context parallelism")
            # One exchange for both. Each rank's queries give them gradients of their own, to be
            # summed.
            key, value = gather_shares(torch.stack([key, value]), 1, sum_gradients=True)
            width = key.size(0)
            mask = share_positions(width, key.device).unsqueeze(1) >= torch.arange(
                width, device=key.device
            )
        queries, keys, values = (
            x.permute(1, 2, 0, 3) for x in (query, key, value)
        )  # [b, heads, s, hn]
        sq, sk = queries.size(2), keys.size(2)
        if mask is None and 1 < sq < sk:
            mask = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(diagonal=sk - sq)

        def attend(dropout_p):
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
    """`torch.nn.LayerNorm` or `RMSNorm` whose parameters carry the sequence-parallel mark that
    Megatron Core reads.

    Megatron Core's own wrapper refuses sequence parallelism because it sets no mark. A class, not
    a function: Megatron's specifications take a function for something already built.
    """

    def __new__(cls, config, hidden_size, eps=1e-5, **_kwargs):
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def build_layer_spec(config: TransformerConfig, vp_stage: int | None = None):
    """Layers of a GPT for this pipeline stage: Transformer Engine's where it runs, else the local
    ones.
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
