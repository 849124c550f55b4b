# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data as a job will see them, before it trains: `nemo-aligner inspect`. `findings.py` builds the
dataset of the job and looks for what is dropped, cut, empty or there twice; `show.py` shows it.
"""
