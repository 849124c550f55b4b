# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics that know how they are reduced, and the one place where they are.

    metrics = {"kl": Mean.of(kl, mask), "samples": Sum(len(rewards)), "longest": Max(lengths.max())}
    reduce_metrics(metrics, group)      # -> {"kl": 0.01, "longest": 61.0, "samples": 512.0}

A `Mean` holds a sum and a count, so ranks (or steps) of unequal size weigh as they should.
"""

from dataclasses import dataclass
from typing import Union

import torch
import torch.distributed as dist
from torch import Tensor

Scalar = Union[int, float, Tensor]


@dataclass(frozen=True)
class Mean:
    """`total / count` after both were summed; 0 if nothing was counted."""

    total: Scalar
    count: Scalar = 1

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> "Mean":
        """Mean of all `values`, or of those where `mask` (same shape) is non-zero; the others may hold NaN."""
        if mask is None:
            return cls(values.sum(dtype=torch.float64), values.numel())
        keep = mask != 0
        return cls(torch.where(keep, values, 0).sum(dtype=torch.float64), keep.sum())

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Sum:
    """The sum of `value` over ranks."""

    value: Scalar

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The largest `value` over ranks; `Max(-x)` gives the smallest x, negated."""

    value: Scalar

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.value, other.value))


def reduce_metrics(metrics: dict[str, Mean | Sum | Max], group=None) -> dict[str, float]:
    """Reduce every metric over the ranks of `group`; each of them calls this with the same names and kinds.

    Args:
        metrics: by name. Scalars may be tensors on any device.
        group: process group; None means all ranks. Without `torch.distributed` the local values are the result.

    Returns:
        float per name, sorted by name, the same on every rank.
    """
    names = sorted(metrics)
    summed, largest = [], []
    for name in names:
        metric = metrics[name]
        if isinstance(metric, Max):
            largest.append(metric.value)
        else:
            summed += [metric.total, metric.count] if isinstance(metric, Mean) else [metric.value]
    summed = iter(_all_reduce(summed, dist.ReduceOp.SUM, group))
    largest = iter(_all_reduce(largest, dist.ReduceOp.MAX, group))
    reduced = {}
    for name in names:
        if isinstance(metrics[name], Max):
            reduced[name] = next(largest)
        elif isinstance(metrics[name], Mean):
            total, count = next(summed), next(summed)
            reduced[name] = total / count if count else 0.0
        else:
            reduced[name] = next(summed)
    return reduced


def _all_reduce(scalars: list[Scalar], op, group) -> list[float]:
    """One collective for all `scalars`, in float64."""
    several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    device = "cuda" if several_ranks and dist.get_backend(group) == "nccl" else "cpu"
    packed = torch.tensor([float(scalar) for scalar in scalars], dtype=torch.float64, device=device)
    if several_ranks and scalars:
        dist.all_reduce(packed, op=op, group=group)
    return packed.tolist()
