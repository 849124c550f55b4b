# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""RLHF for Megatron models: PPO against a served critic, with supervised fine-tuning and reward
models to feed it.
"""

__version__ = "0.1.0"

from nemo_aligner.core.gpus import do_without_hidden_gpus

do_without_hidden_gpus()
