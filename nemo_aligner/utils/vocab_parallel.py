# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.parallel.vocab_parallel import (
    CHUNK_ELEMENTS,
    CHUNK_ELEMENTS_GPU,
    DistributedLogprob,
    calculate_distributed_entropy,
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
)
