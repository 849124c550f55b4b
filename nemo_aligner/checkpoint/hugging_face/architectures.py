# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The architectures of Hugging Face that are known here, as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face.architecture import (
    Architecture,
    Attention,
    Part,
    Rule,
    Unsupported,
)
from nemo_aligner.checkpoint.hugging_face.parts import (
    ALL_WINDOWS,
    ALWAYS,
    ATTENTION,
    ATTENTION_END,
    ATTENTION_MULTIPLIER,
    EXPERT_LAYERS,
    EXPERTS,
    GATED_ACTIVATIONS,
    LAYER_WINDOWS,
    LOGIT_SCALE,
    MLP,
    MLP_END,
    MLP_WITHOUT_NORM,
    NORMALIZED_WEIGHTS,
    NUMBER_OF_EXPERTS,
    OUTSIDE,
    PARTIAL_ROPE,
    QUERY_KEY_NORM,
    QWEN_EXPERTS,
    ROPE,
    ROTATED_LAYERS,
    ROTATED_WINDOWS,
    SIZES,
    SWITCHED_WINDOW,
    TWO_ROPES,
    WINDOW,
    WITHOUT_NORM,
)

_WITHOUT_GATE = MLP | {"mlp.linear_fc1.": Rule("mlp.up_proj.")}
_GELU: dict[Any, dict[str, Any]] = {
    "gelu_pytorch_tanh": {"activation": "gelu", "bias_activation_fusion": True},
    "gelu": {"activation": "gelu", "bias_activation_fusion": False},
}
_NO_BIAS: dict[str, Any] = {"attention_bias": {False: {}}}
_CAUSAL: dict[str, Any] = {"use_bidirectional_attention": {None: {}, False: {}}}


def _like_llama(
    model_type: str,
    *,
    norm_eps: str = "rms_norm_eps",
    same: Mapping[str, str] | None = None,
    always: Mapping[str, Any] | None = None,
    layer: Mapping[str, Rule] = MLP,
    attention: Mapping[str, Rule] = ATTENTION,
    activation: str = "hidden_act",
    choices: Mapping[str, Mapping[Any, Mapping[str, Any]]] | None = None,
    more: Sequence[Part] = (),
    rope: Part = ROPE,
    implied: Sequence[str] = (),
) -> Architecture:
    """Llama's architecture with additions and changes; `layer`: rules beside the attention's;
    `activation`: the name of its activation.
    """
    return Architecture(
        model_type=model_type,
        same=SIZES | {norm_eps: "layernorm_epsilon"} | dict(same or {}),
        always=ALWAYS | dict(always or {}),
        base="model.",
        outside=OUTSIDE,
        layer=dict(attention) | dict(layer),
        choices={activation: GATED_ACTIVATIONS} | dict(choices or {}),
        parts=(rope, *more),
        implied=implied,
    )


