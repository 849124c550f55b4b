# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: `config.json`, safetensors and the tokenizer, read and written.

    architecture.py    what the table of an architecture declares: keys and names, both ways
    architectures.py   the tables, with what they share in parts.py
    reading.py         a folder as a checkpoint: its files, keys and weights
    writing.py         a model written as a folder
    peft_config.py     `adapter_config.json` of a folder of PEFT, in both directions
    peft.py            adapters of a folder of PEFT, read and written

Nothing here computes on weights: what is written is what was read, bit for bit. docs/models.md
says how to add an architecture.
"""
