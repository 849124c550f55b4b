# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in a checkpoint, in whatever form, loaded into a sharded state dict.

A *sharded state dict* of a model says which part of which global tensor each of its weights is
(Megatron Core's `ShardedTensor`). A `TensorSource`, which each form has, reads those parts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.core.errors import UserError

Sharded = dict[str, dict[str, Any]]  # sharded state dicts of the chunks of a model
Slice = tuple[int | slice, ...]

# The largest number of float16. Models are served in it, and trained in it or with weights far
# below: one beyond comes of damage (one wrong bit of an exponent makes 0.01 to 1e7 or 1e36), or of
# a training that has diverged.
LARGEST_WEIGHT = 65504.0


def checked(values: Tensor, name: str, file: Path) -> Tensor:
    """`values`, a part of the weight `name` in `file`.

    Raises:
        UserError: one of them is not finite, or beyond `LARGEST_WEIGHT`.
    """
    if values.is_floating_point() and values.numel():
        # One pass at the speed of memory; NaN comes through.
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
    """The tensors of one entry of a sharded state dict; a factory has several."""
    if isinstance(item, ShardedTensorFactory):
        parts: Any = item.build()
        return list(parts.values() if isinstance(parts, dict) else parts)
    return [item] if isinstance(item, ShardedTensor) else []


class TensorSource(Protocol):
    """Global tensors that are read in parts."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of each tensor, under the names that Megatron Core's models give them; that
        of a tensor of layers has their number in front.
        """

    def read(self, key: str, part: Slice) -> Tensor:
        """One part of the tensor `key`, `checked`; an int in `part` drops its axis. `part` lies
        within the tensor's shape.
        """


def stored_dtype(source: TensorSource, key: str) -> torch.dtype:
    """Of a tensor of `source`: that of its first entry."""
    axes = len(source.shapes()[key])
    first = tuple(slice(0, 1) if axis >= axes - 1 else 0 for axis in range(axes))
    return source.read(key, first).dtype


class StoredWeights:
    """The weights of one checkpoint, to be loaded into a model.

    Args:
        source: of their values.
    """

    def __init__(self, source: TensorSource):
        self.source = source

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As in `TensorSource`."""
        return self.source.shapes()

    @torch.no_grad()
    def load(self, sharded: Sharded) -> Sharded:
        """Values for `sharded`, whose tensors the checkpoint has; all ranks call it. They are
        written into the tensors of `sharded`, where it has some.

        Raises:
            UserError: on all ranks; a file is damaged.
        """
        with failing_together():
            return {
                chunk: {name: self._value(item) for name, item in items.items()}
                for chunk, items in sharded.items()
            }

    def _value(self, item: Any) -> Any:
        """The loaded value of one entry of a sharded state dict."""
        if isinstance(item, ShardedTensorFactory):  # several tensors in one, such as SwiGLU's
            parts: Any = item.build()
            if isinstance(parts, dict):
                return item.merge_fn({name: self._value(part) for name, part in parts.items()})
            return item.merge_fn([self._value(part) for part in parts])
        if isinstance(item, ShardedTensor):
            return self._tensor(item)
        if isinstance(item, LocalNonpersistentObject):
            return item.unwrap()
        return item.data if isinstance(item, ShardedObject) else item

    def _tensor(self, wanted: ShardedTensor) -> Tensor:
        part = wanted.global_slice()
        target = wanted.data
        assert target is not None
        if not wanted.allow_shape_mismatch:
            return target.copy_(self.source.read(wanted.key, part))
        # An embedding table: its padding rows depend on the split. Those that the checkpoint does
        # not have are 0, as Megatron Core loads them.
        rows, *others = part
        assert isinstance(rows, slice)
        stop = max(min(rows.stop, self.source.shapes()[wanted.key][0]), rows.start)
        target[stop - rows.start :] = 0
        if stop > rows.start:
            part = (slice(rows.start, stop), *others)
            target[: stop - rows.start] = self.source.read(wanted.key, part)
        return target
