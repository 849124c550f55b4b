# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""All layers of a pipeline on each of its ranks, for generation.

A pipeline of n stages decodes with one stage at a time: a token needs them all, one after the
other. With the weights of all stages each rank decodes a part of the samples alone, as a
data-parallel rank would.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.replicas import checksum

LAYERS = "decoder.layers."


def undivided(config: TransformerConfig) -> TransformerConfig:
    """A copy of `config` for a model whose layers are all on one stage, built without initial
    values.
    """
    config = copy.copy(config)
    config.pipeline_model_parallel_size = 1
    config.virtual_pipeline_model_parallel_size = None
    config.num_layers_in_first_pipeline_stage = None
    config.num_layers_in_last_pipeline_stage = None
    config.perform_initialization = False
    return config


@torch.no_grad()
def gather_stages(chunks: Sequence[Any], build: Callable[[], Any]) -> Any:
    """A model with the weights of all pipeline stages; every rank of a pipeline calls it.

    Its weights of this stage are the stage's own tensors; those of the others are copies, which
    take memory until the model is dropped. Tensor and expert parallelism stay as they are.

    Args:
        chunks: bare `GPTModel`s of this stage.
        build: makes a `GPTModel` of all layers, as `undivided` describes it.

    Raises:
        RuntimeError: after the exchange the ranks of the pipeline hold different weights.
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
    _check_equal(torch.stack(sums), group)
    return model


def global_weights(chunks: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Weights of this stage, the module's own tensors, by their names in a model of all layers."""
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


def _check_equal(sums: Tensor, group: Any) -> None:
    highest, lowest = sums.clone(), sums.clone()
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN, group=group)
    if not torch.equal(highest, lowest):
        raise RuntimeError(
            "the ranks of a pipeline hold different weights after the exchange for generation; "
            "set generation.reshard=none and check the network."
        )
