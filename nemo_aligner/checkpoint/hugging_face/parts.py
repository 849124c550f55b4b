# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a configuration that several architectures share: sizes, rotary positions, windows,
experts.
"""

from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.hugging_face.architecture import Part, Unsupported
from nemo_aligner.checkpoint.hugging_face.rows import Rule, attention, joined, whole

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
    "rms_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "initializer_range": "init_method_std",
}
HEAD_SIZE = {"head_dim": "kv_channels"}
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

# Llama 3.1's change of the rotary frequencies. Megatron Core has these as constants.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# How a configuration names its rotary positions: transformers 5, and before.
_ROPE_NAMES = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


def _rope_keys(config: Config) -> dict[str, Any]:
    given = {
        name: config[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if config.get(name) is not None
    }
    given |= config.get("rope_scaling") or {}
    given |= config.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))
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
    elif kind != "default":
        raise Unsupported(
            f"rope_parameters.rope_type={kind!r} is not supported; what is: default, linear, "
            "llama3."
        )
    return keys


def _rope_config(keys: Config) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if keys.get("scale_positional_embedding"):
        rope = {"rope_type": "llama3", "factor": float(keys["scale_factor"]), **LLAMA3}
    elif keys.get("seq_len_interpolation_factor"):
        rope = {"rope_type": "linear", "factor": float(keys["seq_len_interpolation_factor"])}
    # Both forms: transformers before 5 reads the second one only.
    result: dict[str, Any] = {"rope_theta": float(keys["rotary_base"])}
    if rope["rope_type"] != "default":
        result["rope_scaling"] = rope
    if keys["rotary_percentage"] != 1.0:
        result["partial_rotary_factor"] = float(keys["rotary_percentage"])
    result["rope_parameters"] = rope | {
        name: result[name] for name in ("rope_theta", "partial_rotary_factor") if name in result
    }
    return result


ROPE = Part(_ROPE_NAMES, _rope_keys, _rope_config)


def _window_keys(config: Config) -> dict[str, Any]:
    # Hugging Face counts a position's own in its window, Megatron Core does not.
    window = config.get("sliding_window")
    kinds = set(config.get("layer_types") or ())
    if not window or kinds == {"full_attention"}:
        return {"window_size": None}
    if len(kinds) > 1:
        raise Unsupported(
            f"sliding_window={window} in some layers only (layer_types) is not supported."
        )
    return {"window_size": [int(window) - 1, 0]}


def _window_config(keys: Config) -> dict[str, Any]:
    window = keys.get("window_size")
    if window is None or list(window) == [-1, -1]:
        return {"sliding_window": None}
    return {"sliding_window": int(window[0]) + 1}


WINDOW = Part(("sliding_window", "layer_types"), _window_keys, _window_config)


def _switched_window_keys(config: Config) -> dict[str, Any]:
    if not config.get("use_sliding_window"):
        return {"window_size": None}
    first, layers = config.get("max_window_layers", 0), config.get("num_hidden_layers")
    if not config.get("layer_types") and first not in (0, layers):
        raise Unsupported(
            f"use_sliding_window=True with max_window_layers={first} is not supported: only some "
            "layers have a window."
        )
    return {"window_size": None} if first == layers else _window_keys(config)


def _switched_window_config(keys: Config) -> dict[str, Any]:
    window = _window_config(keys)
    used = window["sliding_window"] is not None
    return window | {"use_sliding_window": used} | ({"max_window_layers": 0} if used else {})


# Qwen's, which a key of its own switches on
SWITCHED_WINDOW = Part(
    ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    _switched_window_keys,
    _switched_window_config,
)

# --- names of weights ---

OUTSIDE: dict[str, Rule] = {
    "embedding.word_embeddings.": whole("embed_tokens."),
    "decoder.final_layernorm.": whole("norm."),
    "output_layer.": whole("/lm_head."),
    "rm_head.": whole("/score."),
}
ATTENTION: dict[str, Rule] = {
    "self_attention.linear_qkv.": attention(
        "self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."
    ),
    "self_attention.linear_proj.": whole("self_attn.o_proj."),
    "self_attention.linear_qkv.layer_norm_": whole("input_layernorm."),
}
MLP: dict[str, Rule] = {
    "mlp.linear_fc1.": joined("mlp.gate_proj.", "mlp.up_proj."),
    "mlp.linear_fc2.": whole("mlp.down_proj."),
    "mlp.linear_fc1.layer_norm_": whole("post_attention_layernorm."),
}
QUERY_KEY_NORM: dict[str, Rule] = {
    "self_attention.q_layernorm.": whole("self_attn.q_norm."),
    "self_attention.k_layernorm.": whole("self_attn.k_norm."),
}
