# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs, one module each: what it does and takes, and `main(cfg)`, which wires its parts.

The scripts of `examples/nlp/gpt/` call them with their configuration. Importing one imports
nothing heavy.
"""
