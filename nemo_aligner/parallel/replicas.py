# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Check that the replicas of the weights still hold the same bits: they apply the same reduced
gradient. If they differ (a missed update or broadcast, defective memory), nothing else shows it.
"""

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.core.errors import ReplicaError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, largest

# Elements widened to int64 at a time: a CPU's cache holds them; a GPU's kernel needs more.
CPU_PIECE, DEVICE_PIECE = 2**16, 2**22
# Knuth's MMIX multiplier; odd, so that multiplying by it modulo 2**64 is a bijection.
FACTOR = 6364136223846793005
_Weight = tuple[int, str]  # model chunk of this rank, name in it
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 scalar of the exact bits and their positions. Element number i, as an integer, counts
    `2i + 1` times within a piece, modulo 2**64 (odd, so a change of one changes the sum); pieces
    are joined by Horner's rule. A CPU and another device have different pieces and checksums.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    size = CPU_PIECE if bits.device.type == "cpu" else DEVICE_PIECE
    weights = torch.arange(min(len(bits), size), device=bits.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(size):
        total = total * FACTOR + (piece * weights[: len(piece)]).sum()
    return total


@torch.no_grad()
def checksum_of_shard(
    tensor: Tensor, dim: int | None = None, parts: int = 1, rank: int = 0, ranks: int = 1
) -> Tensor:
    """int64 scalar of the exact bits of a rank's share of a weight and their positions in the
    whole: the shares of all ranks sum to the same number, modulo 2**64, however they are cut.

    The element at place r of its row, of M, in row i of the whole counts 2 (i M + r) + 1 times,
    where a row has all elements at one index of `dim`, which is divided (None: not divided). A
    share has `parts` pieces of equal size, each of them the `rank`-th of a part of the whole.
    """
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    bits = bits.movedim(dim or 0, 0).flatten(1) if bits.dim() > 1 else bits.reshape(-1, 1)
    count, width = bits.shape
    index = torch.arange(count, device=bits.device)
    piece = max(count // parts, 1)
    rows = (index // piece * ranks + rank) * piece + index % piece
    columns = torch.arange(width, device=bits.device)
    size = CPU_PIECE if bits.device.type == "cpu" else DEVICE_PIECE
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for some, at in zip(*(x.split(max(size // width, 1)) for x in (bits, rows)), strict=True):
        total += (some * ((at.unsqueeze(1) * width + columns) * 2 + 1)).sum()
    return total


@torch.no_grad()
def check_replicas(modules: list[torch.nn.Module]) -> None:
    """Compare every weight of this rank's chunks with its replicas on the data-parallel (x
    context-parallel) ranks, by checksums; all ranks call it. Shards of the distributed optimizer
    are not checked. `ReplicaError`, on every rank: names the first weight that differs, and groups
    the ranks by the bits they hold.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sums: dict[_Weight, int] = {}
    differing: dict[_Weight, list[int]] = {}
    # Megatron marks the weights of experts, which have data-parallel ranks of their own.
    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    for mark, group in groups.items():
        if group is None or dist.get_world_size(group) == 1:
            continue
        named = {
            (i, name): checksum(parameter)
            for i, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if getattr(parameter, "allreduce", True) is mark
        }
        if not named:  # on all ranks of the group alike
            continue
        mine = torch.stack(list(named.values()))
        lowest, highest = mine.clone(), mine.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums |= dict(zip(named, mine.tolist(), strict=True))
        for key, differs in zip(named, (lowest != highest).tolist(), strict=True):
            if differs:
                differing[key] = dist.get_process_group_ranks(group)
    if largest(len(differing)):
        _raise(differing, sums)


def _raise(differing: dict[_Weight, list[int]], sums: dict[_Weight, int]) -> NoReturn:
    """Exchange which weights differ; raise the same error on all ranks."""
    # By rank: the ranks that hold each differing weight, and its checksum here.
    found = gathered((differing, {key: sums[key] for key in differing}))
    first_rank, (theirs, _) = next((rank, entry) for rank, entry in enumerate(found) if entry[0])
    (chunk, name), ranks = next(iter(theirs.items()))
    holders: dict[int, list[int]] = {}
    for rank in ranks:
        holders.setdefault(found[rank][1][chunk, name], []).append(rank)
    by_content = " | ".join(", ".join(map(str, same)) for same in holders.values())
    raise ReplicaError(
        f"{name} (model chunk {chunk} of rank {first_rank}) differs between its replicas: ranks "
        f"with equal bits are {by_content}; {max(len(entry[0]) for entry in found)} weight(s) "
        "differ in all. A rank missed an update, a broadcast or a checkpoint's weights, or its "
        "memory or device is faulty. Resume from an earlier checkpoint (the check runs every "
        "alarms.replica_check_interval steps); replace that machine if it happens again."
    )
