# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of Megatron Core's `TransformerConfig` and arguments of its `GPTModel`, as NeMo 2.0,
Megatron-Bridge and Megatron-LM store them, and the keys of `model` that they become.

Fields in none of `SAME`, `RENAMED`, `EXPERTS`, `ACTIVATIONS` and `IGNORED` must have their
default. Of the some 700 `args` of Megatron-LM those count that say what the model computes: these
fields, `ARGUMENTS`, `NEUTRAL` and what `argument_keys` reads.
"""

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_aligner.checkpoint.hugging_face.architecture import Unsupported, computed, expert_layers
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError

SAME = frozenset(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    hidden_dropout attention_dropout layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm
    add_qkv_bias init_method_std rotary_base rotary_interleaved seq_len_interpolation_factor
    position_embedding_type share_embeddings_and_output_weights make_vocab_size_divisible_by
    window_size window_attn_skip_freq no_rope_freq bias_activation_fusion
    yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int""".split()
)
RENAMED = {
    "seq_length": "encoder_seq_length",
    "add_bias_linear": "bias",
    "rotary_percent": "rotary_percentage",
}
NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Function -> `activation` without and with a gate; the others compute GELU's tanh form.
ACTIVATIONS: dict[str, tuple[str, str | None]] = {
    "silu": ("silu", "fast-swiglu"),
    "gelu": ("gelu", "geglu"),
    "relu": ("relu", "reglu"),
    "squared_relu": ("squared-relu", None),
}
_TANH_GELU = ("openai_gelu", "fast_gelu")
# How a job was split, computed and initialized, also of other releases.
IGNORED = frozenset(
    [field.name for field in dataclasses.fields(ModelParallelConfig)]
    + """_target_ num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    first_pipeline_num_layers last_pipeline_num_layers num_layers_per_virtual_pipeline_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    pipeline_model_parallel_split_rank encoder_tensor_model_parallel_size
    encoder_pipeline_model_parallel_size init_method output_layer_init_method
    embedding_init_method embedding_init_method_std init_model_with_meta_device
    fp16_lm_cross_entropy fp32_residual_connection attention_softmax_in_fp32 attention_backend
    apply_query_key_layer_scaling disable_parameter_transpose_cache memory_efficient_layer_norm
    async_tensor_model_parallel_allreduce inference_rng_tracker tp_only_amax_red
    masked_softmax_fusion persist_layer_norm bias_dropout_fusion bias_dropout_add_fusion
    apply_rope_fusion distribute_saved_activations clone_scatter_output_in_embedding
    scatter_embedding_sequence_parallel parallel_output enable_cuda_graph external_cuda_graph
    config_logger_dir flash_decode vocab_size forward_step_fn data_step_fn transformer_impl
    use_transformer_engine_full_layer_spec calculate_per_token_loss
    pipeline_model_parallel_layout hf_model_id generation_config
    use_transformer_engine_op_fuser _pg_collection qk_clip fused_single_qkv_rope
    fine_grained_activation_offloading min_offloaded_tensor_size use_te_activation_func
    log_max_attention_logit""".split()
)
# Of settings that are ignored, or that a switch of another name turns on.
IGNORED_PREFIXES = tuple(
    """tp_comm_ cp_comm_ recompute_ cpu_offloading _cpu_offloading fp8 fp4 inference_
    offload_ activation_offload_ cuda_graph_ batch_invariant_ dsa_ mhc_ mup_ gdp_ gtp_ expert_gtp_
    """.split()
)
LAYER_SPECS = tuple(
    """default_layer_spec local_layer_spec transformer_engine_layer_spec get_gpt_layer_local_spec
    get_gpt_layer_with_transformer_engine_spec get_gpt_decoder_block_spec""".split()
)
# Without experts they mean nothing.
EXPERTS = frozenset(
    """num_moe_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_pre_softmax
    moe_shared_expert_intermediate_size moe_shared_expert_gate""".split()
)
NUMBER_OF_EXPERTS = "num_moe_experts"
# How experts were balanced and computed, and what other routers would need.
_EXPERTS_IGNORED = frozenset(
    """moe_aux_loss_coeff moe_z_loss_coeff moe_token_dispatcher_type moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_router_dtype moe_permute_fusion moe_router_fusion
    moe_enable_deepep moe_flex_dispatcher_backend moe_shared_expert_overlap moe_per_layer_logging
    moe_layer_recompute moe_deepep_num_sms moe_hybridep_num_sms moe_extended_tp
    moe_router_bias_update_rate moe_token_drop_policy moe_enable_routing_replay
    moe_router_padding_for_quantization moe_router_padding_for_fp8""".split()
)
BALANCING = "moe_router_load_balancing_type"
_BALANCED_IN_TRAINING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}

