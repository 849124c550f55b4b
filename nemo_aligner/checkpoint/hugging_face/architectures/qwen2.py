# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: biases of queries, keys and values only."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture
from nemo_aligner.checkpoint.hugging_face.architectures.llama import NAMES

QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"qkv_bias": True},
    names=NAMES,
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.SWITCHED_WINDOW),
)
