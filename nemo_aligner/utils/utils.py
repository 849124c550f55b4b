# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where NeMo-Aligner's scripts import these names from; each lives in the module named below."""

from nemo_aligner.core.masks import masked_mean, masked_std
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
