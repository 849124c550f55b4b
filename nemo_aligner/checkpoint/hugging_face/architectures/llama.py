# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1, 3.2 and what shares their layers."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names

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
