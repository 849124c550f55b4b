# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards and win rates of policies: `nemo-aligner evaluate`. The mathematics is in
`core/win_rate.py`.
"""
