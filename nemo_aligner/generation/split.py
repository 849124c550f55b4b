# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks share the weights and the samples while they generate, and weights at another
split. tp and pp are the sizes of generation, TP and PP those of training. A *copy* is the ranks
that hold the weights once between them.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.core.errors import UserError
from nemo_aligner.generation.interface import GenerationOutput, Prompts
from nemo_aligner.parallel import collectives, parallel_state
from nemo_aligner.parallel.device import get_device


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


def training_split() -> Split:
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    copy = parallel_state.get_tensor_and_pipeline_parallel_group()
    assert tensor is not None and pipeline is not None and copy is not None
    return Split(tensor, pipeline, copy, None, _dividing_context(), None, list)


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
    policies = [ranks for _, ranks in sorted(set(collectives.gathered((place, tuple(own)))))]
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
        if not collectives.largest(int(batch is not None), group):
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
        return collectives.rebalance_nd_tensor(tensor[: len(own)], group)

    return outputs[0].each(gather)


def _of_all_ranks(function: Callable[[], T], kind: type[Exception], group: Any) -> list[T]:
    """The results of `function` by rank; an error of this `kind` on some rank is raised on all."""
    result, error = None, None
    try:
        result = function()
    except kind as failure:
        error = failure
    found = collectives.gathered((None if error is None else str(error), result), group)
    messages = [message for message, _ in found if message is not None]
    if messages:
        raise error or kind(messages[0])
    return [each for _, each in found]


# ------------------------------------------------------------------------ weights of another split
# By names in a model of all layers: the ranks of a policy, which hold all of its weights between
# them, send one after the other to each other, and each keeps what it needs.

LAYERS = "decoder.layers."
INPUT, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_Weights = dict[str, Tensor]


class _Form(NamedTuple):
    dim: int | None  # dimension in which ranks divide it; None: they do not
    parts: int  # pieces of a rank's share that are apart in the whole (2: gated linear unit)
    shape: torch.Size  # of a rank's share in training
    dtype: torch.dtype


def divided(config: TransformerConfig, tp: int, pp: int) -> TransformerConfig:
    """A copy of `config` for a model with tp x pp ranks, built without initial values."""
    config = copy.copy(config)
    config.virtual_pipeline_model_parallel_size = None
    for stage in ("first", "last"):
        setattr(config, f"num_layers_in_{stage}_pipeline_stage", None)
    config.perform_initialization = False
    config.tensor_model_parallel_size = tp
    config.pipeline_model_parallel_size = pp
    config.sequence_parallel = config.sequence_parallel and tp > 1
    config.pipeline_dtype = config.params_dtype
    return config


def global_weights(chunks: Sequence[Any]) -> _Weights:
    """This stage's own tensors by their names in a model of all layers."""
    weights = {}
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            if name.startswith(LAYERS):
                local, _, rest = name.removeprefix(LAYERS).partition(".")
                name = f"{LAYERS}{numbers[int(local)]}.{rest}"
            weights[name] = tensor
    return weights


@torch.no_grad()
def reshard(split: Split, chunks: Sequence[Any], build: Callable[[Split], Any]) -> Any:
    """A model, made by `build` from a `divided` config, with the weights of the bare `GPTModel`s
    `chunks`; every rank of the job calls it. A rank's own tensors stay where they are if it needs
    them as they are; others are copies, in memory until the model is dropped. `RuntimeError`, on
    every rank: a weight is missing everywhere, or does not have the same bits afterwards.
    """
    source = global_weights(chunks)
    if chunks[-1].share_embeddings_and_output_weights and INPUT in source:
        source[OUTPUT] = source[INPUT]  # for a last stage that has no embedding
    model = build(split)
    target = global_weights([model])
    training = parallel_state.get_tensor_model_parallel_group()
    assert training is not None
    rank, ranks = training.rank(), training.size()
    # Of other stages alone, where each rank needs the shares of its own place.
    keeps_shares = split.tensor.size() == ranks
    group = (
        parallel_state.get_pipeline_model_parallel_group()
        if keeps_shares
        else parallel_state.get_tensor_and_pipeline_parallel_group()
    )
    forms, holders = _found(source, set(target), rank, group)
    for name, (dim, parts, shape, dtype) in forms.items():
        cut = None if keeps_shares else dim  # dimension in which the pieces are joined
        pieces = []
        for place in [rank if keeps_shares else 0] if cut is None else range(ranks):
            holder = holders[name, place]
            if holder == torch.distributed.get_rank():
                piece = source[name].detach()
            else:
                piece = torch.empty(shape, dtype=dtype, device=get_device())
            torch.distributed.broadcast(piece, src=holder, group=group)
            pieces.append(piece)
        if name not in target:
            continue
        if cut is not None:
            whole = [torch.cat(part, cut) for part in zip(*(p.chunk(parts, cut) for p in pieces))]
            own = (part.chunk(split.tensor.size(), cut)[split.tensor.rank()] for part in whole)
            pieces = [torch.cat([*own], cut)]
        target[name].data = pieces[0]
    sums = _checksums(source, forms, training), _checksums(target, forms, split.tensor)
    everywhere = collectives.gathered(sums)
    trained = {weight for before, _ in everywhere for weight in before.items()}
    for rank, (_, after) in enumerate(everywhere):
        for name, value in after.items():
            if (name, value) not in trained:
                raise RuntimeError(
                    f"{name} of rank {rank} has other bits after it was moved for generation; set "
                    "generation.reshard=none and check the network."
                )
    return model


def _found(
    source: _Weights, needed: set[str], rank: int, group: ProcessGroup | None
) -> tuple[dict[str, _Form], dict[tuple[str, int], int]]:
    """The forms of the weights that a rank of `group` needs, by name, and which rank has the share
    of each at each place in tensor parallelism; all ranks of `group` call it.
    """
    mine = {
        name: _Form(
            getattr(tensor, "partition_dim", 0)
            if getattr(tensor, "tensor_model_parallel", False)
            else None,
            int(getattr(tensor, "partition_stride", 1)),
            tensor.shape,
            tensor.dtype,
        )
        for name, tensor in source.items()
    }
    found = collectives.gathered((rank, mine, needed), group)
    wanted = set().union(*(names for _, _, names in found))
    forms: dict[str, _Form] = {}
    holders: dict[tuple[str, int], int] = {}
    members = torch.distributed.get_process_group_ranks(group)
    for member, (place, weights, _) in zip(members, found, strict=True):
        for name, form in weights.items():
            forms.setdefault(name, form)
            holders.setdefault((name, place), member)
    if missing := sorted(wanted - set(forms)):
        remedy = "set generation.reshard=none."
        raise RuntimeError(f"no rank trains {missing[0]}, which generation needs; {remedy}")
    return {name: forms[name] for name in sorted(wanted)}, holders


def _checksums(weights: _Weights, forms: dict[str, _Form], group: ProcessGroup) -> dict[str, int]:
    """Of the whole weights of which this rank has a share; the ranks of `group` call it."""
    own, shared = {}, {}
    for name, (dim, parts, *_) in forms.items():
        if name in weights and dim is None:
            own[name] = collectives.checksum_of_shard(weights[name])
        elif name in weights:
            place = group.rank(), group.size()
            shared[name] = collectives.checksum_of_shard(weights[name], dim, parts, *place)
    if shared:
        total = torch.stack(list(shared.values()))
        torch.distributed.all_reduce(total, group=group)
        shared = dict(zip(shared, total, strict=True))
    return {name: int(value) for name, value in (own | shared).items()}
