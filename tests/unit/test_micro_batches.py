# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of micro-batches against brute force over all ways to cut the sorted samples."""

import itertools
import random

import pytest
import torch

from nemo_aligner.core.tensors import counted_lengths
from nemo_aligner.training.passes import (
    MicroBatch,
    plan_micro_batches,
    sizes_within,
    with_rows_together,
)

LENGTHS = [5, 9, 2, 9, 7, 1, 4]


def cuts(samples: int, count: int):
    """All sizes of `count` consecutive groups of `samples`."""
    for ends in itertools.combinations(range(1, samples), count - 1):
        edges = (0, *ends, samples)
        yield [b - a for a, b in zip(edges, edges[1:])]


def starts(sizes):
    return itertools.accumulate([0, *sizes[:-1]])


def largest(lengths, sizes):
    """Computed tokens of the largest group of descending `lengths`."""
    return max(size * lengths[start] for size, start in zip(sizes, starts(sizes)))


def test_fixed_numbers_of_samples():
    plan = plan_micro_batches(LENGTHS, 3)
    assert plan == [MicroBatch((1, 3), 9), MicroBatch((4, 0), 7), MicroBatch((6, 2, 5), 4)]
    assert plan_micro_batches([3, 3, 3, 3], 2) == [MicroBatch((0, 1), 3), MicroBatch((2, 3), 3)]


def test_kept_order():
    plan = plan_micro_batches(LENGTHS[:6], 3, keep_order=True)
    assert plan == [MicroBatch((0, 1), 9), MicroBatch((2, 3), 9), MicroBatch((4, 5), 7)]


@pytest.mark.parametrize("seed", range(20))
def test_even_tokens_are_as_even_as_they_can_be(seed):
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 20) for _ in range(numbers.randint(1, 9))]
    ordered = sorted(lengths, reverse=True)
    for count in range(1, len(lengths) + 1):
        plan = plan_micro_batches(lengths, count, even_tokens=True)
        assert sorted(row for part in plan for row in part.rows) == list(range(len(lengths)))
        assert all(part.width == max(lengths[row] for row in part.rows) for part in plan)
        assert len(plan) == count
        best = min(largest(ordered, sizes) for sizes in cuts(len(lengths), count))
        assert max(part.tokens for part in plan) == best
    for limit in (1, 20, 40, 1000):
        # A sample alone may be longer than the limit.
        fits = lambda sizes, limit=limit: all(
            size == 1 or size * ordered[start] <= limit
            for size, start in zip(sizes, starts(sizes))
        )
        counts = range(1, len(lengths) + 1)
        fewest = min(count for count in counts if any(map(fits, cuts(len(lengths), count))))
        assert len(sizes_within(ordered, limit)) == fewest


@pytest.mark.parametrize("even_tokens", [False, True])
def test_more_micro_batches_than_samples(even_tokens):
    plan = plan_micro_batches([4, 6], 4, even_tokens=even_tokens)
    assert plan == [MicroBatch((1,), 6), *[MicroBatch((0,), 4)] * 3]


def test_samples_that_stay_together():
    plan = with_rows_together(plan_micro_batches([3, 8], 2), 2)
    assert plan == [MicroBatch((2, 3), 8), MicroBatch((0, 1), 3)]


def test_tokens_that_counting_slots_depend_on():
    weights = torch.tensor([[0, 0.5, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    assert counted_lengths(weights, 6).tolist() == [3, 6, 2]  # column t predicts token t+1
    assert counted_lengths(weights, 5).tolist() == [2, 5, 1]  # column t has a label of its own
