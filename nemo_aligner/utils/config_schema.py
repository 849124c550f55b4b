# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.inert_keys import INERT, ONLY, Inert
from nemo_aligner.config.schema import ARCHITECTURE_KEYS, CONFIG_NAMES, FLAGS, FREE, LIVE, REQUIRED
