# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients that are not finite: found before they reach a weight, and told by all
ranks together.

Megatron Core's own check raises on the one rank that sees a NaN before the reduction, and leaves
the others in that
reduction. Here all ranks agree after it: a NaN of one rank has then reached the others anyway, and
none has been used.
"""

import contextlib
import math

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device

REMEDY = (
    "No weight was changed by it. Look at the last values of loss and grad_norm in metrics.jsonl "
    "and at the data of"
    " this step; lower model.optim.lr, clip gradients (trainer.*.gradient_clip_val), and resume "
    "from the last good"
    " checkpoint."
)
NAMED_TENSORS = 3


@contextlib.contextmanager
def naming_step(step: str):
    """Inside, a `NonFiniteError` gets the name of the step, e.g. "optimizer step 12 of PPO step
    3".
    """
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{step}: {error}").with_traceback(error.__traceback__) from None


def check_finite(
    model_chunks: list, loss: float, shares: list[torch.Tensor], micro_batch_size: int
) -> None:
    """Refuse a loss or a gradient that is NaN or infinite; every rank of the job calls it, after
    the reductions.

    Args:
        model_chunks: of this pipeline stage; the gradients of those that are wrapped for training
            are looked at.
        loss: of the global batch.
        shares: scalars, this rank's part of it from each micro-batch; empty but on the last
        pipeline stage.
        micro_batch_size: rows of each.

    Raises:
        NonFiniteError: on every rank; says where the loss went wrong, or in which weights the
        gradient did.
    """
    wrong = [not math.isfinite(loss), not _gradients_are_finite(model_chunks)]
    wrong = torch.tensor(wrong, dtype=torch.int32, device=get_device())
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    if not wrong.any():
        return
    bad_loss, bad_gradient = wrong.tolist()
    mine = (
        _where_loss_is_wrong(shares, micro_batch_size),
        _weights_with_wrong_gradients(model_chunks),
    )
    found = [mine]
    if several:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    places = [place for place, _ in found if place]
    names = sorted({name for _, names in found for name in names})
    parts = []
    if bad_loss:
        parts.append(
            f"the loss is {loss}" + (f" ({'; '.join(dict.fromkeys(places))})" if places else "")
        )
    if bad_gradient:
        more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
        parts.append(f"the gradient of {', '.join(names[:NAMED_TENSORS])}{more} is not finite")
    raise NonFiniteError(f"{' and '.join(parts)}. {REMEDY}")


def _gradients_are_finite(model_chunks) -> bool:
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                # A finite norm needs finite elements, and is quick to get; an infinite one may
                # have overflowed.
                norm = torch.linalg.vector_norm(buffer.grad_data)
                if not norm.isfinite() and not buffer.grad_data.isfinite().all():
                    return False
    return True


def _weights_with_wrong_gradients(model_chunks) -> list[str]:
    return [
        name.removeprefix("module.").removeprefix("module.")
        for chunk in model_chunks
        if isinstance(chunk, DistributedDataParallel)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.isfinite().all()
    ]


def _where_loss_is_wrong(shares: list[torch.Tensor], micro_batch_size: int) -> str | None:
    for number, share in enumerate(shares):
        if not share.isfinite():
            rank, first = parallel_state.get_data_parallel_rank(), number * micro_batch_size
            rows = (
                f"row {first}"
                if micro_batch_size == 1
                else f"rows {first} to {first + micro_batch_size - 1}"
            )
            return f"first in {rows} of the share of data-parallel rank {rank}"
    return None
