# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which samples share a forward pass, and how wide it is: planned from their lengths alone.

Samples of similar length come together and each micro-batch is as wide as its longest sample, so
that little padding is computed. `megatron_steps.py` carries a plan out and puts the results back
into the order of the samples.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass."""

    rows: tuple[int, ...]  # their places in the batch
    width: int  # columns that are computed of each

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.rows) * self.width


def fewest_micro_batches(lengths: Sequence[int], tokens: int) -> int:
    """Number of micro-batches if none may compute more than `tokens`, but for a single sample."""
    return len(_sizes_within(sorted(lengths, reverse=True), tokens))


def plan_micro_batches(
    lengths: Sequence[int], count: int, *, even_tokens: bool = False, keep_order: bool = False
) -> list[MicroBatch]:
    """Share samples out to `count` micro-batches, the longest samples first: what needs most
    memory runs first.

    Args:
        count: of micro-batches, none of which is empty. Where there are fewer samples, the last
            ones are copies of the shortest sample.
        even_tokens: the largest number of computed tokens is the least possible; otherwise the
            numbers of samples are even.
        keep_order: samples stay in their order, which excludes `even_tokens`.
    """
    order = list(range(len(lengths)))
    if not keep_order:
        order.sort(key=lambda row: -lengths[row])  # stable: equal lengths stay in order
    widths = [lengths[row] for row in order]
    real = min(count, len(order))
    sizes = _sizes_of_even_tokens(widths, real) if even_tokens else _even_sizes(len(order), real)
    plan, start = [], 0
    for size in sizes:
        rows = tuple(order[start : start + size])
        plan.append(MicroBatch(rows, max(widths[start : start + size])))
        start += size
    copy = MicroBatch(plan[-1].rows[-1:], widths[-1])
    return plan + [copy] * (count - real)


def with_rows_together(plan: Sequence[MicroBatch], together: int) -> list[MicroBatch]:
    """A plan for samples from one for groups of `together` consecutive samples."""
    return [
        MicroBatch(
            tuple(group * together + place for group in part.rows for place in range(together)),
            part.width,
        )
        for part in plan
    ]


def _even_sizes(samples: int, count: int) -> list[int]:
    """`count` sizes that differ by 1 at most; the smaller ones first."""
    ends = [samples * number // count for number in range(count + 1)]
    return [end - start for start, end in zip(ends, ends[1:])]


def _sizes_within(widths: Sequence[int], tokens: int) -> list[int]:
    """Sizes of consecutive groups, each as large as it may be; `widths` descend."""
    sizes: list[int] = []
    widest = 0  # of the last group
    for width in widths:
        if sizes and (sizes[-1] + 1) * widest <= tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            widest = width
    return sizes


def _sizes_of_even_tokens(widths: Sequence[int], count: int) -> list[int]:
    """Sizes of `count` consecutive groups, the largest with as few tokens as possible; `widths`
    descend, and there are at least `count`.
    """
    limits = range(widths[0], widths[0] * len(widths) + 1)
    enough = bisect.bisect_left(
        limits, True, key=lambda tokens: len(_sizes_within(widths, tokens)) <= count
    )
    sizes = _sizes_within(widths, limits[enough])
    while len(sizes) < count:  # fewer do it too: halve the largest
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        largest = max(
            (number for number, size in enumerate(sizes) if size > 1),
            key=lambda number: sizes[number] * widths[starts[number]],
        )
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    return sizes
