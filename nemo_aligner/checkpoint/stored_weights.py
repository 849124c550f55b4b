# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in a checkpoint, in whatever form, loaded into a *sharded state dict*, which says which
part of which global tensor each weight is (Megatron Core's `ShardedTensor`). Each form has a
`TensorSource` that reads those parts.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.core.errors import UserError

Sharded = dict[str, dict[str, Any]]  # sharded state dicts of the chunks of a model
Slice = tuple[int | slice, ...]
LAYERS = "model.decoder.layers."  # before the names of layers' weights
EXPERTS = ".experts.experts."  # in the names of experts' weights, whose first axis counts them
ADAPTER = ".lora."  # in the names of adapters

# The largest float16, in which models are served. Trained weights are far below: one beyond comes
# of damage (a wrong bit of an exponent makes 0.01 to 1e7 or 1e36), or of a diverged training.
LARGEST_WEIGHT = 65504.0


def checked(values: Tensor, name: str, file: Path) -> Tensor:
    """`values` of the weight `name`; `UserError`: one is not finite, or above `LARGEST_WEIGHT`."""
    if values.is_floating_point() and values.numel():
        # One pass; NaN comes through.
        ends = torch.stack(torch.aminmax(values if values.itemsize > 1 else values.float()))
        if not bool((ends.abs() <= LARGEST_WEIGHT).all()):
            worst = max(ends.tolist(), key=lambda end: abs(end) if end == end else float("inf"))
            raise UserError(
                f"{file}: the weight {name} has the value {worst:.6g}; no weight of a sound model "
                f"is that, or beyond {LARGEST_WEIGHT:g}. The file is damaged, or its training had "
                "diverged: copy it again, or use another checkpoint."
            )
    return values


def sharded_tensors(item: Any) -> list[ShardedTensor]:
    """The tensors of an entry of a sharded state dict; a factory has several."""
    if isinstance(item, mapping.ShardedTensorFactory):
        return list(nested_values(item.build()))
    return [item] if isinstance(item, ShardedTensor) else []


class TensorSource(Protocol):
    """Global tensors that are read in parts."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of each tensor by Megatron Core's name; of layers, their number first."""

    def read(self, key: str, part: Slice) -> Tensor:
        """A part within the tensor `key`, `checked`; an int in `part` drops its axis."""


def whole_tensor(source: TensorSource, key: str) -> Tensor:
    return source.read(key, tuple(slice(0, size) for size in source.shapes()[key]))


def stored_dtype(source: TensorSource, key: str) -> torch.dtype:
    """The dtype of a tensor: that of its first entry."""
    axes = len(source.shapes()[key])
    first = tuple(slice(0, 1) if axis >= axes - 1 else 0 for axis in range(axes))
    return source.read(key, first).dtype


@torch.no_grad()
def load_weights(source: TensorSource, sharded: Sharded) -> Sharded:
    """Values for `sharded`, written into its tensors where it has some; all ranks call it.
    `UserError` on all ranks: a file is damaged.
    """

    def value(item: Any) -> Any:
        # Several tensors in one, such as SwiGLU's.
        if isinstance(item, mapping.ShardedTensorFactory):
            return item.merge_fn(dict_list_map_outplace(value, item.build()))
        if isinstance(item, ShardedTensor):
            return _tensor(source, item)
        if isinstance(item, mapping.LocalNonpersistentObject):
            return item.unwrap()
        return item.data if isinstance(item, mapping.ShardedObject) else item

    with failing_together():
        return dict_list_map_outplace(value, sharded)


def _tensor(source: TensorSource, wanted: ShardedTensor) -> Tensor:
    # As `ShardedTensor.global_slice`, which 0.20 lacks.
    shape = (None,) * wanted.prepend_axis_num + wanted.local_shape
    part = tuple(
        first if size is None else slice(first, first + size)
        for first, size in zip(wanted.global_offset, shape, strict=True)
    )
    target = wanted.data
    assert target is not None
    if not wanted.allow_shape_mismatch:
        return target.copy_(source.read(wanted.key, part))
    # An embedding table has padding rows by the split; those not stored are 0, as in Megatron.
    rows, *others = part
    assert isinstance(rows, slice)
    stop = max(min(rows.stop, source.shapes()[wanted.key][0]), rows.start)
    target[stop - rows.start :] = 0
    if stop > rows.start:
        part = (slice(rows.start, stop), *others)
        target[: stop - rows.start] = source.read(wanted.key, part)
    return target


def unnumbered(key: str) -> tuple[str, int | None]:
    """The key of a layer's tensor as for all layers, and its number from 0 if it has one."""
    number, _, name = key.removeprefix(LAYERS).partition(".")
    is_numbered = key.startswith(LAYERS) and number.isdigit()
    return (LAYERS + name, int(number)) if is_numbered else (key, None)


def is_stacked(key: str) -> bool:
    """Whether a tensor is that of all layers, with their number as first axis; no adapter is."""
    return key.startswith(LAYERS) and unnumbered(key)[1] is None and ADAPTER not in key


def numbered(key: str, layer: int) -> str:
    return f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}"


