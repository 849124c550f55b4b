# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From NeMo's configuration keys to Megatron Core's `TransformerConfig`."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import init_method_normal
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_aligner.config.inert_keys import (
    INERT_ARCHITECTURE,
    ONLY,
    has_no_effect,
    known_model_keys,
    to_plain,
)
from nemo_aligner.config.megatron_fields import MODEL_REFUSED, core_errors, passed_fields
from nemo_aligner.config.parallel_rules import UNEVEN, dtype_name
from nemo_aligner.config.schema import LIVE
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.training.token_counts import expert_layers


def layer_pattern(cfg: DictConfig, key: str, least: int, one: str) -> int | list[int]:
    """Checked `model.<key>` (`ConfigError`): period or pattern; a layer with 1 has or is `one`."""
    given = cfg[key]
    if OmegaConf.is_list(given):
        given = list(given)
        good = len(given) == cfg.num_layers and set(given) <= {0, 1}
    else:
        good = type(given) is int and given >= least
    if not good:
        raise ConfigError(
            f"model.{key}={given!r} must be a whole number from {least} on, or a list with 1 "
            f"({one}) or 0 for each of the model.num_layers={cfg.num_layers} layers."
        )
    return given


POSITION_EMBEDDINGS = ("rope", "yarn", "learned_absolute", "none")
# Of `rope`, which Megatron Core's YaRN ignores: the value that changes nothing.
NOT_WITH_YARN = {
    "rotary_percentage": 1.0,
    "rotary_interleaved": False,
    "seq_len_interpolation_factor": None,
}


@dataclass
class GPTConfig(TransformerConfig):
    """`TransformerConfig` with what the layers of `megatron_additions` read."""

    norm_position: str = "before"
    layernorm_bias: bool = True
    parallel_attention: bool = False
    qk_layernorm_all_heads: bool = False
    rotary_base_local: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


ADDITIONS = list(GPTConfig.__annotations__)


@dataclass
class YarnTransformerConfig(GPTConfig):
    """`GPTConfig` with what Megatron Core reads for YaRN (arXiv 2309.00071) beside it."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


YARN_KEYS = [name for name in YarnTransformerConfig.__annotations__ if name.startswith("yarn_")]


def yarn_settings(cfg: DictConfig) -> dict[str, Any]:
    """Fields of `YarnTransformerConfig` alone; none for other positions. `ConfigError`: YaRN lacks
    a value, or is combined with what Megatron Core leaves out of it.
    """
    if cfg.position_embedding_type != "yarn":
        return {}
    for key in YARN_KEYS[:2]:
        if cfg[key] is None or cfg[key] <= 0:
            wrong = f"model.{key}={cfg[key]} must be a positive number"
            raise ConfigError(f"{wrong} with model.position_embedding_type=yarn.")
    for key, neutral in NOT_WITH_YARN.items():
        if cfg[key] != neutral:
            wanted = f"set it to {'null' if neutral is None else neutral}"
            raise ConfigError(f"model.{key}={cfg[key]} is not supported with yarn; {wanted}.")
    return {key: cfg[key] for key in YARN_KEYS}


def position_arguments(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of `GPTModel` for its kind of positions; `ConfigError`: it is not supported."""
    kind, base = cfg.position_embedding_type, cfg.rotary_base
    if kind not in POSITION_EMBEDDINGS:
        known = ", ".join(POSITION_EMBEDDINGS)
        raise ConfigError(f"model.position_embedding_type={kind!r} is not supported; use {known}.")
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
        raise ConfigError(
            f"model.rotary_base={base!r} must be a positive number; that of layers with a window "
            "is model.rotary_base_local."
        )
    if cfg.scale_positional_embedding and kind != "rope":
        other = f"model.position_embedding_type={kind}"
        raise ConfigError(f"model.scale_positional_embedding=True with {other}: set it to False.")
    return dict(
        max_sequence_length=cfg.max_position_embeddings,
        position_embedding_type=kind,
        rotary_percent=cfg.rotary_percentage,
        rotary_base=base,
        seq_len_interpolation_factor=cfg.seq_len_interpolation_factor,
        rope_scaling=cfg.scale_positional_embedding,
        rope_scaling_factor=cfg.scale_factor,
    )


