# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Nemotron: layer norms centred at zero, squared ReLU, a part of each head rotated."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import whole

_SIZES = {name: key for name, key in parts.SIZES.items() if name != "rms_norm_eps"}
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
