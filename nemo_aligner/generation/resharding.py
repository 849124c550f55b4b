# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights for generation at another tensor- and pipeline-parallel size, by names in a model of all
layers: the ranks of a policy, which hold all of its weights between them, send one after the other
to each other, and each keeps what it needs.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.generation.split import Split
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.replicas import checksum_of_shard

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
    keeps_shares = split.tensor_ranks == ranks
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
            own = (part.chunk(split.tensor_ranks, cut)[split.tensor.rank()] for part in whole)
            pieces = [torch.cat([*own], cut)]
        target[name].data = pieces[0]
    _check(_checksums(source, forms, training), _checksums(target, forms, split.tensor))
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
    found = gathered((rank, mine, needed), group)
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
            own[name] = checksum_of_shard(weights[name])
        elif name in weights:
            place = group.rank(), group.size()
            shared[name] = checksum_of_shard(weights[name], dim, parts, *place)
    if shared:
        total = torch.stack(list(shared.values()))
        torch.distributed.all_reduce(total, group=group)
        shared = dict(zip(shared, total, strict=True))
    return {name: int(value) for name, value in (own | shared).items()}


def _check(source: dict[str, int], target: dict[str, int]) -> None:
    """Compare the checksums; every rank of the job calls it."""
    everywhere = gathered((source, target))
    trained: dict[str, set[int]] = {}
    for sums, _ in everywhere:
        for name, value in sums.items():
            trained.setdefault(name, set()).add(value)
    for rank, (_, sums) in enumerate(everywhere):
        for name, value in sums.items():
            if value not in trained[name]:
                raise RuntimeError(
                    f"{name} of rank {rank} has other bits after it was moved for generation; set "
                    "generation.reshard=none and check the network."
                )
