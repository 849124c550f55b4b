# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards and win rates of policies: `nemo-aligner evaluate`. `__main__.py` gets the responses,
`rewards.py` scores them, `measures.py` computes the numbers (as in `core/win_rate.py`), `page.py`
shows them.
"""