def expert_settings(cfg: DictConfig) -> dict[str, Any]:
    """Fields of `TransformerConfig` for a mixture of experts; none for a dense model.
    `ConfigError`: Megatron Core cannot compute it, or it gives other results at another split.

    No token is ever dropped, and the router computes in float32: a policy and its reference, two
    ranks, training and decoding must choose the same experts.
    """
    if not cfg.num_moe_experts:
        if cfg.expert_model_parallel_size > 1:
            size = f"model.expert_model_parallel_size={cfg.expert_model_parallel_size}"
            raise ConfigError(f"{size}, but model.num_moe_experts is not set; set it, or 1.")
        return {}
    _check_experts(cfg)
    _check_shared_experts(cfg)
    _check_router(cfg)
    layers = layer_pattern(cfg, "moe_layer_freq", 1, "experts")
    return dict(
        **{name: cfg[name] for name in SAME_EXPERT_NAMES},
        # A list of ones is 1: checkpoints name mixed layers otherwise.
        moe_layer_freq=1 if layers == [1] * cfg.num_layers else layers,
        moe_shared_expert_gate=bool(cfg.moe_shared_expert_gate),
        moe_router_pre_softmax=bool(cfg.moe_router_pre_softmax),
        moe_z_loss_coeff=cfg.moe_z_loss_coeff or None,
        moe_router_dtype="fp32",
        moe_grouped_gemm=False,
    )


def check_expert_stages(config: TransformerConfig) -> None:
    """Raise `ConfigError` unless every pipeline stage has a layer with experts, if any has: the
    optimizer of a stage without has another form, which loads no checkpoint of another split.
    """
    if not config.num_moe_experts:
        return
    has_experts = expert_layers(config)
    virtual = config.virtual_pipeline_model_parallel_size
    chunks: list[int | None] = [*range(virtual)] if virtual else [None]
    for stage in range(config.pipeline_model_parallel_size):
        layers = []
        for chunk in chunks:
            first = get_transformer_layer_offset(config, chunk, stage)
            layers += has_experts[first : first + get_num_layers_to_build(config, chunk, stage)]
        if not any(layers):
            raise ConfigError(
                f"no layer of pipeline stage {stage} has experts with model.moe_layer_freq="
                f"{config.moe_layer_freq}; use fewer than model.pipeline_model_parallel_size="
                f"{config.pipeline_model_parallel_size} stages, or stages of other sizes."
            )


def _check_shared_experts(cfg: DictConfig) -> None:
    size = cfg.moe_shared_expert_intermediate_size
    if size is not None and cfg.bias:
        key = f"model.moe_shared_expert_intermediate_size={size}"
        raise ConfigError(f"{key} needs model.bias=False: shared experts have no bias.")
    if cfg.moe_shared_expert_gate and size is None:
        raise ConfigError(
            "model.moe_shared_expert_gate=True needs model.moe_shared_expert_intermediate_size; "
            "set it, or the gate to False."
        )


def _check_experts(cfg: DictConfig) -> None:
    experts, tp = cfg.num_moe_experts, cfg.tensor_model_parallel_size
    if experts % cfg.expert_model_parallel_size:
        raise ConfigError(
            f"model.num_moe_experts={experts} must be a multiple of "
            f"model.expert_model_parallel_size={cfg.expert_model_parallel_size}."
        )
    if cfg.moe_token_dispatcher_type != "alltoall":
        raise ConfigError(
            f"model.moe_token_dispatcher_type={cfg.moe_token_dispatcher_type!r} is not supported: "
            "only alltoall lets ranks have different samples, as generation needs."
        )
    if tp > 1 and not cfg.sequence_parallel:
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.sequence_parallel=True: without it Megatron Core refuses to train."
        )
    if tp > 1 and cfg.bias:
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.bias=False: experts that are split over tensor-parallel ranks have no bias."
        )


