# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.checkpoint.checkpointing import (
    FULLY_RESHARDABLE,
    MAIN_WEIGHTS,
    MARKER,
    STATE_FILE,
    WRITING_SUFFIX,
    CheckpointCallback,
    complete_checkpoints,
    format_name,
    read_state,
)
