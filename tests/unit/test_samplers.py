# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samplers against naive loops: what all ranks together see, how a pass resumes, and which sizes
are refused.
"""

import itertools

import pytest
import torch

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.samplers import (
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)

RANDOM = [MegatronPretrainingRandomSampler, MegatronPretrainingRandomBatchSampler]


def make(cls, total, consumed=0, mbs=2, gbs=8, rank=0, dp=2, **kwargs):
    sizes = {"total_samples": total, "micro_batch_size": mbs, "global_batch_size": gbs}
    place = {"data_parallel_rank": rank, "data_parallel_size": dp}
    return cls(consumed_samples=consumed, **sizes, **place, **kwargs)


def naive_random(total, consumed, gbs, rank, dp, seed):
    """This rank's indices for the rest of an epoch, written down from the definition."""
    per_epoch = total // gbs * gbs
    generator = torch.Generator()
    generator.manual_seed(seed + consumed // per_epoch)
    order = torch.randperm(total, generator=generator).tolist()
    mine = []
    for start in range(consumed % per_epoch, per_epoch, gbs):
        for place in range(gbs):
            if place // (gbs // dp) == rank:
                mine.append(order[start + place])
    return mine


@pytest.mark.parametrize("cls", RANDOM)
@pytest.mark.parametrize("total,consumed,dp", [(24, 0, 1), (24, 16, 2), (29, 40, 2), (31, 0, 4)])
def test_random_order_is_the_naive_one(cls, total, consumed, dp):
    for rank in range(dp):
        batches = list(make(cls, total, consumed, rank=rank, dp=dp, seed=7))
        size = 2 if cls is MegatronPretrainingRandomSampler else 8 // dp
        assert {len(batch) for batch in batches} == {size}
        assert list(itertools.chain(*batches)) == naive_random(total, consumed, 8, rank, dp, 7)


@pytest.mark.parametrize("cls", RANDOM)
def test_global_batches_depend_neither_on_ranks_nor_on_micro_batches(cls):
    def global_batches(mbs, dp):
        samplers = [make(cls, 29, mbs=mbs, rank=rank, dp=dp) for rank in range(dp)]
        shares = [list(itertools.chain(*sampler)) for sampler in samplers]
        size = 8 // dp
        starts = range(0, 3 * size, size)
        return [{i for share in shares for i in share[k : k + size]} for k in starts]

    assert global_batches(1, 1) == global_batches(4, 2) == global_batches(2, 4)


def test_in_order_and_padded():
    micro, whole = MegatronPretrainingSampler, MegatronPretrainingBatchSampler
    padded = {"drop_last": False, "pad_samples_to_global_batch_size": True}
    assert list(make(micro, 17, rank=1)) == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert list(make(whole, 17, rank=1)) == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert list(make(micro, 11, rank=0, **padded)) == [[0, 1], [4, 5], [8, 9], [-1, -1]]
    assert list(make(micro, 11, rank=1, **padded)) == [[2, 3], [6, 7], [10, -1], [-1, -1]]
    sampler = make(whole, 11, rank=1, **padded)
    assert list(sampler) == list(sampler) == [[1, 3, 5, 7], [9, -1, -1, -1]] and len(sampler) == 2
    assert list(make(whole, 3, rank=1, **padded)) == [[1, -1, -1, -1]]
    assert list(make(whole, 16, consumed=8)) == [[8, 10, 12, 14]]
    assert list(make(whole, 16, consumed=16)) == []


def test_a_pass_starts_at_any_sample():
    """As after a change of the global batch size."""
    order = list(itertools.chain(*make(RANDOM[1], 30, dp=1, gbs=2)))
    sampler = make(RANDOM[1], 30, consumed=14, dp=1)
    assert list(sampler) == [order[14:22], order[22:30]] and sampler.consumed_samples == 24
    in_order = make(MegatronPretrainingBatchSampler, 30, consumed=14, dp=1)
    assert list(in_order) == [list(range(14, 22)), list(range(22, 30))]


def test_refusals_name_values_and_keys():
    at_random, in_order = MegatronPretrainingRandomSampler, MegatronPretrainingSampler
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
