# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests. `nemo_aligner` comes before Megatron Core, as in jobs: without a GPU it looks away from
Transformer Engine. And no garbage is collected during the imports, as in jobs
(`launch.start_up.long_imports`).
"""

import gc

import nemo_aligner  # noqa: F401

gc.disable()


def imports_done() -> None:
    """Collect garbage again, but never what is there now: Megatron Core collects in every save,
    which took most of its time.
    """
    gc.enable()
    gc.freeze()
