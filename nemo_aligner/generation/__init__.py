# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text generation behind a small interface: from prompts to tokens, lengths and ends."""

from nemo_aligner.generation.engine import MegatronGenerator
from nemo_aligner.generation.interface import GenerationOutput, GenerationParams

__all__ = ["GenerationOutput", "GenerationParams", "MegatronGenerator"]
