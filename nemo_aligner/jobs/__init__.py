# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs, one function each, which the command and the scripts of `examples/nlp/gpt/` call.
Importing a job imports nothing heavy.
"""
