# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights for generation at another tensor- and pipeline-parallel size.

Where only the pipeline ends, each rank gets the layers of all stages (`gather_stages`). Elsewhere
Megatron Core makes the copies (`megatron.core.resharding.swap_model_weights`), of one layer at a
time, by names in a model of all layers: it knows no virtual stages; 0.16 receives all weights into
second buffers and expects them on all data-parallel ranks; 0.19 remembers plans by sizes only.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.resharding import refit
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from nemo_aligner.generation.split import Split
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.replicas import checksum, checksum_of_shard

LAYERS = "decoder.layers."


def undivided(config: TransformerConfig) -> TransformerConfig:
    """A copy of `config` for a model with all layers on one stage, without initial values."""
    config = copy.copy(config)
    config.pipeline_model_parallel_size = 1
    config.virtual_pipeline_model_parallel_size = None
    for stage in ("first", "last"):
        setattr(config, f"num_layers_in_{stage}_pipeline_stage", None)
    config.perform_initialization = False
    return config


@torch.no_grad()
def gather_stages(chunks: Sequence[Any], build: Callable[[], Any]) -> Any:
    """A model, made by `build` from an `undivided` config, with the weights of all pipeline
    stages; every rank of a pipeline calls it with its bare `GPTModel`s. Weights of other stages
    are copies, in memory until the model is dropped. `RuntimeError`: the ranks hold different
    weights.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = torch.distributed.get_process_group_ranks(group)
    own = dict(global_weights(chunks))
    sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    stages = gathered(sizes, group)
    model = build()
    sums = []
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor):
            continue
        stage = next(number for number, names in enumerate(stages) if name in names)
        shape, dtype = stages[stage][name]
        if ranks[stage] == torch.distributed.get_rank():
            tensor.data = own[name].detach()
        else:
            tensor.data = torch.empty(shape, dtype=dtype, device=get_device())
        torch.distributed.broadcast(tensor.data, src=ranks[stage], group=group)
        sums.append(checksum(tensor))
    if len({tuple(each) for each in gathered(torch.stack(sums).tolist(), group)}) > 1:
        raise RuntimeError(
            "the ranks of a pipeline hold different weights after the exchange for generation; "
            "set generation.reshard=none and check the network."
        )
    return model


def global_weights(chunks: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """This stage's own tensors by their names in a model of all layers."""
    weights = []
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            if name.startswith(LAYERS):
                local, _, rest = name.removeprefix(LAYERS).partition(".")
                name = f"{LAYERS}{numbers[int(local)]}.{rest}"
            weights.append((name, tensor))
    return weights


_Weights = dict[str, Tensor]
_Copy = tuple[int, Tensor, int]  # number, tensor, other rank
INPUT, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class _Form(NamedTuple):
    dim: int | None  # dimension in which ranks divide it; None: they do not
    parts: int  # pieces of a rank's share that are apart in the whole (2: gated linear unit)
    dtype: torch.dtype  # of training


def divided(config: TransformerConfig, tp: int, pp: int) -> TransformerConfig:
    """A copy of `config` for a model with tp x pp ranks, built without initial values."""
    config = undivided(config)
    config.tensor_model_parallel_size = tp
    config.pipeline_model_parallel_size = pp
    config.sequence_parallel = config.sequence_parallel and tp > 1
    config.pipeline_dtype = config.params_dtype
    return config


@torch.no_grad()
def reshard(split: Split, chunks: Sequence[Any], build: Callable[[Split], Any]) -> Any:
    """A model, made by `build` from a `divided` config, with the weights of the bare `GPTModel`s
    `chunks` in memory of its own; every rank of the job calls it. `RuntimeError`, on every rank: a
    weight is missing everywhere, or does not have the same bits afterwards.
    """
    source = dict(global_weights(chunks))
    if chunks[-1].share_embeddings_and_output_weights and INPUT in source:
        source[OUTPUT] = source[INPUT]  # for a last stage that has no embedding
    model = build(split)
    target = dict(global_weights([model]))
    forms = _forms(source, target)
    for name, tensor in target.items():
        tensor.data = torch.empty(tensor.shape, dtype=forms[name].dtype, device=get_device())
    service, me = _Transport(), [torch.distributed.get_rank()]
    alone = torch.distributed.new_group(me, use_local_synchronization=True)
    training = parallel_state.get_tensor_model_parallel_group()
    assert training is not None
    for names in _by_layer(forms):
        refit.swap_model_weights(
            _module(source, names, forms, training, alone),
            _module(target, names, forms, split.tensor, alone),
            service,
        )
        if hasattr(refit, "clear_plan_cache"):  # 0.19
            refit.clear_plan_cache()
    torch.distributed.destroy_process_group(alone)
    _check(_checksums(source, forms, training), _checksums(target, forms, split.tensor))
    return model


