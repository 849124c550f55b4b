# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.generation.end_conditions import EndConditions, verify_is_valid_and_clamp_range_
from nemo_aligner.generation.params import GenerationParams
from nemo_aligner.generation.tokenize_batch import tokenize_batch

__getattr__ = retired_names(__name__)