# Norms before and after attention and MLP, bounds of scores and logits, windows in some layers.
_GEMMA_2: dict[str, Any] = dict(
    always={
        "apply_embedding_scaling": True,
        "layernorm_zero_centered_gamma": True,
        "norm_position": "both",
    },
    same={
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    layer=MLP
    | {
        "mlp.linear_fc1.layer_norm_": Rule("pre_feedforward_layernorm."),
        ATTENTION_END: Rule("post_attention_layernorm."),
        MLP_END: Rule("post_feedforward_layernorm."),
    },
    activation="hidden_activation",
    choices=_NO_BIAS | _CAUSAL,
    more=(LAYER_WINDOWS,),
)

# Norms after attention and MLP alone, those of queries and keys over all heads.
_OLMO: dict[str, Any] = dict(
    always={"qk_layernorm": True, "qk_layernorm_all_heads": True, "norm_position": "after"},
    attention=WITHOUT_NORM,
    layer=QUERY_KEY_NORM
    | MLP_WITHOUT_NORM
    | {
        ATTENTION_END: Rule("post_attention_layernorm."),
        MLP_END: Rule("post_feedforward_layernorm."),
    },
    choices=_NO_BIAS,
)

# Neighbouring channels rotated, in a part of each head; gate and partner in one tensor.
_GLM: dict[str, Any] = dict(
    choices={"attention_bias": {True: {"qkv_bias": True}, False: {"qkv_bias": False}}},
    rope=PARTIAL_ROPE,
)
_GLM_MLP = MLP | {"mlp.linear_fc1.": Rule("mlp.gate_up_proj.")}
_MIXTRALS = "block_sparse_moe.experts.{expert}."

_TABLES = (
    # Llama 2, 3, 3.1, 3.2 and what shares their layers.
    _like_llama("llama", choices=_NO_BIAS | {"mlp_bias": {False: {}}}),
    # A sliding window.
    _like_llama("mistral", more=(WINDOW,)),
    # Qwen2 and Qwen2.5: biases of queries, keys and values only.
    _like_llama("qwen2", always={"qkv_bias": True}, more=(SWITCHED_WINDOW,)),
    # Queries and keys normalized per head.
    _like_llama(
        "qwen3",
        always={"qk_layernorm": True},
        layer=QUERY_KEY_NORM | MLP,
        choices=_NO_BIAS,
        more=(SWITCHED_WINDOW,),
    ),
    # Norms centred at zero, embeddings scaled by the root of the hidden size.
    _like_llama(
        "gemma",
        always={"apply_embedding_scaling": True, "layernorm_zero_centered_gamma": True},
        # Its first files say gelu and mean the tanh form; the class reads hidden_activation.
        choices=_NO_BIAS
        | _CAUSAL
        | {"hidden_act": {"gelu_pytorch_tanh": GATED_ACTIVATIONS["gelu_pytorch_tanh"]}},
        implied=("hidden_activation",),
    ),
    _like_llama("gemma2", **_GEMMA_2),
    # The text model: queries and keys normalized, two rotations.
    _like_llama(
        "gemma3_text",
        rope=TWO_ROPES,
        **_GEMMA_2
        | {
            "always": _GEMMA_2["always"] | {"qk_layernorm": True},
            "layer": QUERY_KEY_NORM | _GEMMA_2["layer"],
        },
    ),
    _like_llama("olmo2", **_OLMO),
    _like_llama("olmo3", rope=TWO_ROPES, more=(LAYER_WINDOWS,), **_OLMO),
    # Factors of embeddings, attention scores, branches and logits.
    _like_llama(
        "granite",
        same={n: n for n in "embedding_multiplier residual_multiplier logits_scaling".split()},
        choices=_NO_BIAS | {"mlp_bias": {False: {}}},
        more=(ATTENTION_MULTIPLIER,),
    ),
    # Attention beside the MLP, layer norms without bias, rotation in the layers with a window.
    _like_llama(
        "cohere2",
        norm_eps="layer_norm_eps",
        always={
            "normalization": "layernorm",
            "layernorm_bias": False,
            "parallel_attention": True,
            "rotary_interleaved": True,
        },
        layer=MLP_WITHOUT_NORM,
        choices=_NO_BIAS,
        more=(ROTATED_WINDOWS, LOGIT_SCALE),
    ),
    # Layers without rotation.
    _like_llama(
        "smollm3",
        choices=_NO_BIAS | {"mlp_bias": {False: {}}, "use_sliding_window": {False: {}}},
        more=(ROTATED_LAYERS,),
        implied=("sliding_window",),
    ),
    _like_llama("glm", always={"rotary_interleaved": True}, layer=_GLM_MLP, **_GLM),
    _like_llama(
        "glm4",
        always={"rotary_interleaved": True, "norm_position": "both"},
        layer=_GLM_MLP
        | {ATTENTION_END: Rule("post_self_attn_layernorm."), MLP_END: Rule("post_mlp_layernorm.")},
        **_GLM,
    ),
    # Learned positions, biases, matrices stored transposed.
    Architecture(
        model_type="gpt2",
        same={
            "vocab_size": "override_vocab_size",
            "n_embd": "hidden_size",
            "n_inner": "ffn_hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layernorm_epsilon",
            "tie_word_embeddings": "share_embeddings_and_output_weights",
            "initializer_range": "init_method_std",
        },
        always={
            "normalization": "layernorm",
            "bias": True,
            "position_embedding_type": "learned_absolute",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        base="transformer.",
        outside=OUTSIDE
        | {
            "embedding.word_embeddings.": Rule("wte."),
            "embedding.position_embeddings.": Rule("wpe."),
            "decoder.final_layernorm.": Rule("ln_f."),
        },
        layer={
            "self_attention.linear_qkv.": Attention("attn.c_attn.", transposed=True),
            "self_attention.linear_qkv.layer_norm_": Rule("ln_1."),
            "self_attention.linear_proj.": Rule("attn.c_proj.", transposed=True),
            "mlp.linear_fc1.": Rule("mlp.c_fc.", transposed=True),
            "mlp.linear_fc1.layer_norm_": Rule("ln_2."),
            "mlp.linear_fc2.": Rule("mlp.c_proj.", transposed=True),
        },
        layers="h.{layer}.",
        token_head="/classifier.",
        choices={
            "activation_function": {"gelu_new": _GELU["gelu_pytorch_tanh"]}
            | _GELU
            | {"relu": {"activation": "relu"}},
            "scale_attn_weights": {True: {}},
            "scale_attn_by_inverse_layer_idx": {False: {}},
            "add_cross_attention": {False: {}},
        },
        # Dropout, the order of the attention's arithmetic, heads of other tasks.
        implied="""resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn
        summary_type summary_use_proj summary_activation summary_proj_to_labels
        summary_first_dropout""".split(),
    ),
    # One tensor for queries, keys and values, one for gate and partner.
    _like_llama(
        "phi3",
        layer=MLP
        | {
            "self_attention.linear_qkv.": Attention("self_attn.qkv_proj."),
            "mlp.linear_fc1.": Rule("mlp.gate_up_proj."),
        },
        rope=PARTIAL_ROPE,
        more=(WINDOW,),
        # Its original length counts with longrope only, which is refused.
        implied=("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
    ),
    # Layer norms centred at zero, squared ReLU, a part of each head rotated.
    _like_llama(
        "nemotron",
        norm_eps="norm_eps",
        always={"normalization": "layernorm1p"},
        layer=_WITHOUT_GATE,
        choices=_NO_BIAS
        | {"hidden_act": {"relu2": {"activation": "squared-relu"}}, "mlp_bias": {False: {}}},
        rope=PARTIAL_ROPE,
    ),
    # Biases and layer norms, an MLP without a gate.
    _like_llama(
        "starcoder2",
        norm_eps="norm_epsilon",
        always={"normalization": "layernorm", "bias": True},
        layer=_WITHOUT_GATE
        | {"mlp.linear_fc1.": Rule("mlp.c_fc."), "mlp.linear_fc2.": Rule("mlp.c_proj.")},
        choices={"hidden_act": _GELU, "use_bias": {True: {}}},
        more=(WINDOW,),
        implied=("residual_dropout", "embedding_dropout"),
    ),
    # Mistral with a mixture of experts in each layer.
    _like_llama(
        "mixtral",
        same={
            "intermediate_size": "moe_ffn_hidden_size",
            "num_local_experts": "num_moe_experts",
            "num_experts_per_tok": "moe_router_topk",
        },
        # Its weights of the chosen experts add up to 1.
        always={"moe_router_pre_softmax": False},
        layer={
            "mlp.router.": Rule("block_sparse_moe.gate."),
            "mlp.experts.experts.linear_fc1.": Rule(_MIXTRALS + "w1.", _MIXTRALS + "w3."),
            "mlp.experts.experts.linear_fc2.": Rule(_MIXTRALS + "w2."),
            "pre_mlp_layernorm.": Rule("post_attention_layernorm."),
        },
        more=(WINDOW,),
    ),
    # Qwen2 with a mixture of experts and one that all tokens share, behind a gate.
    _like_llama(
        "qwen2_moe",
        same=QWEN_EXPERTS
        | {"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
        always={"moe_shared_expert_gate": True},
        layer=MLP
        | EXPERTS
        | {
            "mlp.shared_experts.linear_fc1.": Rule(
                "mlp.shared_expert.gate_proj.", "mlp.shared_expert.up_proj."
            ),
            "mlp.shared_experts.linear_fc2.": Rule("mlp.shared_expert.down_proj."),
            "mlp.shared_experts.gate_": Rule("mlp.shared_expert_gate."),
        },
        choices={
            "norm_topk_prob": NORMALIZED_WEIGHTS,
            "qkv_bias": {True: {"qkv_bias": True}, False: {"qkv_bias": False}},
        },
        more=(SWITCHED_WINDOW, NUMBER_OF_EXPERTS, EXPERT_LAYERS),
    ),
    # Qwen3 with a mixture of experts, in all layers or in some.
    _like_llama(
        "qwen3_moe",
        same=QWEN_EXPERTS,
        always={"qk_layernorm": True},
        layer=QUERY_KEY_NORM | MLP | EXPERTS,
        choices=_NO_BIAS | {"norm_topk_prob": NORMALIZED_WEIGHTS},
        more=(ALL_WINDOWS, NUMBER_OF_EXPERTS, EXPERT_LAYERS),
    ),
)

# By `model_type`; a model of no Hugging Face form is written as the first that can express it.
ARCHITECTURES = {architecture.model_type: architecture for architecture in _TABLES}

# `model_type` -> why a model cannot be computed here
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        "the cache of generation has no multi-head latent attention",
    ),
    "gpt_oss": "there are no attention sinks, and no experts with biases and a clamped activation",
    **dict.fromkeys(
        ("gemma3", "llama4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        "it reads images; a folder of its text model alone can be used",
    ),
    **dict.fromkeys(
        ("mamba2", "jamba", "bamba", "nemotron_h", "qwen3_next", "granitemoehybrid"),
        "its layers are not those of a transformer alone",
    ),
}


def expressing(keys: Mapping[str, Any]) -> Iterator[tuple[Architecture, dict[str, Any]]]:
    """Architectures that can express a model, with keys of `config.json`; `Unsupported`: none."""
    reasons = []
    for architecture in ARCHITECTURES.values():
        try:
            config = hf.hugging_face_config(architecture, keys)
        except Unsupported as error:
            reasons.append(str(error))
        else:
            yield architecture, config
    if len(reasons) == len(ARCHITECTURES):
        listed = "\n  ".join(reasons)
        raise Unsupported(f"no architecture of Hugging Face can express the model:\n  {listed}")
