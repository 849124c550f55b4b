# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text generation behind a small interface: prompts in; tokens, lengths and whether a text ended
out.
"""

from nemo_aligner.generation.engine import GenerationOutput, MegatronGenerator, TextGenerator
from nemo_aligner.generation.text_generation_utils import GenerationParams

__all__ = ["GenerationOutput", "GenerationParams", "MegatronGenerator", "TextGenerator"]
