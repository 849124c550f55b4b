# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.training.schedule import (
    check_progress,
    compute_limit_batches,
    compute_max_steps,
    compute_num_steps_per_epoch,
    endless_batches,
    safe_is_divisible,
)