Refusal = Callable[[str, Any], UserError]  # of the field of this name with this value


def model_keys(fields: Mapping[str, Any], refusal: Refusal, experts: bool) -> dict[str, Any]:
    """Keys of `model` for fields by name; classes and functions are `{_target_: <dotted path>}`.
    Raises `refusal` of a field without a counterpart.
    """
    given = dict(fields)
    keys = {name: given.pop(name) for name in SAME & given.keys()}
    keys |= {RENAMED[name]: given.pop(name) for name in RENAMED.keys() & given.keys()}
    function = last_name(given.pop("activation_func", {"_target_": "gelu"}))
    gated = bool(given.pop("gated_linear_unit", False))
    is_tanh = function in _TANH_GELU
    activation = ACTIVATIONS.get("gelu" if is_tanh else function, (None, None))[gated]
    if activation is None:
        raise refusal("activation_func", f"{function} with gated_linear_unit={gated}")
    keys |= {"activation": activation} | ({"openai_gelu": True} if is_tanh else {})
    norm = given.pop("normalization", "LayerNorm")
    if norm not in NORMALIZATIONS:
        raise refusal("normalization", norm)
    keys["normalization"] = NORMALIZATIONS[norm]
    spec = last_name(given.pop("transformer_layer_spec", None) or LAYER_SPECS[0])
    if spec not in LAYER_SPECS:
        raise refusal("transformer_layer_spec", spec)
    if experts and given.get(NUMBER_OF_EXPERTS) is not None:
        keys |= {name: given.pop(name) for name in EXPERTS & given.keys()}
        given = {name: value for name, value in given.items() if name not in _EXPERTS_IGNORED}
    check_neutral(given, refusal, experts=NUMBER_OF_EXPERTS in keys)
    return keys


def check_neutral(fields: Mapping[str, Any], refusal: Refusal, experts: bool) -> None:
    """Raise `refusal` of a field that changes what a model computes."""
    experts = experts or fields.get(NUMBER_OF_EXPERTS) is not None

    def has_no_effect(name: str, value: Any) -> bool:
        if name in IGNORED or name.startswith(IGNORED_PREFIXES):
            return True
        if name.startswith("moe_") and (not experts or name in _EXPERTS_IGNORED):
            return True
        if name == BALANCING and value:
            return set(value if isinstance(value, list) else [value]) <= _BALANCED_IN_TRAINING
        return value in (None, False, [], {}, "") or value == _DEFAULTS.get(name, ...)

    for name, value in sorted(fields.items(), key=lambda item: item[0] != NUMBER_OF_EXPERTS):
        if not has_no_effect(name, value):
            raise refusal(name, value)


def last_name(target: Any) -> str:
    """Name of a class or function, from `{_target_: <dotted path>}` or the path itself."""
    if isinstance(target, Mapping):
        target = target.get("_target_")
    return str(target).rsplit(".", 1)[-1]


# Read from arguments of other names.
_NOT_READ = frozenset(
    """num_query_groups normalization activation_func gated_linear_unit bias_activation_fusion
    num_moe_experts seq_len_interpolation_factor share_embeddings_and_output_weights
    yarn_rotary_scaling_factor yarn_mscale yarn_mscale_all_dim""".split()
)
# Argument -> key of `model`. Of two names for one key the second is the newer.
ARGUMENTS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    **{name: name for name in sorted((SAME | EXPERTS) - _NOT_READ)},
    "max_position_embeddings": "max_position_embeddings",
    **RENAMED,
    "num_experts": "num_moe_experts",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "use_rope_scaling": "scale_positional_embedding",
    "rope_scaling_factor": "scale_factor",
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
# Other arguments, which with a value make another model.
NEUTRAL = tuple(
    """quick_geglu use_legacy_models multi_latent_attention hybrid_layer_pattern
    hybrid_override_pattern heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json te_precision_config_file retro_add_retriever use_mup
    enable_mhc_connections moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
    moe_expert_rank_capacity_factor""".split()
)
# What `--use-checkpoint-args` does not take from a checkpoint -> Megatron-LM's own default.
_NOT_TAKEN: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
    "rope_scaling_factor": 8.0,
    **dict.fromkeys(
        """apply_layernorm_1p qk_layernorm use_rope_scaling moe_shared_expert_gate window_size
        rotary_seq_len_interpolation_factor window_attn_skip_freq no_rope_freq
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim""".split()
    ),
}


