# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-Aligner's generation with TensorRT-LLM, which is not used; what is left of its names."""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tensors import append_and_repad_list

__getattr__ = retired_names(__name__)
