# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How much memory a job takes, and which split to start it with: `nemo-aligner plan`. Arithmetic
on a configuration; docs/parallelism.md explains the formulas and says what was measured.
"""
