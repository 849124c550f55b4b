# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of Megatron Core's objects for the duration of a `with` block, and what differs between
the releases that this project runs with: 0.16 on Python 3.10 and 3.11, 0.19 on 3.12.

`megatron_adaptation.SWITCHED` lists what is touched. Code looks at what is there rather than at
the version; `docs/architecture.md` says how to move to the next release.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor


def parts_of(builder: Any) -> Any:
    """The submodules in the specification of a layer's module."""
    if isinstance(builder, functools.partial):  # 0.19
        return builder.keywords["submodules"]
    return builder.submodules  # 0.16: a `ModuleSpec`


def with_class(builder: Any, module: type) -> Any:
    """The specification `builder` of a module, for `module` in the place of its class."""
    if isinstance(builder, functools.partial):  # 0.19
        return functools.partial(module, *builder.args, **builder.keywords)
    return dataclasses.replace(builder, module=module)  # 0.16: a `ModuleSpec`


def take_balance_table() -> dict[str, Tensor]:
    """Read and empty Megatron Core's table of the losses that balance experts: sums by layer."""
    try:
        from megatron.core.transformer.moe import moe_logging  # 0.19
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        tracker = get_moe_layer_wise_logging_tracker()
        table = {name: entry["values"] for name, entry in tracker.items()}
        tracker.clear()  # not zeroed: the next model may have more layers
        return table
    table = {
        name: entry.values for name, entry in moe_logging.get_moe_metrics_tracker().metrics.items()
    }
    moe_logging.destroy_moe_metrics_tracker()
    return table


_OF_CLASS = object()


@contextlib.contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, attributes have other values: each (owner, name, value)."""
    changes = list(changes)
    before = [(owner, name, vars(owner).get(name, _OF_CLASS)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _OF_CLASS:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def decoding_mode(model: list[torch.nn.Module]) -> Iterator[None]:
    """Evaluation, with sequences not split over TP or CP ranks, of Megatron Core's own modules and
    Transformer Engine's attention.
    """
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    modules: list[Any] = [module for chunk in model for module in chunk.modules()]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    owners = [*modules, *configs.values()]
    changes: list[tuple[Any, str, Any]] = [
        (owner, name, False)
        for owner in owners
        for name in names
        if getattr(owner, name, None) is True
    ]
    split = [owner for owner in owners if getattr(owner, "context_parallel_size", 1) > 1]
    attention: list[Any] = []
    if split:
        changes += [(config, "context_parallel_size", 1) for config in split]
        changes += [(m, "cp_group", None) for m in modules if isinstance(m, RotaryEmbedding)]
        needed = ("set_context_parallel_group", "cp_comm_type")
        attention = [m for m in modules if all(hasattr(m, name) for name in needed)]
    context = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    settings = [[getattr(module, name) for name in context] for module in attention]

    def set_context(settings: list[list[Any]]) -> None:
        for module, setting in zip(attention, settings, strict=True):
            module.set_context_parallel_group(*setting)
        for kind in (RotaryEmbedding, YarnRotaryEmbedding) if split else ():
            kind.forward.cache_clear()  # it remembers embeddings by length alone

    training = [chunk for chunk in model if chunk.training]
    for chunk in training:
        chunk.eval()
    try:
        with changed(changes):
            set_context([[None, None, None, setting[-1]] for setting in settings])
            yield
    finally:
        set_context(settings)
        for chunk in training:
            chunk.train()


def all_weights_named(optimizers: list[MegatronOptimizer]) -> AbstractContextManager[None]:
    """Let the optimizer of a bf16 model name its float32 weights (a head) in a checkpoint too:
    Megatron Core numbers the bf16 weights alone and would confuse states.
    """

    def groups(part: Any) -> list[list[Any]]:
        both = zip(part.float16_groups, part.fp32_from_fp32_groups, strict=True)
        return [mixed + fp32 for mixed, fp32 in both]

    mixed = [part for part in optimizers if hasattr(part, "fp32_from_fp32_groups")]
    return changed((part, "float16_groups", groups(part)) for part in mixed)


def places_without_padding(optimizers: list[MegatronOptimizer]) -> AbstractContextManager[None]:
    """Let distributed optimizers find the state of each weight where they gather it for a
    checkpoint. Megatron Core leaves out the padding between buckets (there are several with
    `overlap_grad_sync`, and in pipelines with tied embeddings) only when it gathers.
    """

    def places(buffer: Any) -> dict[Any, tuple[int, int, int]]:
        padding, gathered = [], 0  # before each bucket
        for bucket in buffer.buckets:
            padding.append(bucket.offset - gathered)
            gathered += bucket.numel_unpadded
        return {
            weight: (start - padding[bucket], end - padding[bucket], bucket)
            for weight, (start, end, bucket) in buffer.param_index_map.items()
        }

    distributed = [part for part in optimizers if isinstance(part, DistributedOptimizer)]
    buffers = [buffer for part in distributed for buffer in part.buffers]
    return changed((buffer, "param_index_map", places(buffer)) for buffer in buffers)


def groups_in_order(optimizers: list[MegatronOptimizer]) -> AbstractContextManager[None]:
    """Load parameter groups in the order given: several share what Megatron Core matches by."""
    return changed(
        (part, "_filter_and_reorder_param_groups", lambda _own, given: given)
        for part in optimizers
        if not isinstance(part, DistributedOptimizer)
    )
