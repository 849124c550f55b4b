# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3: queries and keys normalized per head."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names

QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"qk_layernorm": True},
    names=Names("model.", parts.OUTSIDE, parts.ATTENTION | parts.QUERY_KEY_NORM | parts.MLP),
    choices={"hidden_act": parts.GATED_ACTIVATIONS, "attention_bias": {False: {}}},
    parts=(parts.ROPE, parts.SWITCHED_WINDOW),
)
