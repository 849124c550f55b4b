# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a configuration that several architectures share."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face.architecture import (
    Attention,
    Part,
    Rule,
    Unsupported,
)
from nemo_aligner.checkpoint.stored_weights import heads_of
from nemo_aligner.config.values import is_number

Config = Mapping[str, Any]

# --- keys ---

SIZES = {
    "vocab_size": "override_vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "initializer_range": "init_method_std",
    "head_dim": "kv_channels",
}
ALWAYS = {
    "normalization": "rmsnorm",
    "bias": False,
    "position_embedding_type": "rope",
    "bias_activation_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GATED_ACTIVATIONS: dict[Any, dict[str, Any]] = {
    "silu": {"activation": "fast-swiglu", "openai_gelu": False},
    "gelu_pytorch_tanh": {"activation": "geglu", "openai_gelu": True},
    "gelu": {"activation": "geglu", "openai_gelu": False},
    "relu": {"activation": "reglu", "openai_gelu": False},
}

# Llama 3.1's rotary frequencies, constants in Megatron Core.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
# Names of rotary positions in transformers 5, and before.
_ROPE_NAMES = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_NUMBERS = ("rope_theta", "partial_rotary_factor", "factor", "attention_factor")


def _rope_keys(config: Config) -> dict[str, Any]:
    names = ("rope_theta", "partial_rotary_factor")
    given = {name: config[name] for name in names if config.get(name) is not None}
    given |= config.get("rope_scaling") or {}
    given |= config.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    for name, value in given.items():
        if name in _NUMBERS and value is not None and not (is_number(value) and value > 0):
            raise Unsupported(f"rope_parameters.{name}={value!r} is not a positive number.")
    if kind != "default" and given.get("factor") is None:
        raise Unsupported(f"rope_parameters.rope_type={kind!r} has no factor.")
    keys: dict[str, Any] = {
        "rotary_base": given.get("rope_theta", 10000.0),
        "rotary_percentage": given.get("partial_rotary_factor", 1.0),
    }
    if kind == "linear":
        keys["seq_len_interpolation_factor"] = float(given["factor"])
    elif kind == "llama3":
        for name, value in LLAMA3.items():
            if given.get(name) != value:
                raise Unsupported(
                    f"rope_parameters.{name}={given.get(name)!r} is not supported with llama3; "
                    f"Megatron Core computes with {value}."
                )
        keys |= {"scale_positional_embedding": True, "scale_factor": float(given["factor"])}
    elif kind == "yarn":
        keys |= _yarn_keys(given, config)
    elif kind != "default":
        raise Unsupported(
            f"rope_parameters.rope_type={kind!r} is not supported; what is: default, linear, "
            "llama3, yarn."
        )
    return keys


def _yarn_keys(given: Config, config: Config) -> dict[str, Any]:
    if given["factor"] <= 1:
        raise Unsupported(f"rope_parameters.factor={given['factor']} of yarn must be above 1.")
    original = given.get("original_max_position_embeddings")
    keys: dict[str, Any] = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": float(given["factor"]),
        "yarn_original_max_position_embeddings": original or config["max_position_embeddings"],
        "yarn_correction_range_round_to_int": bool(given.get("truncate", True)),
    }
    for name, key in YARN.items():
        if given.get(name) is not None:
            keys[key] = float(given[name])
    if not (keys.get("yarn_mscale") and keys.get("yarn_mscale_all_dim")):
        keys["yarn_mscale"] = keys["yarn_mscale_all_dim"] = None
    attention_factor = given.get("attention_factor")
    if attention_factor is not None:
        # Queries and keys are multiplied by 1 + 0.1 mscale ln(factor); the second key divides.
        keys["yarn_mscale"] = (attention_factor - 1) / (0.1 * math.log(given["factor"]))
        keys["yarn_mscale_all_dim"] = 0.0
    return keys


def _rope_config(keys: Config) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if keys.get("scale_positional_embedding"):
        rope = {"rope_type": "llama3", "factor": float(keys["scale_factor"]), **LLAMA3}
    elif keys.get("seq_len_interpolation_factor"):
        rope = {"rope_type": "linear", "factor": float(keys["seq_len_interpolation_factor"])}
    if keys["position_embedding_type"] == "yarn":
        rope = {
            "rope_type": "yarn",
            "factor": float(keys["yarn_rotary_scaling_factor"]),
            "original_max_position_embeddings": keys["yarn_original_max_position_embeddings"],
            "truncate": keys["yarn_correction_range_round_to_int"],
            **{name: keys[key] for name, key in YARN.items() if keys[key] is not None},
        }
        if rope.get("mscale_all_dim") == 0 and "mscale" in rope:
            del rope["mscale_all_dim"]
            rope["attention_factor"] = 1 + 0.1 * rope.pop("mscale") * math.log(rope["factor"])
    # Both forms: transformers before 5 reads the second only.
    result: dict[str, Any] = {"rope_theta": float(keys["rotary_base"])}
    if rope["rope_type"] != "default":
        result["rope_scaling"] = rope
    result["rope_parameters"] = rope | {"rope_theta": result["rope_theta"]}
    return result


