# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests. `nemo_aligner` comes before Megatron Core, as in jobs: without a GPU it looks away from
Transformer Engine.
"""

import nemo_aligner  # noqa: F401
