# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-2: learned positions, biases, matrices stored transposed."""

from nemo_aligner.checkpoint.hugging_face.architecture import CAUSAL_LM, Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import attention, whole

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
