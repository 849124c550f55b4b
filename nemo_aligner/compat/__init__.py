# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs scripts that import parts of NeMo that no longer exist; see `python -m
nemo_aligner.compat`. Nothing in the package imports it.
"""
