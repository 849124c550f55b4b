# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.jobs.actors import check_ppo_variants
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
