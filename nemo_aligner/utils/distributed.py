# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.parallel.collectives import (
    all_reduce_dict,
    broadcast_2d_tensor,
    broadcast_2d_tensor_within_mp,
    broadcast_2d_tensor_within_pp,
    broadcast_tensor,
    broadcast_tensor_within_pp,
    gather_tensor,
    masked_global_mean_var,
    normalize_tensor,
    pad_list,
    pad_tensors_to_max_global_seq_len,
    rebalance_nd_tensor,
    run_distributed_inference,
    run_if_model_parallel_src,
    sum_over_dp,
)
from nemo_aligner.parallel.vocab_parallel import (
    DistributedLogprob,
    calculate_distributed_entropy,
    from_parallel_logits_to_logprobs,
)
from nemo_aligner.training.timers import ScopedTimer, SyncTimer, Timer

__getattr__ = retired_names(__name__)
