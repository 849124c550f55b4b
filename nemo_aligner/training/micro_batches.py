# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which samples share a forward pass, and how wide it is: planned from their lengths alone, with
little padding. Widths must suit sequence and context parallelism, numbers virtual pipelining and
all expert-parallel ranks. `megatron_steps.py` carries a plan out.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import largest, width_multiple


@dataclass(frozen=True)
class MicroBatch:
    rows: tuple[int, ...]  # their places in the batch
    width: int  # columns that are computed of each

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.width


def fewest_micro_batches(lengths: Sequence[int], tokens: int) -> int:
    """Number of micro-batches if none may compute more than `tokens`, but for a single sample."""
    return len(_sizes_within(sorted(lengths, reverse=True), tokens))


def plan_micro_batches(
    lengths: Sequence[int], count: int, *, even_tokens: bool = False, keep_order: bool = False
) -> list[MicroBatch]:
    """Share samples out to `count` micro-batches, the longest first: what needs most memory runs
    first. Where there are fewer samples, the last micro-batches are copies of the shortest one.
    With `even_tokens`, which excludes `keep_order`, the largest number of computed tokens is the
    least possible; otherwise the numbers of samples are even.
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
    """A plan for samples from a plan for groups of `together` consecutive samples."""

    def rows(part: MicroBatch) -> tuple[int, ...]:
        return tuple(row * together + place for row in part.rows for place in range(together))

    return [MicroBatch(rows(part), part.width) for part in plan]


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
    """Sizes of `count` consecutive groups with the least maximum of tokens; `widths` descend."""
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


# -------------------------------------------------------------------- the micro-batches of a rank

Plan = Sequence[MicroBatch]


def plan_of_rank(
    model_chunks: Sequence[torch.nn.Module],
    tokens: torch.Tensor,
    lengths: torch.Tensor | None,
    micro_batch_size: int,
    micro_batch_tokens: int | None,
    *,
    training: bool,
    keep_order: bool = False,
    together: int = 1,
) -> Plan:
    """The micro-batches of this rank's samples, of which `tokens` int64 `[B, S]` has the shape;
    all ranks call it, those of a model-parallel group with equal arguments. `training`: no sample
    may be in two micro-batches. Other arguments as of `megatron_steps.forward_backward`.
    `UserError`: in training, the samples do not make whole micro-batches, or virtual pipelining
    needs another number of them.
    """
    config = get_model_config(model_chunks[0])
    rows, columns = tokens.shape
    group = micro_batch_group(model_chunks)
    by_tokens = None if keep_order else micro_batch_tokens
    if training and by_tokens is None:
        _check_micro_batches(rows, micro_batch_size, group)
    if lengths is None:
        lengths = torch.full((rows,), columns)
    longest = lengths.reshape(-1, together).amax(1).clamp(max=columns)
    widths = [_padded_width(width, config) for width in longest.tolist()]
    count = (
        -(-rows // micro_batch_size)
        if by_tokens is None
        else fewest_micro_batches(widths, by_tokens // together)
    )
    count = -(-count // group) * group
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        count = largest(count, parallel_state.get_expert_model_parallel_group())
    if training and count > len(widths):  # then they cannot be as small as they should
        count = len(widths) // group * group
        if not count:
            raise UserError(
                f"{rows} samples per data-parallel rank are too few: with "
                "model.virtual_pipeline_model_parallel_size the number of micro-batches must be a "
                f"multiple of model.pipeline_model_parallel_size={group}. Raise "
                "model.global_batch_size."
            )
    even_tokens = by_tokens is not None
    plan = plan_micro_batches(widths, count, even_tokens=even_tokens, keep_order=keep_order)
    return with_rows_together(plan, together)


def _padded_width(width: int, config: TransformerConfig) -> int:
    """The next width that CP ranks and, with sequence parallelism, TP ranks can split."""
    multiple = width_multiple()
    if config.sequence_parallel:
        context = parallel_state.get_context_parallel_world_size()
        multiple = math.lcm(multiple, context * config.tensor_model_parallel_size)
    return -(-width // multiple) * multiple


def micro_batch_group(model_chunks: Sequence[torch.nn.Module]) -> int:
    """The number of micro-batches must be a multiple of this (above 1 with virtual pipelining)."""
    return parallel_state.get_pipeline_model_parallel_world_size() if len(model_chunks) > 1 else 1


def _check_micro_batches(samples: int, micro_batch_size: int, group: int) -> None:
    size = f"model.micro_batch_size={micro_batch_size}"
    remedy = "change it or model.global_batch_size."
    if samples % micro_batch_size:
        raise UserError(
            f"{samples} samples per data-parallel rank are not divisible by {size}; {remedy}"
        )
    if samples // micro_batch_size % group:
        raise UserError(
            f"{samples} samples per data-parallel rank with {size} make no multiple of "
            f"model.pipeline_model_parallel_size={group} micro-batches, as "
            f"model.virtual_pipeline_model_parallel_size needs it; {remedy}"
        )
