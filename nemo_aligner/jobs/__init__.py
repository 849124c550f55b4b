# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs, one function each, which says what the job does and takes, and wires its parts. The
command `nemo-aligner` and the scripts of `examples/nlp/gpt/` call them. Importing a job imports
nothing heavy.
"""