def _partial_rope_config(keys: Config) -> dict[str, Any]:
    result = _rope_config(keys)
    # Always: Nemotron's default is 0.5.
    factor = {"partial_rotary_factor": float(keys["rotary_percentage"])}
    return result | factor | {"rope_parameters": result["rope_parameters"] | factor}


def _whole_rope_keys(config: Config) -> dict[str, Any]:
    keys = _rope_keys(config)
    if keys["rotary_percentage"] != 1.0:
        raise Unsupported(
            f"partial_rotary_factor={keys['rotary_percentage']} is not supported: the class of "
            "transformers rotates whole heads."
        )
    return keys


def _two_ropes_keys(config: Config) -> dict[str, Any]:
    whole, local = (config["rope_parameters"][kind] for kind in _LAYER_TYPES)
    keys = _whole_rope_keys({**config, "rope_parameters": whole, "rope_scaling": None})
    if local.get("rope_type", "default") != "default":
        kind = local["rope_type"]
        raise Unsupported(f"rope_parameters.sliding_attention.rope_type={kind!r} must be default.")
    return keys | {"rotary_base_local": None if local == whole else float(local["rope_theta"])}


def _two_ropes_config(keys: Config) -> dict[str, Any]:
    whole = _rope_config(keys)["rope_parameters"]
    base = keys["rotary_base_local"]
    local = whole if base is None else {"rope_type": "default", "rope_theta": float(base)}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


ROPE = Part(_ROPE_NAMES, _whole_rope_keys, _rope_config)
# Of layers without and with a window.
TWO_ROPES = Part((*_ROPE_NAMES, "rope_local_base_freq"), _two_ropes_keys, _two_ropes_config)
PARTIAL_ROPE = Part(_ROPE_NAMES, _rope_keys, _partial_rope_config)


def _window_keys(config: Config) -> dict[str, Any]:
    # Hugging Face counts a position's own in its window, Megatron Core does not.
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    pattern = [1] if kinds is None else [int(kind == "sliding_attention") for kind in kinds]
    if not window or not any(pattern):
        return {"window_size": None}
    keys: dict[str, Any] = {"window_size": [int(window) - 1, 0]}
    return keys if all(pattern) else keys | {"window_attn_skip_freq": pattern}


def _window_config(keys: Config) -> dict[str, Any]:
    layers = hf.windowed_layers(keys)
    return {"sliding_window": int(keys["window_size"][0]) + 1 if any(layers) else None}


def _layer_windows_config(keys: Config) -> dict[str, Any]:
    layers = hf.windowed_layers(keys) or [0] * int(keys["num_layers"])
    return _window_config(keys) | {"layer_types": [_LAYER_TYPES[each] for each in layers]}


def _switched_window_keys(config: Config) -> dict[str, Any]:
    if not config.get("use_sliding_window"):
        return {"window_size": None}
    if config.get("layer_types") is None:
        first = config.get("max_window_layers") or 0
        layers = range(config["num_hidden_layers"])
        config = {**config, "layer_types": [_LAYER_TYPES[layer >= first] for layer in layers]}
    return _window_keys(config)


def _switched_window_config(keys: Config) -> dict[str, Any]:
    layers = hf.windowed_layers(keys)
    if not any(layers):
        return {"use_sliding_window": False}
    switch = {"use_sliding_window": True, "max_window_layers": layers.index(1)}
    return _layer_windows_config(keys) | switch


WINDOW = Part(("sliding_window", "layer_types"), _window_keys, _window_config)
# Of classes that say for each layer whether it has the window.
LAYER_WINDOWS = Part(WINDOW.reads, _window_keys, _layer_windows_config)
# Qwen's, which a key of its own switches on.
SWITCHED_WINDOW = Part(
    (*WINDOW.reads, "use_sliding_window", "max_window_layers"),
    _switched_window_keys,
    _switched_window_config,
)
# Cohere 2's: layers without a window do not rotate.
ROTATED_WINDOWS = Part(
    WINDOW.reads,
    lambda config: (
        _window_keys(config)
        | {"no_rope_freq": [int(kind == _LAYER_TYPES[0]) for kind in config["layer_types"]]}
    ),
    _layer_windows_config,
)
# Qwen3-MoE's: in all layers, whatever max_window_layers says.
ALL_WINDOWS = Part(
    ("sliding_window", "use_sliding_window", "max_window_layers"),
    lambda config: _window_keys(
        {"sliding_window": config.get("use_sliding_window") and config.get("sliding_window")}
    ),
    lambda keys: _window_config(keys) | {"use_sliding_window": any(hf.windowed_layers(keys))},
)


