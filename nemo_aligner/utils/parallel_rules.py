# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.parallel_rules import (
    ACCELERATORS,
    EP_REMEDY,
    RECOMPUTE,
    check_accelerator,
    check_architecture,
    check_recomputation,
    count_devices,
    count_ranks,
    cuda_devices,
    data_parallel_size,
    parallel_factor,
    virtual_pipeline_group,
)
