# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: `config.json`, safetensors and the tokenizer, read and written.

Nothing here computes on weights: what is written is what was read, bit for bit. docs/models.md
says how to add an architecture.
"""