def _expert_layers_keys(config: Config) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    pattern = [
        int(layer not in dense and (layer + 1) % step == 0)
        for layer in range(config["num_hidden_layers"])
    ]
    if not any(pattern):
        raise Unsupported(
            f"decoder_sparse_step={step} and mlp_only_layers={list(dense)} leave no layer with "
            "experts."
        )
    return {} if all(pattern) else {"moe_layer_freq": pattern}


def _expert_layers_config(keys: Config) -> dict[str, Any]:
    if not keys["num_moe_experts"]:
        return {}
    dense = [layer for layer, experts in enumerate(hf.expert_layers(keys)) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Qwen's: some layers may have one MLP instead.
EXPERT_LAYERS = Part(
    ("decoder_sparse_step", "mlp_only_layers"), _expert_layers_keys, _expert_layers_config
)


# transformers 5 has another name for it inside.
NUMBER_OF_EXPERTS = Part(
    ("num_experts", "num_local_experts"),
    lambda config: {
        "num_moe_experts": config.get("num_experts") or config.get("num_local_experts")
    },
    lambda keys: {"num_experts": keys["num_moe_experts"]},
)
QWEN_EXPERTS = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
}
NORMALIZED_WEIGHTS: dict[Any, dict[str, Any]] = {  # of the chosen experts, to a sum of 1
    True: {"moe_router_pre_softmax": False},
    False: {"moe_router_pre_softmax": True},
}

# SmolLM 3's: 1 for each layer that rotates.
ROTATED_LAYERS = Part(
    ("no_rope_layers", "no_rope_layer_interval", "layer_types"),
    lambda config: {"no_rope_freq": [1 - rotated for rotated in config["no_rope_layers"]]},
    lambda keys: {
        "no_rope_layers": [
            1 - left_out
            for left_out in hf.layers_without_rotation(keys) or [0] * int(keys["num_layers"])
        ]
    },
)


def _rounded(number: float) -> float:
    return float(f"{number:.12g}")  # 0.2 is 1 / sqrt(25)


# Granite's factor of the attention scores.
ATTENTION_MULTIPLIER = Part(
    ("attention_multiplier",),
    lambda config: {"query_pre_attn_scalar": _rounded(config["attention_multiplier"] ** -2)},
    lambda keys: {
        "attention_multiplier": float(keys["query_pre_attn_scalar"] or heads_of(keys).size) ** -0.5
    },
)
# Cohere's divides.
LOGIT_SCALE = Part(
    ("logit_scale",),
    lambda config: {"logits_scaling": _rounded(1 / config["logit_scale"])},
    lambda keys: {"logit_scale": _rounded(1 / keys["logits_scaling"])},
)

# --- names of weights ---

OUTSIDE: dict[str, Rule] = {
    "embedding.word_embeddings.": Rule("embed_tokens."),
    "decoder.final_layernorm.": Rule("norm."),
    "output_layer.": Rule("/lm_head."),
    "rm_head.": Rule("/score."),
}
WITHOUT_NORM: dict[str, Rule] = {
    "self_attention.linear_qkv.": Attention(
        "self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."
    ),
    "self_attention.linear_proj.": Rule("self_attn.o_proj."),
}
ATTENTION: dict[str, Rule] = WITHOUT_NORM | {
    "self_attention.linear_qkv.layer_norm_": Rule("input_layernorm."),
}
MLP_WITHOUT_NORM: dict[str, Rule] = {
    "mlp.linear_fc1.": Rule("mlp.gate_proj.", "mlp.up_proj."),
    "mlp.linear_fc2.": Rule("mlp.down_proj."),
}
MLP: dict[str, Rule] = MLP_WITHOUT_NORM | {
    "mlp.linear_fc1.layer_norm_": Rule("post_attention_layernorm."),
}
# Norms after attention and MLP, the only ones (OLMo) or beside those before (Gemma, GLM).
ATTENTION_END, MLP_END = (
    "self_attention.linear_proj.post_layernorm.",
    "mlp.linear_fc2.post_layernorm.",
)
QUERY_KEY_NORM: dict[str, Rule] = {
    "self_attention.q_layernorm.": Rule("self_attn.q_norm."),
    "self_attention.k_layernorm.": Rule("self_attn.k_norm."),
}
_EXPERT = "mlp.experts.{expert}."
# Beside layers with one MLP.
EXPERTS: dict[str, Rule] = {
    "mlp.router.": Rule("mlp.gate."),
    "mlp.experts.experts.linear_fc1.": Rule(_EXPERT + "gate_proj.", _EXPERT + "up_proj."),
    "mlp.experts.experts.linear_fc2.": Rule(_EXPERT + "down_proj."),
    "pre_mlp_layernorm.": Rule("post_attention_layernorm."),
}
