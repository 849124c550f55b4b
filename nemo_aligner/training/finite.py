# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Find losses and gradients that are not finite before they change a weight. Megatron Core's own
check raises before the reduction, on one rank, and leaves the others waiting in it. Here all ranks
agree after the reduction and raise together.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce, gathered
from nemo_aligner.parallel.device import get_device

REMEDY = (
    "No weight was changed. Look at the last values of loss and grad_norm in metrics.jsonl and at "
    "the data of this step; lower model.optim.lr, clip gradients (trainer.*.gradient_clip_val), "
    "and resume from the last good checkpoint."
)
NAMED_TENSORS = 3  # weights with wrong gradients that the message names


@contextlib.contextmanager
def naming_step(step: str) -> Iterator[None]:
    """Put `step`, for example "update 12 of PPO step 3", in front of a `NonFiniteError`."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{step}: {error}").with_traceback(error.__traceback__) from None


def check_finite(
    model_chunks: Sequence[torch.nn.Module],
    loss: float,
    shares: Sequence[torch.Tensor],
    rows: Sequence[Sequence[int]],
) -> None:
    """Refuse a loss or a gradient that is NaN or infinite; all ranks call it after the reductions.
    `NonFiniteError`, on every rank: names the samples or the weights.

    Args:
        model_chunks: of this stage; gradients only of those that are wrapped for training.
        loss: of the global batch.
        shares: scalars, this rank's part of the loss by micro-batch; empty except on the last
            stage.
        rows: places of the samples of each micro-batch in the share of this rank.
    """
    found = [not math.isfinite(loss), not _gradients_are_finite(model_chunks)]
    wrong = torch.tensor(found, dtype=torch.int32, device=get_device())
    all_reduce(wrong, op=dist.ReduceOp.MAX)
    if not wrong.any():
        return
    bad_loss, bad_gradient = wrong.tolist()
    mine = _where_loss_is_wrong(shares, rows), _weights_with_wrong_gradients(model_chunks)
    by_rank = gathered(mine)
    places = [place for place, _ in by_rank if place]
    names = sorted({name for _, names in by_rank for name in names})
    parts = []
    if bad_loss:
        where = f" ({'; '.join(dict.fromkeys(places))})" if places else ""
        parts.append(f"the loss is {loss}{where}")
    if bad_gradient:
        more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
        parts.append(f"the gradient of {', '.join(names[:NAMED_TENSORS])}{more} is not finite")
    raise NonFiniteError(f"{' and '.join(parts)}. {REMEDY}")


def _gradients_are_finite(model_chunks: Sequence[torch.nn.Module]) -> bool:
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                # A finite norm proves finite elements and is cheap; others may have overflowed.
                norm = torch.linalg.vector_norm(buffer.grad_data)
                if not norm.isfinite() and not buffer.grad_data.isfinite().all():
                    return False
    return True


def _weights_with_wrong_gradients(model_chunks: Sequence[torch.nn.Module]) -> list[str]:
    return [
        name.removeprefix("module.").removeprefix("module.")
        for chunk in model_chunks
        if isinstance(chunk, DistributedDataParallel)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.isfinite().all()
    ]


def _where_loss_is_wrong(
    shares: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]
) -> str | None:
    for number, share in enumerate(shares):
        if not share.isfinite():
            rank, samples = parallel_state.get_data_parallel_rank(), sorted(rows[number])
            named = ", ".join(map(str, samples))
            kind = "sample" if len(samples) == 1 else "samples"
            return f"first in {kind} {named} of the share of data-parallel rank {rank}"
    return None
