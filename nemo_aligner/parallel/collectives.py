# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Communication of tensors and metrics between ranks, for NCCL and gloo alike; sequences that are
split over context-parallel ranks; and whether replicas of the weights still hold the same bits.

Every function is a no-op for a group of one rank and without a process group. Tensors go to the
device of the process and are made contiguous first, because gloo silently delivers others wrong.
Unless a docstring says otherwise, every rank of the group must call, with the same arguments but
for the tensor. `src` and `dst` are global ranks; `group=None` means all ranks.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_aligner.core.errors import ReplicaError, UserError
from nemo_aligner.core.tensors import masked_mean_var, whiten
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device

P = ParamSpec("P")
T = TypeVar("T")


def _several_ranks(group: ProcessGroup | None) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1


def _ready(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` without gradient, on the process's device, contiguous, in `dtype` if given."""
    return tensor.detach().to(device=get_device(), dtype=dtype).contiguous()


def _wire(tensor: Tensor) -> Tensor:
    """The same memory in a dtype of the same width that every backend carries: bool as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def rebalance_nd_tensor(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The tensors [n, ...] of all ranks, n >= 0 of any size, joined along dimension 0 in rank
    order, on every rank. `ValueError` on all ranks: the other sizes differ.
    """
    if not _several_ranks(group):
        return tensor
    tensor = _ready(tensor)
    shape = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
    all_shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_shapes, shape, group=group)
    shapes = torch.stack(all_shapes).tolist()
    if any(other[1:] != shapes[0][1:] for other in shapes):
        raise ValueError(f"tensors of these shapes cannot be concatenated along dim 0: {shapes}")
    largest = max(other[0] for other in shapes)
    # One all_gather of equal, padded pieces: exact for any dtype, unlike a sum into zeros.
    padded = tensor.new_zeros((largest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    pieces = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather([_wire(piece) for piece in pieces], _wire(padded), group=group)
    return torch.cat([piece[: other[0]] for piece, other in zip(pieces, shapes)])


def _own(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if tensor is None:
        raise ValueError("the source rank of a broadcast needs a tensor, not None")
    return tensor.to(dtype=dtype)


def broadcast_tensor(
    tensor: Tensor | None, src: int, group: ProcessGroup | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor of rank `src` on every rank; others need not know its shape and may pass None."""
    if not _several_ranks(group):
        return _own(tensor, dtype)
    if dist.get_rank() == src:
        result = _ready(_own(tensor, None), dtype)
        dist.broadcast_object_list([(result.dtype, result.shape)], src=src, group=group)
    else:
        meta: list[Any] = [None]
        dist.broadcast_object_list(meta, src=src, group=group)
        result = torch.empty(meta[0][1], dtype=meta[0][0], device=get_device())
    dist.broadcast(_wire(result), src=src, group=group)
    return result


def broadcast_2d_tensor(
    tensor: Tensor | None,
    src: int,
    group: ProcessGroup | None,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """`broadcast_tensor` with NeMo-Aligner's default dtype, float32; prefer `broadcast_tensor`."""
    return broadcast_tensor(tensor, src, group, dtype)


def broadcast_2d_tensor_within_mp(
    tensor: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor of the first rank of this TP x PP x CP group on all its ranks, in its dtype."""
    group = parallel_state.get_model_parallel_group()
    if group is None:  # without Megatron's groups each process is a model's only one
        return _own(tensor, dtype)
    return broadcast_tensor(tensor, parallel_state.get_model_parallel_src_rank(), group, dtype)


def broadcast_tensor_within_pp(
    tensor: Tensor | None, dtype: torch.dtype | None = None, from_last: bool = True
) -> Tensor:
    """The tensor of the last (or first) pipeline stage on all stages, in its dtype."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group is None:  # as above
        return _own(tensor, dtype)
    if from_last:
        src = parallel_state.get_pipeline_model_parallel_last_rank()
    else:
        src = parallel_state.get_pipeline_model_parallel_first_rank()
    return broadcast_tensor(tensor, src, group, dtype)


broadcast_2d_tensor_within_pp = broadcast_tensor_within_pp  # its older name


def gather_tensor(
    tensor: Tensor, dst: int, group: ProcessGroup | None, dtype: torch.dtype | None = None
) -> list[Tensor] | None:
    """The tensors of all ranks, of equal shapes, in rank order on `dst`; None elsewhere."""
    if not _several_ranks(group):
        return [tensor.to(dtype=dtype)]
    tensor = _ready(tensor, dtype)
    if dist.get_rank() != dst:
        dist.gather(_wire(tensor), dst=dst, group=group)
        return None
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.gather(_wire(tensor), [_wire(piece) for piece in pieces], dst=dst, group=group)
    return pieces


def gathered(mine: Any, group: ProcessGroup | None = None) -> list[Any]:
    """`mine` of every rank, in rank order, on every rank; all ranks of `group` call it."""
    if not _several_ranks(group):
        return [mine]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def run_if_model_parallel_src(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call `fn` on the first rank of each TP x PP x CP group, else give None; no collective."""
    if parallel_state.get_rank() == parallel_state.get_model_parallel_src_rank():
        return fn(*args, **kwargs)
    return None


def on_rank_zero(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """The result of `function` on rank 0 of `group`, or its `UserError`, on all, which call it."""
    if not _several_ranks(group):
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = error
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(outcome, src=first, group=group, device=get_device())
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_reduce(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Tensor:
    """Reduce `tensor`, contiguous and on the process's device, in place; returns it."""
    if _several_ranks(group):
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def largest(number: int, group: ProcessGroup | None = None) -> int:
    """The largest of the ranks of `group`, which all call it."""
    on_device = torch.tensor([number], dtype=torch.int64, device=get_device())
    return int(all_reduce(on_device, group, dist.ReduceOp.MAX))


def sum_over_dp(tensor: Tensor) -> Tensor:
    """Sum a tensor over the data-parallel ranks, which all call it (for `losses.loss_weights`)."""
    return all_reduce(tensor.clone(), parallel_state.get_data_parallel_group())


def masked_global_mean_var(
    values: Tensor, mask: Tensor, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance (not Bessel-corrected) where `mask`, over all ranks of `group`: float32
    scalars, 0 if no slot counts. Slots outside the mask may hold NaN.
    """
    on_device = (values.to(get_device()), mask.to(get_device()))
    mean, var = masked_mean_var(*on_device, lambda sums: all_reduce(sums, group))
    return mean.float(), var.float()


def normalize_tensor(
    tensor: Tensor, mask: Tensor, group: ProcessGroup | None = None, shift_mean: bool = True
) -> Tensor:
    """`masks.whiten` with the mean and variance of all ranks of `group`; 0 outside the mask."""

    def sum_over_group(sums: Tensor) -> Tensor:
        return all_reduce(sums.to(get_device()), group).to(sums.device)

    return whiten(tensor, mask, shift_mean, sum_over_group)


def all_reduce_dict(
    dictionary: Mapping[str, float | Tensor],
    dtype: torch.dtype = torch.float64,
    group: ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> dict[str, float]:
    """Reduce the scalars of a dict by name, in one collective; all ranks have the same keys."""
    keys = sorted(dictionary)  # the order of insertion may differ between ranks
    values = [float(dictionary[key]) for key in keys]
    packed = torch.tensor(values, dtype=dtype, device=get_device())
    return dict(zip(keys, all_reduce(packed, group, op).tolist()))


def get_global_set(local_data_ids: set[Any]) -> set[Any]:
    """The union of the sets of all ranks of the job, which all call it."""
    return set().union(*gathered(local_data_ids))


def pad_list(tensor_list: list[Tensor], pad_value: float) -> list[Tensor]:
    """Right-pad the last dimensions with `pad_value` to the longest one."""
    width = max(tensor.shape[-1] for tensor in tensor_list)
    return [
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]), value=pad_value)
        for tensor in tensor_list
    ]


def pad_tensors_to_max_global_seq_len(
    list_of_tensors: list[Tensor],
    pad_value: float,
    group: ProcessGroup | None,
    sequence_length_to_pad_to: int | None = None,
) -> Tensor:
    """Stack 1-D tensors, at least one, right-padded to the longest on any rank and at least to
    `sequence_length_to_pad_to` (a longer tensor gives a warning): [len(list), width].
    """
    local = torch.stack(pad_list(list_of_tensors, pad_value))
    width = largest(local.shape[-1], group)
    if sequence_length_to_pad_to is not None:
        if width > sequence_length_to_pad_to:
            limit = sequence_length_to_pad_to
            warnings.warn(f"a sequence of {width} tokens is longer than the {limit} to pad to")
        width = max(width, sequence_length_to_pad_to)
    return torch.nn.functional.pad(local, (0, width - local.shape[-1]), value=pad_value)


def run_distributed_inference(
    inputs: Mapping[str, Any] | None = None, infer_fn: Callable[..., Any] | None = None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Score a batch that rank 0 holds on all data-parallel ranks; every rank of the job calls it.
    Returns N scores, or (rewards [N], values [N, S]), on every rank.

    Args:
        inputs: on rank 0, `inputs` int64 [N, S] and `sequence_length` [N] or [N, 1] (arrays or
            tensors); ignored elsewhere. With N below the data-parallel size a rank has no share.
        infer_fn: `infer_fn(inputs=(tokens, lengths))` gives a tensor, or (rewards, values).
    """
    if infer_fn is None:
        raise ValueError("run_distributed_inference needs infer_fn")

    def of_rank_zero(key: str) -> Tensor:
        mine = (inputs or {})[key] if parallel_state.get_rank() == 0 else ()
        return broadcast_tensor(torch.as_tensor(mine, dtype=torch.int64), src=0, group=None)

    tokens = of_rank_zero("inputs").to(get_device())
    lengths = of_rank_zero("sequence_length").to(get_device()).flatten()
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    share = slice(len(tokens) * rank // size, len(tokens) * (rank + 1) // size)
    outputs = infer_fn(inputs=(tokens[share], lengths[share]))

    def collect(tensor: Tensor) -> np.ndarray:
        group, whole = parallel_state.get_data_parallel_group(), tensor.detach()
        if group is not None:
            whole = rebalance_nd_tensor(whole, group)
        return whole.float().cpu().numpy()

    if isinstance(outputs, tuple):
        rewards, values = outputs
        return collect(rewards).reshape(-1), collect(values)
    return collect(outputs)


# ----------------------------------------------------- sequences split over context-parallel ranks
# The sequence is cut into 2*CP equal chunks; rank r holds chunks r and 2*CP-1-r, in this order:
# its *share*, with cheap early and expensive late positions of a causal mask. Megatron Core
# (`get_batch_on_this_cp_rank`) and Transformer Engine use and expect the same layout.
#
#     S = 8, CP = 2: rank 0 holds positions 0 1 6 7, rank 1 holds 2 3 4 5


def width_multiple() -> int:
    """A width must be a multiple of this to be split: 2*CP, or 1 with one rank."""
    size = parallel_state.get_context_parallel_world_size()
    return 2 * size if size > 1 else 1


def take_share(x: Tensor, dim: int) -> Tensor:
    """This rank's part `[.., S/CP, ..]` of `x` along `dim`, which 2*CP divides (`ValueError`)."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return x
    if x.size(dim) % (2 * size):
        raise ValueError(
            f"a width of {x.size(dim)} is no multiple of {2 * size}, so it cannot be split over "
            f"{size} context-parallel ranks"
        )
    rank = parallel_state.get_context_parallel_rank()
    return _share(x.chunk(2 * size, dim), rank, dim)


def _share(chunks: Sequence[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def gather_shares(x: Tensor, dim: int, sum_gradients: bool = False) -> Tensor:
    """Join the shares `[.., S/CP, ..]` of all ranks, of a dtype that the backend carries (not
    bool), to `[.., S, ..]` on every rank. `sum_gradients` False: every rank computes the *same*
    loss from the result, so its part of the gradient is complete. True: they compute different
    things, so the backward pass sums the gradients over the ranks, a collective.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return x
    return _GatherShares.apply(x, dim, sum_gradients)


def share_positions(width: int, device: torch.device | None = None) -> Tensor:
    """int64 `[width / CP]`: the positions of this rank's share of a sequence of `width`."""
    return take_share(torch.arange(width, device=device), 0)


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sum_gradients: bool) -> Tensor:
        ctx.dim, ctx.sum_gradients = dim, sum_gradients
        x = x.contiguous()
        size = parallel_state.get_context_parallel_world_size()
        shares = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(shares, x, group=parallel_state.get_context_parallel_group())
        early, late = zip(*(share.chunk(2, dim) for share in shares), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.sum_gradients:
            return take_share(grad_output, ctx.dim), None, None
        size = parallel_state.get_context_parallel_world_size()
        chunks = grad_output.chunk(2 * size, ctx.dim)
        shares = [_share(chunks, rank, ctx.dim) for rank in range(size)]
        mine = torch.empty_like(shares[0])
        dist.reduce_scatter(mine, shares, group=parallel_state.get_context_parallel_group())
        return mine, None, None


# ------------------------------------------------------------------------- replicas of the weights
# They apply the same reduced gradient. If their bits differ (a missed update or broadcast,
# defective memory), nothing else shows it.

# Elements widened to int64 at a time: a CPU's cache holds them; a GPU's kernel needs more.
CPU_PIECE, DEVICE_PIECE = 2**16, 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum_of_shard(
    tensor: Tensor, dim: int | None = None, parts: int = 1, rank: int = 0, ranks: int = 1
) -> Tensor:
    """int64 scalar of the exact bits of a rank's share of a weight and their positions in the
    whole: the shares of all ranks sum to the same number, modulo 2**64, however they are cut. By
    default that of a whole tensor. Elements count odd numbers of times: a change of one shows.

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
    columns = torch.arange(width, device=bits.device) * 2 + 1
    size = (CPU_PIECE if bits.device.type == "cpu" else DEVICE_PIECE) // max(width, 1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for some, at in zip(*(x.split(max(size, 1)) for x in (bits, rows)), strict=True):
        total += (some * columns).sum() + 2 * width * (some.sum(1) * at).sum()
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
    # Model chunk of this rank, name in it, checksum by rank.
    differing: list[tuple[int, str, dict[int, int]]] = []
    # Megatron marks the weights of experts, which have data-parallel ranks of their own.
    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    for mark, group in groups.items():
        if group is None or dist.get_world_size(group) == 1:
            continue
        named = {
            (i, name): checksum_of_shard(parameter)
            for i, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if getattr(parameter, "allreduce", True) is mark
        }
        if not named:  # on all ranks of the group alike
            continue
        sums = rebalance_nd_tensor(torch.stack(list(named.values())).unsqueeze(0), group)
        ranks = dist.get_process_group_ranks(group)
        for weight, differs in enumerate((sums != sums[0]).any(0).tolist()):
            if differs:
                by_rank = dict(zip(ranks, sums[:, weight].tolist(), strict=True))
                differing.append((*list(named)[weight], by_rank))
    if not largest(len(differing)):
        return
    found = gathered(differing)
    first_rank, (chunk, name, by_rank) = next((n, each[0]) for n, each in enumerate(found) if each)
    holders: dict[int, list[int]] = {}
    for rank, value in by_rank.items():
        holders.setdefault(value, []).append(rank)
    by_content = " | ".join(", ".join(map(str, same)) for same in holders.values())
    raise ReplicaError(
        f"{name} (model chunk {chunk} of rank {first_rank}) differs between its replicas: ranks "
        f"with equal bits are {by_content}; {max(map(len, found))} weight(s) "
        "differ in all. A rank missed an update, a broadcast or a checkpoint's weights, or its "
        "memory or device is faulty. Resume from an earlier checkpoint (the check runs every "
        "alarms.replica_check_interval steps); replace that machine if it happens again."
    )
