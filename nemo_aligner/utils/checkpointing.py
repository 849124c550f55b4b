# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import (
    MARKER,
    STATE_FILE,
    WRITING_SUFFIX,
    complete_checkpoints,
    format_name,
    read_state,
)
from nemo_aligner.checkpoint.optimizer_forms import FULLY_RESHARDABLE, MAIN_WEIGHTS
