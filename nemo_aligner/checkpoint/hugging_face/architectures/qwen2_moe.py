# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 with a mixture of experts and one that all tokens share, behind a gate."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import joined, whole

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
