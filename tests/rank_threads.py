# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, for functions that take their reduction as an argument."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

HANG_S = 300  # longer than a rank waits for another, however busy the machine is


def run_rank_threads(num_ranks: int, function: Callable) -> list:
    """`function(rank, sum_over_ranks)` on every rank at once; returns the results in rank order.

    A rank that reduces more or less often than the others fails after `HANG_S` seconds, as does
    everybody with it.
    """
    barrier = threading.Barrier(num_ranks, timeout=HANG_S)
    sent: list = [None] * num_ranks

    def rank_main(rank: int):
        def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
            sent[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack(sent).sum(0)
            barrier.wait()  # nobody overwrites what another still reads
            return total

        try:
            return function(rank, sum_over_ranks)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(num_ranks)]
        return [future.result() for future in futures]
