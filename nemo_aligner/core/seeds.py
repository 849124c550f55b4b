# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A random stream for each sample, so that its response depends on nothing else."""

import torch
from torch import Tensor


def sample_seeds(seed: int, step: int, idx: Tensor) -> Tensor:
    """A seed for each sample's own random stream, from (seed, step, index in the data set) alone.

    The response then does not depend on the rank, batch or place in which it is generated.

    Args:
        seed: of the run.
        step: of training, so that a prompt that comes back gets another response.
        idx: int64 [B].

    Returns:
        int64 [B], in [0, 2**63).
    """
    state = torch.full_like(idx, seed, dtype=torch.int64)
    state = _splitmix64(_splitmix64(state) + step)
    return _splitmix64(state + idx) & 0x7FFFFFFFFFFFFFFF


def _splitmix64(x: Tensor) -> Tensor:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for each state; int64 arithmetic wraps
    like uint64's.
    """
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15, as a signed number
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own `>>` copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