def _forms(source: _Weights, target: _Weights) -> dict[str, _Form]:
    """Of each weight that any rank needs; every rank of the job calls it."""
    mine = {
        name: _Form(
            getattr(tensor, "partition_dim", 0)
            if getattr(tensor, "tensor_model_parallel", False)
            else None,
            int(getattr(tensor, "partition_stride", 1)),
            tensor.dtype,
        )
        for name, tensor in source.items()
    }
    found = gathered((mine, set(target)))
    wanted = set().union(*(names for _, names in found))
    forms = {name: form for forms, _ in found for name, form in forms.items() if name in wanted}
    if missing := sorted(wanted - set(forms)):
        remedy = "set generation.reshard=none."
        raise RuntimeError(f"no rank trains {missing[0]}, which generation needs; {remedy}")
    return dict(sorted(forms.items()))


def _by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """Names of the weights of one layer, or outside of layers."""

    def layer(name: str) -> str:
        return name.removeprefix(LAYERS).partition(".")[0] if name.startswith(LAYERS) else ""

    for _, group in itertools.groupby(sorted(names, key=layer), layer):
        yield list(group)


def _module(
    weights: _Weights,
    names: list[str],
    forms: dict[str, _Form],
    tensor: ProcessGroup,
    alone: ProcessGroup,
) -> torch.nn.Module:
    """The `names` that this rank has, as Megatron Core's resharding reads them."""
    root: Any = torch.nn.Module()
    root.config = SimpleNamespace(num_moe_experts=None)
    root.pg_collection = SimpleNamespace(tp=tensor, pp=alone, ep=alone, dp=alone)
    for name in names:
        if name not in weights:
            continue
        parameter = torch.nn.Parameter(weights[name].data, requires_grad=False)
        dim, parts, _ = forms[name]
        if dim is not None:
            set_tensor_model_parallel_attributes(parameter, True, dim, parts)
        *path, last = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, parameter)
    return root


def _checksums(weights: _Weights, forms: dict[str, _Form], group: ProcessGroup) -> dict[str, int]:
    """Of the whole weights of which this rank has a share; the ranks of `group` call it."""
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    own, shared = {}, {}
    for name, (dim, parts, _) in forms.items():
        if name not in weights:
            continue
        if dim is None:
            own[name] = checksum_of_shard(weights[name])
        else:
            shared[name] = checksum_of_shard(weights[name], dim, parts, rank, ranks)
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


class _Transport(CopyService):
    """Copies between ranks with the job's backend (Megatron Core's for gloo needs CUDA)."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[_Copy] = []
        self._received: list[_Copy] = []

    def submit_send(self, src_tensor: Tensor, dest_rank: int, task_id: int | None = None) -> None:
        assert task_id is not None
        self._sent.append((task_id, src_tensor, dest_rank))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int, task_id: int | None = None) -> None:
        assert task_id is not None
        self._received.append((task_id, dest_tensor, src_rank))

    def submit_send_with_id(self, task_id: int, src_tensor: Tensor, dest_rank: int) -> None:
        """Of 0.16, where a copy has a number."""
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: Tensor, src_rank: int) -> None:
        self.submit_recv(dest_tensor, src_rank, task_id)

    def run(self) -> None:
        rank = torch.distributed.get_rank()
        local = {number: tensor for number, tensor, other in self._sent if other == rank}
        operations = []
        # In the order of their numbers: messages between two ranks are told apart by it.
        for number, tensor, other in sorted(self._received, key=lambda copy: copy[0]):
            if other == rank:
                tensor.copy_(local[number])
            else:
                operations.append(P2POp(torch.distributed.irecv, tensor, other))
        for _, tensor, other in sorted(self._sent, key=lambda copy: copy[0]):
            if other != rank:
                operations.append(P2POp(torch.distributed.isend, tensor, other))
        if operations:
            for request in torch.distributed.batch_isend_irecv(operations):
                request.wait()
        self._sent, self._received = [], []
