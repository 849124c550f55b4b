# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: `config.json`, safetensors and the tokenizer, read and written.

    rows.py            which rows of which tensors of Hugging Face make one tensor of Megatron Core
    architecture.py    what an architecture's file declares, and its keys in both directions
    architectures/     one file for each architecture
    folder.py          the files of a folder, for reading
    weights.py         a folder's weights by the names of Megatron Core (a `TensorSource`)
    reading.py         a folder as a checkpoint: its keys and weights
    export.py          weights of a `TensorSource` written as safetensors
    writing.py         a model written as a folder
    peft_config.py     `adapter_config.json` of a folder of PEFT, in both directions
    peft_names.py      the modules of PEFT that each adapter stands for
    peft_reading.py    a folder of PEFT as a checkpoint of adapters
    peft_writing.py    adapters written as a folder of PEFT

Nothing here computes on weights: tensors are taken apart, put together and transposed, so that
what is written is what was read, bit for bit. docs/hugging_face.md says how to add an
architecture.
"""

from nemo_aligner.checkpoint.hugging_face.export import SHARD_BYTES
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN, vocab_rows, weights
from nemo_aligner.checkpoint.hugging_face.reading import model_section as read_config
from nemo_aligner.checkpoint.hugging_face.writing import check, head_bias, write_folder
from nemo_aligner.checkpoint.places import is_hugging_face as is_folder

__all__ = [
    "ORIGIN",
    "SHARD_BYTES",
    "check",
    "head_bias",
    "is_folder",
    "read_config",
    "vocab_rows",
    "weights",
    "write_folder",
]
