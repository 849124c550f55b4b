# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with a mixture of experts, in all layers or in some."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names

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
