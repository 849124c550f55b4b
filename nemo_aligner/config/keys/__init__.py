# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of all jobs, section by section (`fields.py` says how to read them)."""
