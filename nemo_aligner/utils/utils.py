# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where NeMo-Aligner's scripts import these names from; they live in other files here."""

from nemo_aligner.core.rollout_math import masked_mean, masked_std
from nemo_aligner.launch.train_script_utils import load_and_override_model_config, load_from_nemo

__all__ = ["load_and_override_model_config", "load_from_nemo", "masked_mean", "masked_std"]
