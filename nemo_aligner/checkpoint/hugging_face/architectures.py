# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The architectures of Hugging Face that are known here."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import (
    CAUSAL_LM,
    Architecture,
    Names,
    attention,
    joined,
    whole,
)

_SIZES = {name: key for name, key in parts.SIZES.items() if name != "rms_norm_eps"}

# Llama 2, 3, 3.1, 3.2 and what shares their layers.
NAMES = Names("model.", parts.OUTSIDE, parts.ATTENTION | parts.MLP)

LLAMA = Architecture(
    model_type="llama",
    class_name="Llama",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS,
    names=NAMES,
    choices={
        "hidden_act": parts.GATED_ACTIVATIONS,
        "attention_bias": {False: {}},
        "mlp_bias": {False: {}},
    },
    parts=(parts.ROPE,),
)


# Mistral: Llama with a sliding window.
MISTRAL = Architecture(
    model_type="mistral",
    class_name="Mistral",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS,
    names=NAMES,
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.WINDOW),
)


# Qwen2 and Qwen2.5: biases of queries, keys and values only.
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"qkv_bias": True},
    names=NAMES,
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.SWITCHED_WINDOW),
)


# Qwen3: queries and keys normalized per head.
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"qk_layernorm": True},
    names=Names("model.", parts.OUTSIDE, parts.ATTENTION | parts.QUERY_KEY_NORM | parts.MLP),
    choices={"hidden_act": parts.GATED_ACTIVATIONS, "attention_bias": {False: {}}},
    parts=(parts.ROPE, parts.SWITCHED_WINDOW),
)


# Gemma: norms centred at zero, embeddings scaled by the root of the hidden size.
GEMMA = Architecture(
    model_type="gemma",
    class_name="Gemma",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"apply_embedding_scaling": True, "layernorm_zero_centered_gamma": True},
    names=NAMES,
    # Its first files say gelu and mean the tanh form; the class reads hidden_activation.
    choices={
        "hidden_act": {"gelu_pytorch_tanh": parts.GATED_ACTIVATIONS["gelu_pytorch_tanh"]},
        "attention_bias": {False: {}},
        "use_bidirectional_attention": {None: {}, False: {}},
    },
    parts=(parts.ROPE,),
    implied=("hidden_activation",),
)


# GPT-2: learned positions, biases, matrices stored transposed.
GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2",
    endings={CAUSAL_LM: "LMHeadModel"},
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
    names=Names(
        base="transformer.",
        outside={
            "embedding.word_embeddings.": whole("wte."),
            "embedding.position_embeddings.": whole("wpe."),
            "decoder.final_layernorm.": whole("ln_f."),
            "output_layer.": whole("/lm_head."),
            "rm_head.": whole("/score."),
        },
        layer={
            "self_attention.linear_qkv.": attention("attn.c_attn.", transposed=True),
            "self_attention.linear_qkv.layer_norm_": whole("ln_1."),
            "self_attention.linear_proj.": whole("attn.c_proj.", transposed=True),
            "mlp.linear_fc1.": whole("mlp.c_fc.", transposed=True),
            "mlp.linear_fc1.layer_norm_": whole("ln_2."),
            "mlp.linear_fc2.": whole("mlp.c_proj.", transposed=True),
        },
        layers="h.{layer}.",
        token_head="/classifier.",
    ),
    choices={
        "activation_function": {
            "gelu_new": {"activation": "gelu", "bias_activation_fusion": True},
            "gelu_pytorch_tanh": {"activation": "gelu", "bias_activation_fusion": True},
            "gelu": {"activation": "gelu", "bias_activation_fusion": False},
            "relu": {"activation": "relu"},
        },
        "scale_attn_weights": {True: {}},
        "scale_attn_by_inverse_layer_idx": {False: {}},
        "add_cross_attention": {False: {}},
    },
    # Dropout and the order of the attention's arithmetic, and heads of other tasks
    implied=(
        "resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn summary_type summary_use_proj "
        "summary_activation summary_proj_to_labels summary_first_dropout"
    ).split(),
)


# Phi-3: one tensor for queries, keys and values, one for gate and partner.
PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS,
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | parts.MLP
        | {
            "self_attention.linear_qkv.": attention("self_attn.qkv_proj."),
            "mlp.linear_fc1.": whole("mlp.gate_up_proj."),
        },
    ),
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.PARTIAL_ROPE, parts.WINDOW),
    # Its original length counts with longrope only, which is refused.
    implied=("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
)