def _check_router(cfg: DictConfig) -> None:
    top_k, balancing = cfg.moe_router_topk, cfg.moe_router_load_balancing_type
    if not 1 <= top_k <= cfg.num_moe_experts:
        raise ConfigError(
            f"model.moe_router_topk={top_k} must be from 1 to "
            f"model.num_moe_experts={cfg.num_moe_experts}."
        )
    if top_k == 1 and not cfg.moe_router_pre_softmax:
        raise ConfigError(
            "model.moe_router_topk=1 needs model.moe_router_pre_softmax=True: the softmax over "
            "one expert is always 1, so the router would never learn."
        )
    if balancing not in ("aux_loss", "none"):
        key = f"model.moe_router_load_balancing_type={balancing!r}"
        raise ConfigError(f"{key} is not supported; use aux_loss or none.")
    if balancing == "none" and cfg.moe_aux_loss_coeff:
        raise ConfigError(
            f"model.moe_aux_loss_coeff={cfg.moe_aux_loss_coeff} has no effect with "
            "model.moe_router_load_balancing_type=none; set it to 0, or the type to aux_loss."
        )


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU with tanh for the error function: GPT-2's, and Megatron Core's fused kernels'."""
    return F.gelu(x, approximate="tanh")


# activation name -> (function, gated)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "gelu_new": (tanh_gelu, False),
    "gelu_pytorch_tanh": (tanh_gelu, False),
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


def torch_dtype(precision: str | int) -> torch.dtype:
    """Compute dtype of `trainer.precision`: float32 or bfloat16; else `ConfigError`."""
    return getattr(torch, dtype_name(precision))


@functools.cache
def use_transformer_engine() -> bool:
    """Whether this machine has CUDA and Transformer Engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


# Keys that a dense model has as fields of `TransformerConfig`, and those of a mixture of experts.
SAME_NAMES = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups add_qkv_bias
    hidden_dropout attention_dropout rotary_interleaved init_method_std
""".split()
SAME_EXPERT_NAMES = """
    num_moe_experts expert_model_parallel_size moe_router_topk moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_router_load_balancing_type moe_aux_loss_coeff
    moe_token_dispatcher_type
""".split()


