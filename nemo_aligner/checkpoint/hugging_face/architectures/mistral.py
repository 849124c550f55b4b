# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama with a sliding window."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture
from nemo_aligner.checkpoint.hugging_face.architectures.llama import NAMES

MISTRAL = Architecture(
    model_type="mistral",
    class_name="Mistral",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS,
    names=NAMES,
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.WINDOW),
)