def distinct(keys: Collection[str]) -> list[str]:
    """The keys of a whole model, where some layers have two: that of all layers is taken, or, if
    it is not there for all, those with numbers.
    """
    both = {unnumbered(key)[0] for key in keys if unnumbered(key)[1] is not None}
    if all(name in keys for name in both):
        return [key for key in keys if unnumbered(key)[1] is None]
    return [key for key in keys if key not in both]


def pieces(source: TensorSource) -> list[tuple[str, tuple[int, ...]]]:
    """Each tensor of a layer or expert, by layer: key, and numbers of layer and expert in it."""
    found, shapes = [], source.shapes()
    for key in distinct(shapes):
        stacked, (_, layer) = is_stacked(key), unnumbered(key)
        axes = stacked + (EXPERTS in key)
        for index in itertools.product(*map(range, shapes[key][:axes])):
            found.append((key, index, index[0] if stacked else -1 if layer is None else layer))
    return [(key, index) for key, index, _layer in sorted(found, key=lambda piece: piece[2])]


class EitherName:
    """A `TensorSource` with the layers of another under both names, whichever that has."""

    def __init__(self, source: TensorSource):
        self.source = source
        self._stored = source.shapes()
        self._shapes = dict(self._stored)
        layers: dict[str, dict[int, tuple[int, ...]]] = {}
        for key, shape in self._stored.items():
            name, number = unnumbered(key)
            if number is not None:
                layers.setdefault(name, {})[number] = shape
            elif is_stacked(key):
                self._shapes |= {numbered(key, layer): shape[1:] for layer in range(shape[0])}
        count = 1 + max((max(shapes) for shapes in layers.values()), default=-1)
        for name, shapes in layers.items():
            if len(shapes) == count and len({*shapes.values()}) == 1:
                self._shapes[name] = (count, *shapes[0])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, key: str, part: Slice) -> Tensor:
        if key in self._stored:
            return self.source.read(key, part)
        name, number = unnumbered(key)
        if number is not None:
            return self.source.read(name, (number, *part))
        axis, *rest = part
        if isinstance(axis, int):
            return self.source.read(numbered(key, axis), tuple(rest))
        layers = range(*axis.indices(self._shapes[key][0]))
        return torch.stack([self.source.read(numbered(key, n), tuple(rest)) for n in layers])


# --- what the section `model` says of the shapes ---


@dataclass(frozen=True)
class Heads:
    groups: int  # query groups; each has one key and one value head
    queries: int  # query heads of a group
    size: int  # of a head


def heads_of(keys: Mapping[str, Any]) -> Heads:
    heads = int(keys["num_attention_heads"])
    groups = int(keys.get("num_query_groups") or heads)
    size = keys.get("kv_channels") or int(keys["hidden_size"]) // heads
    return Heads(groups, heads // groups, int(size))


def is_gated(keys: Mapping[str, Any]) -> bool:
    """Whether an MLP's first matrix holds two, such as SwiGLU's."""
    return str(keys.get("activation") or "").lower().endswith("glu")
