# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Phi-3: one tensor for queries, keys and values, one for gate and partner."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import attention, whole

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
