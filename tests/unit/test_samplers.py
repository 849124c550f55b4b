# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samplers: whatever the sizes and the split, all ranks together see the global batches of a naive
order, and a job that resumes at any point goes on with those that come next; and which sizes are
refused.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.samplers import (
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from tests.properties import tried

RANDOM = [MegatronPretrainingRandomSampler, MegatronPretrainingRandomBatchSampler]
IN_ORDER = [MegatronPretrainingSampler, MegatronPretrainingBatchSampler]
WHOLE = MegatronPretrainingRandomBatchSampler, MegatronPretrainingBatchSampler
DIVISORS = {8: (1, 2, 4, 8), 12: (1, 2, 3, 4, 6, 12)}  # of a global batch


def make(cls, total, consumed=0, mbs=2, gbs=8, rank=0, dp=2, **kwargs):
    sizes = {"total_samples": total, "micro_batch_size": mbs, "global_batch_size": gbs}
    place = {"data_parallel_rank": rank, "data_parallel_size": dp}
    return cls(consumed_samples=consumed, **sizes, **place, **kwargs)


@st.composite
def splits(draw, gbs):
    """Data-parallel ranks and micro-batch size of a global batch."""
    ranks = draw(st.sampled_from(DIVISORS[gbs]))
    return ranks, draw(st.sampled_from([n for n in DIVISORS[gbs] if gbs // ranks % n == 0]))


@st.composite
def jobs(draw):
    """Samples, global batch, a split of it, global batches that are done, seed."""
    gbs = draw(st.sampled_from(sorted(DIVISORS)))
    total, split = draw(st.integers(gbs, 60)), draw(splits(gbs))
    return total, gbs, split, draw(st.integers(0, 20)), draw(st.integers(0, 5))


def global_batches(cls, total, gbs, split, done, passes=1, **options):
    """The global batches of `passes` passes, the ranks' shares of each one after the other."""
    ranks, mbs = split
    shares = []
    for rank in range(ranks):
        sampler = make(cls, total, done * gbs, mbs, gbs, rank, ranks, **options)
        own = []
        for _ in range(passes):
            announced, batches = len(sampler), list(sampler)
            assert len(batches) == announced
            assert {len(batch) for batch in batches} <= {gbs // ranks if cls in WHOLE else mbs}
            own += [index for batch in batches for index in batch]
        shares.append(own)
    size = gbs // ranks
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % size == 0
    starts = range(0, len(shares[0]), size)
    return [[i for share in shares for i in share[at : at + size]] for at in starts]


@pytest.mark.parametrize("cls", RANDOM)
@tried(60)
@given(job=jobs())
def test_global_batches_depend_neither_on_ranks_nor_on_micro_batches(cls, job):
    """They are those of one permutation for each epoch, from any place in the first two on."""
    total, gbs, split, done, seed = job
    per_epoch, generator = total // gbs, torch.Generator()
    naive = []
    for epoch in range(4):
        order = torch.randperm(total, generator=generator.manual_seed(seed + epoch)).tolist()
        naive += [order[at : at + gbs] for at in range(0, per_epoch * gbs, gbs)]
    done %= 2 * per_epoch
    found = global_batches(cls, total, gbs, split, done, passes=2, seed=seed)
    assert found == naive[done:][: len(found)] and len(found) > per_epoch


@pytest.mark.parametrize("cls", IN_ORDER)
@tried(60)
@given(job=jobs(), filled=st.booleans())
def test_one_pass_in_order(cls, job, filled):
    total, gbs, split, done, _ = job
    options = {"drop_last": not filled, "pad_samples_to_global_batch_size": filled}
    used = total + -total % gbs if filled else total // gbs * gbs
    order = [index if index < total else -1 for index in range(used)]
    naive = [sorted(order[at : at + gbs]) for at in range(0, used, gbs)]
    found = global_batches(cls, total, gbs, split, done, **options)
    assert [sorted(batch) for batch in found] == naive[done:]


def test_shares_of_a_rank():
    micro, whole = IN_ORDER
    padded = {"drop_last": False, "pad_samples_to_global_batch_size": True}
    assert list(make(micro, 17, rank=1)) == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert list(make(whole, 17, rank=1)) == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert list(make(micro, 11, rank=1, **padded)) == [[2, 3], [6, 7], [10, -1], [-1, -1]]
    sampler = make(whole, 11, rank=1, **padded)
    assert list(sampler) == list(sampler) == [[1, 3, 5, 7], [9, -1, -1, -1]]
    assert list(make(whole, 3, rank=1, **padded)) == [[1, -1, -1, -1]]


def test_a_pass_starts_at_any_sample():
    """As after a change of the global batch size."""
    order = list(itertools.chain(*make(RANDOM[1], 30, dp=1, gbs=2)))
    sampler = make(RANDOM[1], 30, consumed=14, dp=1)
    assert list(sampler) == [order[14:22], order[22:30]] and sampler.consumed_samples == 24
    in_order = make(IN_ORDER[1], 30, consumed=14, dp=1)
    assert list(in_order) == [list(range(14, 22)), list(range(22, 30))]


def test_refusals_name_values_and_keys():
    at_random, in_order = RANDOM[0], IN_ORDER[0]
    batches = "global batch size 10 .*num_rollout_samples.* multiple of 4 .*size 2 .*x 2 "
    for cls, total, options, error, message in (
        (at_random, 32, {"gbs": 10}, ConfigError, batches),
        (at_random, 7, {}, UserError, "7 samples, fewer than one global batch of 8"),
        (in_order, 0, {}, UserError, "0 samples"),
        (in_order, 11, {"drop_last": False}, ConfigError, "pad_samples_to_global_batch_size=True"),
        (at_random, 16, {"drop_last": False}, ConfigError, "drop_last=False"),
    ):
        with pytest.raises(error, match=message):
            make(cls, total, **options)