def argument_keys(args: Mapping[str, Any], refusal: Refusal) -> dict[str, Any]:
    """Keys of `model` for the arguments; raises `refusal` of one that has no counterpart."""
    experts = args.get("num_experts") is not None
    idle = _idle(experts, args.get("position_embedding_type"))
    keys = {
        key: args[name]
        for name, key in ARGUMENTS.items()
        if args.get(name) is not None and not key.startswith(idle)
    }
    norm = args.get("normalization", "LayerNorm")
    if norm not in NORMALIZATIONS:
        raise refusal("normalization", norm)
    keys["normalization"] = NORMALIZATIONS[norm]
    kind = "fast-swiglu" if args.get("swiglu") else "squared-relu"
    keys["activation"] = kind if args.get("swiglu") or args.get("squared_relu") else "gelu"
    # The fused kernel computes GELU's tanh form, and needs a bias.
    fused = args.get("bias_gelu_fusion") and args.get("add_bias_linear", True)
    keys["bias_activation_fusion"] = bool(fused and keys["activation"] == "gelu")
    # Without the switch Megatron-LM passes over the number, which is 1 then.
    if args.get("group_query_attention", "num_query_groups" in args):
        keys["num_query_groups"] = args.get("num_query_groups")
    if args.get("use_rotary_position_embeddings"):
        keys["position_embedding_type"] = "rope"
    if args.get("disable_bias_linear"):
        keys["bias"] = False
    untied = args.get("untie_embeddings_and_output_weights", False)
    keys["share_embeddings_and_output_weights"] = not untied
    for name in NEUTRAL:
        if (value := args.get(name)) is not None and value is not False:
            raise refusal(name, value)
    spec = args.get("spec")
    if spec and str(spec[-1]) not in LAYER_SPECS:
        raise refusal("spec", spec)
    fields = _DEFAULTS.keys() - ARGUMENTS.keys() - _NOT_READ
    rest = {name: args[name] for name in fields & args.keys()}
    check_neutral(rest, refusal, experts)
    return keys


def _idle(experts: bool, positions: Any) -> tuple[str, ...]:
    return ("moe_",) * (not experts) + ("yarn_",) * (positions != "yarn")


def arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arguments in Megatron-LM's old and new names; `Unsupported` names missing ones."""
    keys = plain_dict(complete_model(dict(model)), resolve=True)
    wanted = computed(keys)
    idle = _idle(bool(keys["num_moe_experts"]), keys["position_embedding_type"])
    args = {n: keys[key] for n, key in ARGUMENTS.items() if not key.startswith(idle)}
    activation, groups = wanted["activation"], int(keys["num_query_groups"])
    gamma = bool(wanted["layernorm_zero_centered_gamma"])
    args |= {
        "kv_channels": int(wanted["kv_channels"]),
        "group_query_attention": groups != keys["num_attention_heads"],
        "num_query_groups": groups,
        "add_qkv_bias": wanted["add_qkv_bias"],
        "normalization": "RMSNorm" if wanted["normalization"] == "rmsnorm" else "LayerNorm",
        "layernorm_zero_centered_gamma": gamma,
        "apply_layernorm_1p": gamma,
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "squared-relu",
        "bias_gelu_fusion": activation != "gelu" or not keys["bias"],
        "untie_embeddings_and_output_weights": not keys["share_embeddings_and_output_weights"],
    }
    if keys["num_moe_experts"]:  # a list of ones would give the weights other names
        pattern = expert_layers(keys)
        args["moe_layer_freq"] = 1 if all(pattern) else pattern

    def refusal(name: str, value: Any) -> Unsupported:
        return Unsupported(f"Megatron-LM has no value of {name} for {value!r}.")

    again = computed(argument_keys(args, refusal))
    changed = sorted(key for key in wanted if wanted[key] != again[key])
    if changed:
        raise Unsupported(
            "Megatron-LM has no arguments for "
            + ", ".join(f"model.{key}={wanted[key]!r}" for key in changed)
            + "."
        )
    return args | {"add_position_embedding": True}


def command_line(args: Mapping[str, Any]) -> str:
    """What Megatron-LM needs beside `--use-checkpoint-args` to build the model."""
    options = []
    for name, default in _NOT_TAKEN.items():
        value, option = args.get(name), name.replace("_", "-")
        if value is None or value == default or (value is False and default is None):
            continue
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            whole = isinstance(value, float) and value.is_integer()  # some take ints alone
            text = str(int(value) if whole else value).replace(" ", "")
            text = text.strip("[]") if name == "window_size" else text
            options.append(f"--{option} {shlex.quote(text)}")
    return " ".join(options)
