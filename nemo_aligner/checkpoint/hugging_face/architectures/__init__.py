# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The architectures of Hugging Face that are known here, one file each."""

from nemo_aligner.checkpoint.hugging_face.architectures.gemma import GEMMA
from nemo_aligner.checkpoint.hugging_face.architectures.gpt2 import GPT2
from nemo_aligner.checkpoint.hugging_face.architectures.llama import LLAMA
from nemo_aligner.checkpoint.hugging_face.architectures.mistral import MISTRAL
from nemo_aligner.checkpoint.hugging_face.architectures.mixtral import MIXTRAL
from nemo_aligner.checkpoint.hugging_face.architectures.nemotron import NEMOTRON
from nemo_aligner.checkpoint.hugging_face.architectures.phi3 import PHI3
from nemo_aligner.checkpoint.hugging_face.architectures.qwen2 import QWEN2
from nemo_aligner.checkpoint.hugging_face.architectures.qwen2_moe import QWEN2_MOE
from nemo_aligner.checkpoint.hugging_face.architectures.qwen3 import QWEN3
from nemo_aligner.checkpoint.hugging_face.architectures.qwen3_moe import QWEN3_MOE
from nemo_aligner.checkpoint.hugging_face.architectures.starcoder2 import STARCODER2

# By `model_type`. For a model that never was in Hugging Face's form, the first one that can
# express it is written.
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GPT2,
        PHI3,
        NEMOTRON,
        STARCODER2,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
    )
}
