# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From NeMo's configuration keys to Megatron Core's `TransformerConfig`."""

import dataclasses
import functools
import importlib.util
import re
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
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.training.passes import expert_layers

# Of a complete section `model`; `Values.refuse` says how they read.
_REFUSED = """
model.position_embedding_type=yarn & ~model.yarn_rotary_scaling_factor or
    model.yarn_rotary_scaling_factor<=0 | needs a positive number; {}
model.position_embedding_type=yarn & ~model.yarn_original_max_position_embeddings or
    model.yarn_original_max_position_embeddings<=0 | needs a positive number; {}
model.rotary_percentage!=1 & model.position_embedding_type=yarn | is not supported with yarn; set
    it to 1.0
model.rotary_interleaved & model.position_embedding_type=yarn | is not supported with yarn; set it
    to False
model.seq_len_interpolation_factor!=null & model.position_embedding_type=yarn | is not supported
    with yarn; set it to null
model.scale_positional_embedding & model.position_embedding_type!=rope | with {}: set it to False
model.rotary_base_local!=null & ~model.window_size or model.position_embedding_type!=rope|yarn |
    needs model.window_size and model.position_embedding_type=rope or yarn; set it to null
model.window_attn_skip_freq!=null & ~model.window_size | needs model.window_size; set it, or the
    former to null
model.no_rope_freq!=null & model.position_embedding_type!=rope|yarn | with {}; set it to null
model.qk_layernorm_all_heads & !model.qk_layernorm | needs model.qk_layernorm=True
model.qk_layernorm_all_heads & model.normalization!=rmsnorm | needs model.normalization=rmsnorm
model.norm_position!=before & model.num_moe_experts or model.parallel_attention | is not supported
    with {}; set it to before
model.residual_multiplier!=1 & model.num_moe_experts or model.parallel_attention | is not supported
    with {}; set it to 1.0
model.parallel_attention & model.num_moe_experts | is not supported with {}; set it to False
!model.layernorm_bias & model.num_moe_experts | is not supported with {}; set it to True
model.openai_gelu & model.activation!=gelu|gelu_new|gelu_pytorch_tanh|fast-gelu|geglu|fast-geglu |
    would replace {}; set it to False, or the activation to gelu or geglu
model.bias_activation_fusion & model.activation=gelu|fast-gelu & !model.openai_gelu & !model.bias |
    has no bias to fuse with {}; set it to False
model.expert_model_parallel_size>1 & !model.num_moe_experts | , but {}; set it, or the former to 1
model.moe_token_dispatcher_type!=alltoall & model.num_moe_experts | is not supported: only alltoall
    lets ranks have different samples, as generation needs
model.num_moe_experts & model.tensor_model_parallel_size>1 & !model.sequence_parallel | with
    {model.tensor_model_parallel_size} needs model.sequence_parallel=True: without it Megatron Core
    refuses to train
model.num_moe_experts & model.tensor_model_parallel_size>1 & model.bias | with
    {model.tensor_model_parallel_size} needs model.bias=False: experts that are split over
    tensor-parallel ranks have no bias
model.moe_shared_expert_intermediate_size & model.bias & model.num_moe_experts | needs
    model.bias=False: shared experts have no bias
model.moe_shared_expert_gate & ~model.moe_shared_expert_intermediate_size & model.num_moe_experts |
    needs model.moe_shared_expert_intermediate_size; set it, or the gate to False
model.moe_router_topk<1 or model.moe_router_topk>model.num_moe_experts & model.num_moe_experts |
    must be from 1 to {}
model.moe_router_topk=1 & !model.moe_router_pre_softmax & model.num_moe_experts | needs
    model.moe_router_pre_softmax=True: the softmax over one expert is always 1, so the router would
    never learn
model.moe_router_load_balancing_type!=aux_loss|none & model.num_moe_experts | is not supported; use
    aux_loss or none
model.moe_aux_loss_coeff & model.moe_router_load_balancing_type=none & model.num_moe_experts | has
    no effect with {model.moe_router_load_balancing_type}; set it to 0, or the type to aux_loss
"""


def _check(cfg: DictConfig) -> None:
    """Raise `ConfigError` for what Megatron Core cannot compute, or not alike at every split."""
    read = {"rotary_base", "query_pre_attn_scalar", *re.findall(r"model\.(\w+)", _REFUSED)}
    section = {name: to_plain(cfg[name]) for name in read if name in cfg}
    section |= {name: str(cfg[name]).lower() for name in ("activation", "normalization")}
    values = Values({"model": section})
    values.choice("model.activation", tuple(ACTIVATIONS))
    values.choice("model.normalization", tuple(NORMALIZATIONS))
    values.choice("model.position_embedding_type", POSITION_EMBEDDINGS)
    values.number("model.rotary_base", 0, above=True)
    values.number("model.query_pre_attn_scalar", 0, above=True)
    values.refuse(_REFUSED)
    if cfg.num_moe_experts:
        values.multiple("model.num_moe_experts", "model.expert_model_parallel_size", times={})


