# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.parallel.device import get_backend, get_device
from nemo_aligner.parallel.megatron_adaptation import (
    REMAPPED_CONSTANTS,
    REPLACED,
    TOUCHED,
    adapt_megatron_core,
)
