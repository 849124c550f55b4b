# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.generation.interface import GenerationParams
from nemo_aligner.generation.text import (
    EndConditions,
    tokenize_batch,
    verify_is_valid_and_clamp_range_,
)

__getattr__ = retired_names(__name__)
