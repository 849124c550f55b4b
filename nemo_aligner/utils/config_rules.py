# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.rules import RESTORE_KEY, RESTORE_KEYS, SECTIONS, check_values
from nemo_aligner.config.rules import check_keys_alone as check_flags
from nemo_aligner.config.rules import check_keys_alone as check_required
from nemo_aligner.core.estimators import LOSS_REDUCTIONS
