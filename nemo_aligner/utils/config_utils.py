# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.checks import (
    check_config,
    check_keys,
    check_sections,
    inert_notes,
    nearest_key,
)
from nemo_aligner.config.defaults import drop_unset, register_resolvers
