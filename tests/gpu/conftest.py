# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine multiplies fp32 in TF32, with 10 bits; here in fp32, as a CPU does. cuBLAS
reads the variable when it is loaded.
"""

import os

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
