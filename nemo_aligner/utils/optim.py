# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.optim_rules import (
    CONSTANT_SCHEDULES,
    DISTRIBUTED_OPTIMIZERS,
    OPTIMIZERS,
    SCHEDULES,
)
from nemo_aligner.training.optim import EXPERTS, build_optimizer, build_scheduler, wrap_with_ddp
