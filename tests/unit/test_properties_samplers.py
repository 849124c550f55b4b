# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever the sizes and the split: an epoch has each sample once, and a job that resumes at any
point goes on with what an undisturbed one would have had next.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_aligner.data.nlp.samplers import (
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from tests.properties import tried

RANDOM = [MegatronPretrainingRandomSampler, MegatronPretrainingRandomBatchSampler]
IN_ORDER = [MegatronPretrainingSampler, MegatronPretrainingBatchSampler]
DIVISORS = {8: (1, 2, 4, 8), 12: (1, 2, 3, 4, 6, 12)}  # of a global batch


@st.composite
def splits(draw, global_batch):
    """Data-parallel ranks and micro-batch size of a global batch."""
    ranks = draw(st.sampled_from(DIVISORS[global_batch]))
    sizes = [size for size in DIVISORS[global_batch] if global_batch // ranks % size == 0]
    return ranks, draw(st.sampled_from(sizes))


@st.composite
def jobs(draw):
    """Samples, global batch, two splits of it, global batches that are done, seed."""
    global_batch = draw(st.sampled_from(sorted(DIVISORS)))
    sizes = draw(st.integers(global_batch, 60)), global_batch
    both = draw(splits(global_batch)), draw(splits(global_batch))
    return *sizes, *both, draw(st.integers(0, 20)), draw(st.integers(0, 5))


def global_batches(cls, total, global_batch, split, done, seed, passes=1, **options):
    """The global batches of all ranks together, each sorted, of `passes` passes."""
    ranks, micro_batch = split
    shares = []
    for rank in range(ranks):
        sizes = {"total_samples": total, "consumed_samples": done * global_batch, "seed": seed}
        sizes |= {"micro_batch_size": micro_batch, "global_batch_size": global_batch}
        sampler = cls(data_parallel_rank=rank, data_parallel_size=ranks, **sizes, **options)
        own = []
        for _ in range(passes):
            announced, batches = len(sampler), list(sampler)
            assert len(batches) == announced
            own += [index for batch in batches for index in batch]
        shares.append(own)
    size = global_batch // ranks
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % size == 0
    starts = range(0, len(shares[0]), size)
    return [sorted(i for share in shares for i in share[at : at + size]) for at in starts]


@pytest.mark.parametrize("cls", RANDOM)
@tried(60)
@given(job=jobs())
def test_random_epochs(cls, job):
    total, global_batch, split, other, done, seed = job
    whole = global_batches(cls, total, global_batch, split, 0, seed, passes=3)
    per_epoch = total // global_batch
    assert len(whole) == 3 * per_epoch
    for epoch in range(3):
        seen = sum(whole[epoch * per_epoch : (epoch + 1) * per_epoch], [])
        assert len(set(seen)) == len(seen) and set(seen) <= set(range(total))
    done %= 2 * per_epoch
    resumed = global_batches(cls, total, global_batch, other, done, seed, passes=2)
    assert resumed == whole[done:][: len(resumed)] and len(resumed) > per_epoch


@pytest.mark.parametrize("cls", IN_ORDER)
@tried(60)
@given(job=jobs(), filled=st.booleans())
def test_one_pass_in_order(cls, job, filled):
    total, global_batch, split, other, done, seed = job
    options = {"drop_last": not filled, "pad_samples_to_global_batch_size": filled}
    whole = global_batches(cls, total, global_batch, split, 0, seed, **options)
    used = total if filled else total // global_batch * global_batch
    assert [index for batch in whole for index in batch if index >= 0] == list(range(used))
    assert sum(batch.count(-1) for batch in whole) == -used % global_batch
    resumed = global_batches(cls, total, global_batch, other, done, seed, **options)
    assert resumed == whole[done:]
