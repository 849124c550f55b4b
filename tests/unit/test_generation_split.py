# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of generation, and checksums of shards."""

import pytest
import torch

from nemo_aligner.generation.split import _rank_lists
from nemo_aligner.parallel.collectives import checksum_of_shard

POLICY = [[0, 1, 4, 5]]  # TP 2, PP 2 of a job whose ranks 2, 3, 6, 7 are another replica


@pytest.mark.parametrize(
    "tp, pp, tensor, pipeline, dividing",
    [
        (2, 2, [[0, 1], [4, 5]], [[0, 4], [1, 5]], [[0], [1], [4], [5]]),  # as in training
        (2, 1, [[0, 1], [4, 5]], [[0], [4], [1], [5]], [[0, 4], [1, 5]]),
        (1, 2, [[0], [1], [4], [5]], [[0, 4], [1, 5]], [[0, 1], [4, 5]]),
        (1, 1, [[0], [1], [4], [5]], [[0], [1], [4], [5]], [[0, 1, 4, 5]]),
        (4, 1, [[0, 1, 4, 5]], [[0], [1], [4], [5]], [[0], [1], [4], [5]]),
    ],
)
def test_groups_within_a_policy(tp, pp, tensor, pipeline, dividing):
    lists = _rank_lists(POLICY, tp, pp)
    assert lists["tensor"] == tensor
    assert sorted(lists["pipeline"]) == sorted(pipeline)
    assert lists["dividing"] == dividing
    for copy in lists["copy"]:  # its last tp ranks are the last stage
        assert copy == sorted(copy) and copy[-tp:] in tensor


def test_two_policies_that_generate_together():
    lists = _rank_lists([[0, 4], [2, 6]], 2, 2)
    assert lists["copy"] == [[0, 2, 4, 6]]
    assert lists["tensor"] == [[0, 2], [4, 6]]
    assert lists["joined"] == [[0, 2], [4, 6]]  # the same stage of each


@pytest.mark.parametrize("dim, parts", [(0, 1), (0, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_of_shards_sum_to_that_of_the_whole(dim, parts, dtype):
    whole = torch.randn(8, 12).to(dtype)
    pieces = [part.chunk(2, dim) for part in whole.chunk(parts, dim)]
    shards = [torch.cat([piece[rank] for piece in pieces], dim) for rank in range(2)]
    sums = [checksum_of_shard(shard, dim, parts, rank, 2) for rank, shard in enumerate(shards)]
    assert int(sum(sums)) == int(checksum_of_shard(whole, dim, parts))
    shards[1].view(torch.int16)[2, 3] ^= 1
    assert int(checksum_of_shard(shards[1], dim, parts, 1, 2)) != int(sums[1])