def build_transformer_config(cfg: DictConfig) -> TransformerConfig:
    """Megatron Core's configuration for a complete section; `ConfigError`: it is not supported."""
    dtype = torch_dtype(cfg.precision)
    optional = {"kv_channels": cfg.kv_channels} if cfg.kv_channels else {}
    yarn = yarn_settings(cfg)
    config_class = YarnTransformerConfig if yarn else GPTConfig
    settings: dict[str, Any] = dict(
        **{name: cfg[name] for name in SAME_NAMES},
        **optional,
        **_activation_settings(cfg),
        **_normalization_settings(cfg),
        add_bias_linear=cfg.bias,
        **_attention_settings(cfg),
        **_additions(cfg),
        **yarn,
        output_layer_init_method=None
        if cfg.use_scaled_init_method
        else init_method_normal(cfg.init_method_std),
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
    config = config_class(**settings)
    given = _given_fields(cfg, config)
    own_keys = set(ONLY).union(*LIVE.values())
    passed = passed_fields(given, config, settings, own_keys, MODEL_REFUSED)
    if cfg.parallel_attention and "layernorm" in str(passed.get("recompute_modules")):
        raise ConfigError("recompute_modules must not have layernorm with parallel_attention.")
    if "recompute_modules" in passed and config.recompute_granularity != "selective":
        raise ConfigError(
            f"recompute_modules={passed['recompute_modules']} needs "
            "model.activations_checkpoint_granularity=selective."
        )
    if passed:
        with core_errors(passed):
            config = config_class(**settings, **passed)
    check_expert_stages(config)
    return config


def _activation_settings(cfg: DictConfig) -> dict[str, Any]:
    """The activation, and whether Megatron Core's kernel computes it at once, with the bias. Those
    kernels compute the tanh form of GELU, so `bias_activation_fusion` chooses the form, here on
    every machine alike. A fused SwiGLU is the same function.
    """
    name = str(cfg.activation).lower()
    if name not in ACTIVATIONS:
        known = sorted(ACTIVATIONS)
        raise ConfigError(f"model.activation={name!r} is not supported; use one of {known}.")
    function, gated = ACTIVATIONS[name]
    if cfg.openai_gelu and function not in (F.gelu, tanh_gelu):
        key = f"model.openai_gelu=True would replace model.activation={name}"
        raise ConfigError(f"{key}; set it to False, or the activation to gelu or geglu.")
    # Not of experts, which weigh their output inside the kernel.
    fused = use_transformer_engine() and function is F.silu and gated and not cfg.num_moe_experts
    if function is F.gelu and cfg.bias_activation_fusion and not cfg.openai_gelu:
        if not gated and not cfg.bias:
            key = "model.bias_activation_fusion=True"
            raise ConfigError(f"{key} has no bias to fuse with model.bias=False; set it to False.")
        function = tanh_gelu
        # Megatron Core has no such kernel for experts, and knows the others by `F.gelu`.
        if use_transformer_engine() and not cfg.num_moe_experts:
            fused, function = True, F.gelu
    elif cfg.openai_gelu:
        function = tanh_gelu
    return {
        "activation_func": function,
        "gated_linear_unit": gated,
        "bias_activation_fusion": bool(fused),
    }


def _normalization_settings(cfg: DictConfig) -> dict[str, Any]:
    name = str(cfg.normalization).lower()
    if name not in NORMALIZATIONS:
        key, known = f"model.normalization={cfg.normalization!r}", sorted(NORMALIZATIONS)
        raise ConfigError(f"{key} is not supported; use one of {known}.")
    return {
        "normalization": NORMALIZATIONS[name],
        "layernorm_zero_centered_gamma": name == "layernorm1p"
        or bool(cfg.layernorm_zero_centered_gamma),
        "layernorm_epsilon": cfg.layernorm_epsilon,
        "qk_layernorm": bool(cfg.qk_layernorm),
    }


def _additions(cfg: DictConfig) -> dict[str, Any]:
    settings = {name: cfg[name] for name in ADDITIONS}
    if cfg.qk_layernorm_all_heads and not cfg.qk_layernorm:
        raise ConfigError("model.qk_layernorm_all_heads=True needs model.qk_layernorm=True.")
    if cfg.qk_layernorm_all_heads and str(cfg.normalization).lower() != "rmsnorm":
        raise ConfigError("model.qk_layernorm_all_heads=True needs model.normalization=rmsnorm.")
    if cfg.num_moe_experts or cfg.parallel_attention:
        needed = {"norm_position": "before", "residual_multiplier": 1.0}
        if cfg.num_moe_experts:
            needed |= {"parallel_attention": False, "layernorm_bias": True}
        for name, value in needed.items():
            if settings[name] != value:
                raise ConfigError(
                    f"model.{name}={settings[name]} is not supported with experts, or with "
                    f"model.parallel_attention; set it to {value}."
                )
    if cfg.rotary_base_local is not None and not (
        cfg.window_size is not None and cfg.position_embedding_type in ("rope", "yarn")
    ):
        raise ConfigError(
            f"model.rotary_base_local={cfg.rotary_base_local} needs model.window_size and "
            "model.position_embedding_type=rope or yarn; set it to null."
        )
    return settings


def _attention_settings(cfg: DictConfig) -> dict[str, Any]:
    """Scale of the attention scores, windows, and layers without rotation."""
    settings: dict[str, Any] = {"window_size": _window(cfg)}
    scalar, freq = cfg.query_pre_attn_scalar, cfg.window_attn_skip_freq
    if scalar is not None:
        if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
            raise ConfigError(f"model.query_pre_attn_scalar={scalar!r} must be a positive number.")
        settings["softmax_scale"] = scalar**-0.5
    if freq is not None:
        pattern = layer_pattern(cfg, "window_attn_skip_freq", 2, "window")
        settings["window_attn_skip_freq"] = pattern
        if cfg.window_size is None:
            remedy = "needs model.window_size; set it, or the former to null."
            raise ConfigError(f"model.window_attn_skip_freq={freq} {remedy}")
    if cfg.no_rope_freq is not None:
        pattern = layer_pattern(cfg, "no_rope_freq", 2, "no rotation")
        if isinstance(pattern, int):
            pattern = [int((layer + 1) % pattern == 0) for layer in range(cfg.num_layers)]
        if cfg.position_embedding_type not in ("rope", "yarn"):
            kind = f"model.position_embedding_type={cfg.position_embedding_type}"
            raise ConfigError(
                f"model.no_rope_freq={cfg.no_rope_freq} with {kind}; set it to null."
            )
        settings["no_rope_freq"] = pattern
    return settings


def _window(cfg: DictConfig) -> tuple[int, int] | None:
    """`(positions before its own that a position attends to, 0)`; None: all of them."""
    if cfg.window_size is None:
        return None
    given = list(cfg.window_size) if OmegaConf.is_list(cfg.window_size) else cfg.window_size
    if given == [-1, -1]:  # Transformer Engine's form of "no window"
        return None
    whole = isinstance(given, list) and [type(size) for size in given] == [int, int]
    if not whole or given[0] < 0 or given[1] != 0:
        raise ConfigError(
            f"model.window_size={given!r} is not supported; give [n, 0]: each position attends to "
            "the n before it and to itself; or null."
        )
    before, after = given
    if use_transformer_engine() and cfg.context_parallel_size > 1:
        if cfg.encoder_seq_length <= before + 1:
            return None  # every position is in every later one's window
        raise ConfigError(f"model.window_size={given} needs model.context_parallel_size=1.")
    return before, after


def _parallel_settings(cfg: DictConfig) -> dict[str, Any]:
    tp, virtual = cfg.tensor_model_parallel_size, cfg.virtual_pipeline_model_parallel_size
    if virtual == 1:  # Megatron Core would demand two pipeline stages for it
        virtual = None
    uneven = {key: cfg[key] for key in UNEVEN} if cfg.pipeline_model_parallel_size > 1 else {}
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        **uneven,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": cfg.context_parallel_size,
        "sequence_parallel": bool(cfg.sequence_parallel) and tp > 1,
        # Virtual stages with PP=2 get wrong gradients from batched p2p communication.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }


def _fusion_settings(cfg: DictConfig) -> dict[str, bool]:
    """Fused kernels that compute the same; all need Transformer Engine."""
    kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda")
    asked = {
        "gradient_accumulation_fusion": cfg.gradient_accumulation_fusion and kernel is not None,
        "persist_layer_norm": cfg.persist_layer_norm,
        "masked_softmax_fusion": cfg.masked_softmax_fusion,
        "bias_dropout_fusion": cfg.bias_dropout_add_fusion,
        # The kernel has no scale, which YaRN needs, nor packed sequences' pairs of channels.
        "apply_rope_fusion": cfg.apply_rope_fusion
        and cfg.position_embedding_type == "rope"
        and not cfg.rotary_interleaved,
    }
    return {name: use_transformer_engine() and bool(value) for name, value in asked.items()}


# They choose kernels that compute the same: these by keys of their own, ...
KERNELS = "apply_rope_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm".split()
# ... and these where Transformer Engine has them.
TRANSFORMER_ENGINE_KERNELS = ("moe_permute_fusion", "moe_router_fusion")


def _given_fields(cfg: DictConfig, config: TransformerConfig) -> dict[str, Any]:
    """Dotted key -> value of the settings of Megatron Core that `cfg` gives by their own names,
    one by one and as `mcore_customization_config`: NeMo set them on the `TransformerConfig`.
    """
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    acting = {name for name in fields if f"model.{name}" not in INERT_ARCHITECTURE}
    given = {f"model.{name}": cfg[name] for name in cfg if name in fields - known_model_keys()}
    for name, value in (cfg.get("mcore_customization_config") or {}).items():
        is_swiglu = name == "bias_activation_fusion" and config.activation_func is F.silu
        without_effect = has_no_effect(name) and name not in acting
        absent = name in TRANSFORMER_ENGINE_KERNELS and not use_transformer_engine()
        if not (is_swiglu or without_effect or absent or name in KERNELS):
            given[f"model.mcore_customization_config.{name}"] = value
    return {key: to_plain(value) for key, value in given.items()}
