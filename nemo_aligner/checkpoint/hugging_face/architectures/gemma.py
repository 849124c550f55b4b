# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Gemma: norms centred at zero, embeddings scaled by the root of the hidden size."""

from nemo_aligner.checkpoint.hugging_face import parts
from nemo_aligner.checkpoint.hugging_face.architecture import Architecture
from nemo_aligner.checkpoint.hugging_face.architectures.llama import NAMES

GEMMA = Architecture(
    model_type="gemma",
    class_name="Gemma",
    same=parts.SIZES | parts.HEAD_SIZE,
    always=parts.ALWAYS | {"apply_embedding_scaling": True, "layernorm_zero_centered_gamma": True},
    names=NAMES,
    # Its first files say gelu and mean the tanh form; the class reads hidden_activation.
    choices={
        "hidden_act": {"gelu_pytorch_tanh": parts.GATED_ACTIVATIONS["gelu_pytorch_tanh"]},
        "attention_bias": {False: {}},
        "use_bidirectional_attention": {None: {}, False: {}},
    },
    parts=(parts.ROPE,),
    implied=("hidden_activation",),
)
