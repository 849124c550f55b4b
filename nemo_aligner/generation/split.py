# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks share the weights and the samples while they generate. tp and pp are the sizes of
generation, TP and PP those of training. A *copy* is the ranks that hold the weights once between
them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.core.errors import UserError
from nemo_aligner.generation.interface import GenerationOutput, Prompts
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, largest, rebalance_nd_tensor


@dataclass(frozen=True)
class Split:
    """Groups of this rank while it generates."""

    tensor: ProcessGroup  # ranks that divide each weight
    pipeline: ProcessGroup  # ranks that divide the layers, first stage first
    copy: ProcessGroup  # both, by global rank; its last tp ranks are the last stage
    embedding: ProcessGroup | None  # first and last stage of `pipeline`; None outside of both
    dividing: tuple[ProcessGroup, ...]  # whose ranks divide the same samples among each other
    # ranks that generate their different samples together, in order; None: only one policy's
    joined: ProcessGroup | None
    # gives the chunks to decode with, from those of training; all ranks of the copy call it
    weights: Callable[[Sequence[Any]], Sequence[Any]]

    @property
    def tensor_ranks(self) -> int:
        return torch.distributed.get_world_size(self.tensor)

    @property
    def pipeline_ranks(self) -> int:
        return torch.distributed.get_world_size(self.pipeline)


def training_split() -> Split:
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    copy = parallel_state.get_tensor_and_pipeline_parallel_group()
    assert tensor is not None and pipeline is not None and copy is not None
    return Split(tensor, pipeline, copy, None, _dividing_context(), None, lambda chunks: chunks)


def regrouped(tp: int, pp: int, weights: Callable[[Split, Sequence[Any]], Sequence[Any]]) -> Split:
    """Generation with tp x pp ranks to a copy, and `Split.weights`, given the split too; every
    rank of the job calls it. One of tp x pp and TP x PP divides the other
    (`config.rollout_rules`): with fewer ranks a policy's samples are divided among copies; with
    more, data-parallel ranks hold one copy and generate the samples of all of them.
    """
    own = torch.distributed.get_process_group_ranks(
        parallel_state.get_tensor_and_pipeline_parallel_group()
    )
    place = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    policies = [ranks for _, ranks in sorted(set(gathered((place, tuple(own)))))]
    together = max(tp * pp // len(own), 1)  # policies whose samples are joined
    groups: dict[str, Any] = {}
    for first in range(0, len(policies), together):
        members = policies[first : first + together]
        for kind, lists in _rank_lists(members, tp, pp).items():
            for ranks in lists:
                group = torch.distributed.new_group(ranks)  # a collective of all ranks
                if torch.distributed.get_rank() in ranks:
                    groups[kind] = group
    divided = torch.distributed.get_world_size(groups["dividing"]) > 1
    split = Split(
        groups["tensor"],
        groups["pipeline"],
        groups["copy"],
        groups.get("embedding"),
        ((groups["dividing"],) if divided else ()) + _dividing_context(),
        groups["joined"] if together > 1 else None,
        lambda chunks: weights(split, chunks),
    )
    return split


def _rank_lists(policies: Sequence[Sequence[int]], tp: int, pp: int) -> dict[str, list[list[int]]]:
    """Groups of each kind within `policies`; tp = TP and pp = PP give those of training."""
    ranks = sorted(rank for policy in policies for rank in policy)
    copies = len(ranks) // (tp * pp)
    table = torch.tensor(ranks).view(pp, copies, tp)
    pipelines = table.permute(1, 2, 0).reshape(-1, pp).tolist()
    return {
        "tensor": table.view(-1, tp).tolist(),
        "pipeline": pipelines,
        "copy": table.transpose(0, 1).reshape(copies, -1).tolist(),
        "embedding": [sorted({stages[0], stages[-1]}) for stages in pipelines],
        "dividing": table.transpose(1, 2).reshape(-1, copies).tolist(),
        "joined": [list(same) for same in zip(*policies, strict=True)],
    }


def _dividing_context() -> tuple[ProcessGroup, ...]:
    group = parallel_state.get_context_parallel_group()
    if group is None or parallel_state.get_context_parallel_world_size() == 1:
        return ()
    return (group,)


_Decode = Callable[..., GenerationOutput]
T = TypeVar("T")


def drawn(batches: Iterator[Prompts], count: int) -> Iterator[Prompts]:
    """Batches joined to such of at least `count` prompts, but for the last one."""
    waiting: list[Prompts] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(lengths) for _, lengths, *_ in waiting) >= count:
            yield joined_prompts(waiting)
            waiting = []
    if waiting:
        yield joined_prompts(waiting)