# Nemotron: layer norms centred at zero, squared ReLU, a part of each head rotated.
NEMOTRON = Architecture(
    model_type="nemotron",
    class_name="Nemotron",
    same=_SIZES | parts.HEAD_SIZE | {"norm_eps": "layernorm_epsilon"},
    always=parts.ALWAYS | {"normalization": "layernorm1p"},
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | {
            "mlp.linear_fc1.": whole("mlp.up_proj."),
            "mlp.linear_fc2.": whole("mlp.down_proj."),
            "mlp.linear_fc1.layer_norm_": whole("post_attention_layernorm."),
        },
    ),
    choices={
        "hidden_act": {"relu2": {"activation": "squared-relu"}},
        "attention_bias": {False: {}},
        "mlp_bias": {False: {}},
    },
    parts=(parts.PARTIAL_ROPE,),
)


# StarCoder 2: biases and layer norms, an MLP without a gate.
STARCODER2 = Architecture(
    model_type="starcoder2",
    class_name="Starcoder2",
    same=_SIZES | parts.HEAD_SIZE | {"norm_epsilon": "layernorm_epsilon"},
    always=parts.ALWAYS | {"normalization": "layernorm", "bias": True},
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | {
            "mlp.linear_fc1.": whole("mlp.c_fc."),
            "mlp.linear_fc2.": whole("mlp.c_proj."),
            "mlp.linear_fc1.layer_norm_": whole("post_attention_layernorm."),
        },
    ),
    choices={
        "hidden_act": {
            "gelu_pytorch_tanh": {"activation": "gelu", "bias_activation_fusion": True},
            "gelu": {"activation": "gelu", "bias_activation_fusion": False},
        },
        "use_bias": {True: {}},
    },
    parts=(parts.ROPE, parts.WINDOW),
    implied=("residual_dropout", "embedding_dropout"),
)


# Mixtral: Mistral with a mixture of experts in each layer.
_EXPERT = "block_sparse_moe.experts.{expert}."
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="Mixtral",
    same=parts.SIZES
    | parts.HEAD_SIZE
    | {
        "intermediate_size": "moe_ffn_hidden_size",
        "num_local_experts": "num_moe_experts",
        "num_experts_per_tok": "moe_router_topk",
    },
    # Its weights of the chosen experts add up to 1.
    always=parts.ALWAYS | {"moe_router_pre_softmax": False},
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | {
            "mlp.router.": whole("block_sparse_moe.gate."),
            "mlp.experts.experts.linear_fc1.": joined(_EXPERT + "w1.", _EXPERT + "w3."),
            "mlp.experts.experts.linear_fc2.": whole(_EXPERT + "w2."),
            "pre_mlp_layernorm.": whole("post_attention_layernorm."),
        },
    ),
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.WINDOW),
)


# Qwen2 with a mixture of experts and one that all tokens share, behind a gate.
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2Moe",
    same=parts.SIZES
    | parts.HEAD_SIZE
    | parts.QWEN_EXPERTS
    | {"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
    always=parts.ALWAYS | {"moe_shared_expert_gate": True},
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | parts.MLP
        | parts.EXPERTS
        | {
            "mlp.shared_experts.linear_fc1.": joined(
                "mlp.shared_expert.gate_proj.", "mlp.shared_expert.up_proj."
            ),
            "mlp.shared_experts.linear_fc2.": whole("mlp.shared_expert.down_proj."),
            "mlp.shared_experts.gate_": whole("mlp.shared_expert_gate."),
        },
    ),
    choices={
        "hidden_act": parts.GATED_ACTIVATIONS,
        "norm_topk_prob": parts.NORMALIZED_WEIGHTS,
        "qkv_bias": {True: {"qkv_bias": True}, False: {"qkv_bias": False}},
    },
    parts=(parts.ROPE, parts.SWITCHED_WINDOW, parts.NUMBER_OF_EXPERTS, parts.EXPERT_LAYERS),
)


# Qwen3 with a mixture of experts, in all layers or in some.
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3Moe",
    same=parts.SIZES | parts.HEAD_SIZE | parts.QWEN_EXPERTS,
    always=parts.ALWAYS | {"qk_layernorm": True},
    names=Names(
        "model.", parts.OUTSIDE, parts.ATTENTION | parts.QUERY_KEY_NORM | parts.MLP | parts.EXPERTS
    ),
    choices={
        "hidden_act": parts.GATED_ACTIVATIONS,
        "attention_bias": {False: {}},
        "norm_topk_prob": parts.NORMALIZED_WEIGHTS,
    },
    parts=(parts.ROPE, parts.ALL_WINDOWS, parts.NUMBER_OF_EXPERTS, parts.EXPERT_LAYERS),
)


# By `model_type`. For a model that never was in Hugging Face's form, the first one that can
# express it is written.
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GPT2,
        PHI3,
        NEMOTRON,
        STARCODER2,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
    )
}