def _layer_pattern(cfg: DictConfig, key: str, least: int, one: str) -> int | list[int] | None:
    """Checked `model.<key>` (`ConfigError`): period or pattern; a layer with 1 has or is `one`."""
    given = to_plain(cfg[key])
    if isinstance(given, list):
        good = len(given) == cfg.num_layers and set(given) <= {0, 1}
    else:
        good = given is None or (type(given) is int and given >= least)
    if not good:
        raise ConfigError(
            f"model.{key}={given!r} must be a whole number from {least} on, or a list with 1 "
            f"({one}) or 0 for each of the model.num_layers={cfg.num_layers} layers."
        )
    return given


POSITION_EMBEDDINGS = ("rope", "yarn", "learned_absolute", "none")


@dataclass
class GPTConfig(TransformerConfig):
    """`TransformerConfig` with what our layers read."""

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


def _expert_settings(cfg: DictConfig) -> dict[str, Any]:
    """No token is ever dropped, and the router computes in float32: a policy and its reference,
    two ranks, training and decoding must choose the same experts.
    """
    layers = _layer_pattern(cfg, "moe_layer_freq", 1, "experts")
    return dict(
        **{name: cfg[name] for name in SAME_EXPERT_NAMES},
        # A list of ones is 1: checkpoints name mixed layers otherwise.
        moe_layer_freq=1 if layers == [1] * cfg.num_layers else layers,
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
    hidden_dropout attention_dropout rotary_interleaved init_method_std layernorm_epsilon
    qk_layernorm tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
""".split()
SAME_EXPERT_NAMES = """
    num_moe_experts expert_model_parallel_size moe_router_topk moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_router_load_balancing_type moe_aux_loss_coeff
    moe_token_dispatcher_type moe_shared_expert_gate moe_router_pre_softmax
""".split()


def build_transformer_config(cfg: DictConfig) -> TransformerConfig:
    """Megatron Core's configuration for a complete section; `ConfigError`: it is not supported."""
    _check(cfg)
    dtype = torch_dtype(cfg.precision)
    yarn = {key: cfg[key] for key in YARN_KEYS if cfg.position_embedding_type == "yarn"}
    config_class = YarnTransformerConfig if yarn else GPTConfig
    normalization = str(cfg.normalization).lower()
    scale = cfg.query_pre_attn_scalar
    unrotated = _layer_pattern(cfg, "no_rope_freq", 2, "no rotation")
    if isinstance(unrotated, int):
        unrotated = [int((layer + 1) % unrotated == 0) for layer in range(cfg.num_layers)]
    virtual = cfg.virtual_pipeline_model_parallel_size
    if virtual == 1:  # Megatron Core would demand two pipeline stages for it
        virtual = None
    settings: dict[str, Any] = dict(
        **{name: cfg[name] for name in (*SAME_NAMES, *ADDITIONS)},
        kv_channels=cfg.kv_channels or None,
        **_activation_settings(cfg),
        normalization=NORMALIZATIONS[normalization],
        layernorm_zero_centered_gamma=normalization == "layernorm1p"
        or cfg.layernorm_zero_centered_gamma,
        add_bias_linear=cfg.bias,
        softmax_scale=None if scale is None else scale**-0.5,
        window_size=_window(cfg),
        window_attn_skip_freq=_layer_pattern(cfg, "window_attn_skip_freq", 2, "window"),
        no_rope_freq=unrotated,
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
        **{key: cfg[key] for key in UNEVEN if cfg.pipeline_model_parallel_size > 1},
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel=bool(cfg.sequence_parallel) and cfg.tensor_model_parallel_size > 1,
        # Virtual stages with PP=2 get wrong gradients from batched p2p communication.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        **_fusion_settings(cfg),
        **(_expert_settings(cfg) if cfg.num_moe_experts else {}),
    )
    config = config_class(**settings)
    given = _given_fields(cfg, config)
    own_keys = set(ONLY).union(*LIVE.values())
    passed = passed_fields(given, config, settings, own_keys, MODEL_REFUSED)
    modules = passed.get("recompute_modules")
    if cfg.parallel_attention and "layernorm" in str(modules):
        raise ConfigError("recompute_modules must not have layernorm with parallel_attention.")
    if modules is not None and config.recompute_granularity != "selective":
        needed = "model.activations_checkpoint_granularity=selective"
        raise ConfigError(f"recompute_modules={modules} needs {needed}.")
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
    function, gated = ACTIVATIONS[str(cfg.activation).lower()]
    # Not of experts, which weigh their output inside the kernel.
    has_kernels = use_transformer_engine() and not cfg.num_moe_experts
    fused = has_kernels and function is F.silu and gated
    if function is F.gelu and cfg.bias_activation_fusion and not cfg.openai_gelu:
        fused = has_kernels
        function = F.gelu if fused else tanh_gelu  # Megatron Core knows its kernel by `F.gelu`
    elif cfg.openai_gelu:
        function = tanh_gelu
    return {
        "activation_func": function,
        "gated_linear_unit": gated,
        "bias_activation_fusion": fused,
    }


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