def joined_prompts(batches: list[Prompts]) -> Prompts:
    batches = [batch for batch in batches if len(batch[1])] or batches[:1]
    prompts, *columns = zip(*batches, strict=True)
    width = max(rows.size(1) for rows in prompts)
    padded = [torch.nn.functional.pad(rows, (0, width - rows.size(1))) for rows in prompts]
    return torch.cat(padded), *map(torch.cat, columns)


def until_all_end(batches: Iterator[Prompts], group: Any) -> Iterator[Prompts]:
    """`batches`, then empty ones until every rank of `group` is at its end."""
    prompts, none = torch.zeros((2, 0, 1), dtype=torch.int64)
    empty = prompts, none[:, 0], none[:, 0]
    while True:
        batch = next(batches, None)
        if not largest(int(batch is not None), group):
            return
        yield empty if batch is None else batch


def join(
    inputs: Prompts, group: Any, check: Callable[[Prompts], object]
) -> tuple[Prompts, Tensor]:
    """The samples of all ranks of `group`, which call it, in order, and the places of this rank's.
    A `UserError` of `check` on some rank is raised on all.
    """

    def checked() -> Prompts:
        if len(inputs[1]):
            check(inputs)
        return tuple(tensor.cpu() for tensor in inputs)

    batches = _of_all_ranks(checked, UserError, group)
    rank = torch.distributed.get_rank(group)
    first = sum(len(lengths) for _, lengths, *_ in batches[:rank])
    device = inputs[0].device
    joined = tuple(tensor.to(device) for tensor in joined_prompts(batches))
    return joined, torch.arange(first, first + len(inputs[1]))


def divide(decode: _Decode, group: Any, pad_id: int, *inputs: Tensor) -> GenerationOutput:
    """`decode(*inputs)`, divided among the ranks of `group`, which all call it and get the whole
    result; a `RuntimeError` of `decode` on some rank is raised on all.
    """
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    own = torch.arange(len(inputs[0])).tensor_split(size)[rank]
    # A rank without samples decodes a copy of the first: its experts may be needed.
    index = own if len(own) else torch.zeros(1, dtype=torch.int64)
    outputs: list[GenerationOutput] = []

    def width() -> int:
        outputs.append(decode(*(tensor[index.to(tensor.device)] for tensor in inputs)))
        return outputs[0].response_tokens.size(1)

    widths = _of_all_ranks(width, RuntimeError, group)
    pad = max(widths) - widths[rank]
    padding = {"response_tokens": pad_id, "token_rewards": float("nan")}

    def gather(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() > 1:
            tensor = torch.nn.functional.pad(tensor, (0, pad), value=padding.get(name, 0.0))
        return rebalance_nd_tensor(tensor[: len(own)], group)

    return outputs[0].each(gather)


def _of_all_ranks(function: Callable[[], T], kind: type[Exception], group: Any) -> list[T]:
    """The results of `function` by rank; an error of this `kind` on some rank is raised on all."""
    result, error = None, None
    try:
        result = function()
    except kind as failure:
        error = failure
    found = gathered((None if error is None else str(error), result), group)
    messages = [message for message, _ in found if message is not None]
    if messages:
        raise error or kind(messages[0])
    return [each for _, each in found]
