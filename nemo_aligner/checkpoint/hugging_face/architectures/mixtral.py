# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral with a mixture of experts in each layer."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Names
from nemo_aligner.checkpoint.hugging_face.rows import joined, whole

_EXPERT = "block_sparse_moe.experts.{expert}."
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="Mixtral",
    same=parts.SIZES
    | parts.HEAD_SIZE
    | {
        "intermediate_size": "moe_ffn_hidden_size",
        "num_local_experts": "num_moe_experts",
        "num_experts_per_tok": "moe_router_topk",
    },
    # Its weights of the chosen experts add up to 1.
    always=parts.ALWAYS | {"moe_router_pre_softmax": False},
    names=Names(
        "model.",
        parts.OUTSIDE,
        parts.ATTENTION
        | {
            "mlp.router.": whole("block_sparse_moe.gate."),
            "mlp.experts.experts.linear_fc1.": joined(_EXPERT + "w1.", _EXPERT + "w3."),
            "mlp.experts.experts.linear_fc2.": whole(_EXPERT + "w2."),
            "pre_mlp_layernorm.": whole("post_attention_layernorm."),
        },
    ),
    choices={"hidden_act": parts.GATED_ACTIVATIONS},
    parts=(parts.ROPE, parts.WINDOW),
)
