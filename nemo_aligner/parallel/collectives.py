# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Communication of tensors and metrics between ranks, for NCCL and gloo alike.

Every function is a no-op for a group of one rank and without a process group. Tensors go to the
device of the process and are made contiguous first, because gloo silently delivers others wrong.
Unless a docstring says otherwise, every rank of the group must call, with the same arguments but
for the tensor. `src` and `dst` are global ranks; `group=None` means all ranks.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import masked_mean_var, whiten
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device

P = ParamSpec("P")
T = TypeVar("T")


def _several_ranks(group: ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


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
