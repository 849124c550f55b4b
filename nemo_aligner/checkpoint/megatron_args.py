# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a command line of Megatron-LM, which its checkpoints keep as `args`, and the
keys of `model`, in both directions.

Of some 700 names those count that say what the model computes: `ARGUMENTS`, what `model_keys`
reads beside them, `NEUTRAL`, and the fields of Megatron Core's configuration. The others are about
training and passed over.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint import transformer_fields
from nemo_aligner.checkpoint.hugging_face.architecture import Unsupported, computed, expert_layers
from nemo_aligner.checkpoint.transformer_fields import NORMALIZATIONS, Refusal
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict

# Argument -> key of `model` with the same value. Of two names for one key the second is the newer.
ARGUMENTS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    **{
        name: name
        for name in """num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels
        max_position_embeddings position_embedding_type rotary_base rotary_interleaved
        add_qkv_bias qk_layernorm window_size window_attn_skip_freq no_rope_freq hidden_dropout
        attention_dropout init_method_std make_vocab_size_divisible_by layernorm_epsilon
        layernorm_zero_centered_gamma yarn_original_max_position_embeddings yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int""".split()
    },
    **{name: name for name in transformer_fields.EXPERTS - {"num_moe_experts"}},
    "num_experts": "num_moe_experts",
    "seq_length": "encoder_seq_length",
    "add_bias_linear": "bias",
    "rotary_percent": "rotary_percentage",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "use_rope_scaling": "scale_positional_embedding",
    "rope_scaling_factor": "scale_factor",
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
# Read from arguments of other names; Megatron-LM does not look at these fields.
_NOT_READ = frozenset(
    """num_query_groups normalization activation_func gated_linear_unit bias_activation_fusion
    num_moe_experts""".split()
)
# Other arguments that make another model -> the value that does not.
NEUTRAL: dict[str, Any] = {
    "quick_geglu": False,
    "use_legacy_models": False,
    "multi_latent_attention": False,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "te_precision_config_file": None,
    "retro_add_retriever": False,
    "use_mup": False,
    "enable_mhc_connections": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "moe_expert_rank_capacity_factor": None,
}
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


def model_keys(args: Mapping[str, Any], refusal: Refusal) -> dict[str, Any]:
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
    # The fused kernel of GELU computes its form with tanh, and needs a bias.
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
    for name, neutral in NEUTRAL.items():
        if args.get(name, neutral) not in (neutral, None):
            raise refusal(name, args[name])
    spec = args.get("spec")
    if spec and str(spec[-1]) not in transformer_fields.LAYER_SPECS:
        raise refusal("spec", spec)
    fields = transformer_fields.defaults().keys() - ARGUMENTS.keys() - _NOT_READ
    rest = {name: args[name] for name in fields & args.keys()}
    transformer_fields.check_neutral(rest, refusal, experts)
    return keys


def _idle(experts: bool, positions: Any) -> tuple[str, ...]:
    """Beginnings of the keys that mean nothing in a model."""
    return ("moe_",) * (not experts) + ("yarn_",) * (positions != "yarn")


def arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the section `model`, in Megatron-LM's old names and its new ones.

    Raises:
        Unsupported: Megatron-LM has no arguments for it; the message names the keys.
    """
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

    again = computed(model_keys(args, refusal))
    changed = sorted(key for key in wanted if wanted[key] != again[key])
    if changed:
        raise Unsupported(
            "Megatron-LM has no arguments for "
            + ", ".join(f"model.{key}={wanted[key]!r}" for key in changed)
            + "."
        )
    return args | {"add_position_embedding": True}


def command_line(args: Mapping[str, Any]) -> str:
    """The options that Megatron-LM needs beside `--use-checkpoint-args` to build the model."""
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
