# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2: biases and layer norms, an MLP without a gate."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import whole

_SIZES = {name: key for name, key in parts.SIZES.items() if name != "rms_norm_eps"}
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
