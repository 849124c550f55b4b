# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that divide the samples of a call for generation, or generate each other's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.generation.interface import GenerationOutput, Prompts
from nemo_aligner.parallel.collectives import gathered, rebalance_nd_tensor
from nemo_aligner.parallel.device import get_device

_Decode = Callable[..., GenerationOutput]


def drawn(batches: Iterator[Prompts], count: int) -> Iterator[Prompts]:
    """Batches joined to such of at least `count` prompts, but for the last one."""
    waiting: list[Prompts] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(lengths) for _, lengths, _ in waiting) >= count:
            yield joined_prompts(waiting)
            waiting = []
    if waiting:
        yield joined_prompts(waiting)


def joined_prompts(batches: list[Prompts]) -> Prompts:
    prompts, lengths, seeds = zip(*batches, strict=True)
    width = max(rows.size(1) for rows in prompts)
    padded = [torch.nn.functional.pad(rows, (0, width - rows.size(1))) for rows in prompts]
    return torch.cat(padded), torch.cat(lengths), torch.cat(seeds)


def until_all_end(batches: Iterator[Prompts], group: Any) -> Iterator[Prompts]:
    """`batches`, and empty ones until those of every rank of `group` have ended; all of them call
    it and iterate in step.
    """
    prompts, none = torch.zeros((2, 0, 1), dtype=torch.int64)
    empty = prompts, none[:, 0], none[:, 0]
    while True:
        batch = next(batches, None)
        more = torch.tensor(int(batch is not None), device=get_device())
        torch.distributed.all_reduce(more, torch.distributed.ReduceOp.MAX, group=group)
        if not more:
            return
        yield empty if batch is None else batch


def join(
    inputs: Prompts, group: Any, check: Callable[[Tensor, Tensor], None]
) -> tuple[Prompts, Tensor]:
    """The samples of all ranks of `group`, which call it, in their order, and the places of this
    rank's among them.

    Raises:
        UserError: `check` raised one on some rank; on all of them.
    """
    error = None
    try:
        if len(inputs[1]):
            check(*inputs[:2])
    except UserError as failure:
        error = failure
    mine = tuple(tensor.cpu() for tensor in inputs)
    found = gathered((str(error) if error else None, mine), group)
    messages = [message for message, _ in found if message is not None]
    if messages:
        raise error or UserError(messages[0])
    batches = [batch for _, batch in found]
    rank = torch.distributed.get_rank(group)
    first = sum(len(lengths) for _, lengths, _ in batches[:rank])
    device = inputs[0].device
    prompts, lengths, seeds = (tensor.to(device) for tensor in joined_prompts(batches))
    return (prompts, lengths, seeds), torch.arange(first, first + len(inputs[1]))


def divide(decode: _Decode, group: Any, pad_id: int, *inputs: Tensor) -> GenerationOutput:
    """Call `decode(*inputs)` with the samples divided among the ranks of `group`.

    All of these call it, and all get the whole result.

    Raises:
        RuntimeError: `decode` raised one on some rank; on all of them.
    """
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    own = torch.arange(len(inputs[0])).tensor_split(size)[rank]
    # A rank without samples of its own decodes a copy of the first: if experts are spread over
    # ranks, none may be absent.
    index = own if len(own) else torch.zeros(1, dtype=torch.int64)
    prompts, lengths, seeds = (tensor[index.to(tensor.device)] for tensor in inputs)
    output, error = None, None
    try:
        output = decode(prompts, lengths, seeds)
    except RuntimeError as failure:
        error = failure
    # By rank: the error message, and the width of the output.
    width = 0 if output is None else output.response_tokens.size(1)
    outcomes = gathered((None if error is None else str(error), width), group)
    messages = [message for message, _ in outcomes if message is not None]
    if output is None or messages:
        raise error or RuntimeError(messages[0])
    pad = max(width for _, width in outcomes) - width

    def gather(tensor: Any, pad_value: float = 0.0) -> Any:
        if tensor is None:
            return None
        if tensor.dim() > 1:
            tensor = torch.nn.functional.pad(tensor, (0, pad), value=pad_value)
        return rebalance_nd_tensor(tensor[: len(own)], group)

    return GenerationOutput(
        gather(output.response_tokens, pad_id),
        gather(output.response_lengths),
        gather(output.is_end),
        gather(output.logprobs),
        gather(output.observed),
        gather(output.token_rewards, float("nan")),
    )
