# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's global record of batch sizes, which models of one's own may read.

This package gives the micro-batch size to each pass (`training/megatron_steps.py`) and never reads
the record.
"""

from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator

from nemo_aligner.parallel import parallel_state


def configure_batch_sizes(mbs: int, gbs: int, dp: int = 1) -> None:
    """Tell Megatron the sizes of the next passes, of `gbs` over `dp` data-parallel ranks."""
    reconfigure_num_microbatches_calculator(
        rank=parallel_state.get_rank(),
        rampup_batch_size=None,
        global_batch_size=gbs,
        micro_batch_size=mbs,
        data_parallel_size=dp,
    )
