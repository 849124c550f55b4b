# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in a checkpoint, in whatever form, loaded into a sharded state dict.

A *sharded state dict* of a model says which part of which global tensor each of its weights is
(Megatron Core's `ShardedTensor`). Megatron Core loads distributed checkpoints of the format
torch_dist; for other forms a `TensorSource` reads those parts.
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from nemo_aligner.checkpoint import dist_ckpt
from nemo_aligner.core.errors import UserError

Sharded = dict[str, dict[str, Any]]  # sharded state dicts of the chunks of a model
Slice = tuple[int | slice, ...]


class StoredWeights(Protocol):
    """The weights of one checkpoint, under the names that Megatron Core's models give them."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of each tensor; those of layers have the number of layers in front."""

    def load(self, sharded: Sharded) -> Sharded:
        """Values for `sharded`, whose tensors the checkpoint has; all ranks call it."""


def _present_name(key: str, stored: Container[str]) -> str:
    """The name that a model gives to the tensor `key`: without Transformer Engine, this package
    first stored the norm before experts under the name of the norm before an MLP.
    """
    stem, mlp_norm, kind = key.partition("mlp.linear_fc1.layer_norm_")
    if not mlp_norm or f"{stem}mlp.linear_fc1.weight" in stored:
        return key
    return f"{stem}pre_mlp_layernorm.{kind}"


def damaged(folder: Path, error: Exception) -> UserError:
    """The error about a distributed checkpoint that cannot be read."""
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{folder} is damaged or incomplete ({why}); copy it again.")


class TorchDistWeights:
    """A distributed checkpoint of Megatron Core in the format torch_dist.

    Args:
        folder: of the checkpoint.
        prefix: that its names have in the place of `model.`.
    """

    def __init__(self, folder: Path, prefix: str = "model."):
        self.folder, self.prefix = str(folder), prefix
        try:
            self.stored = dist_ckpt.tensors_in(self.folder)
        except (OSError, EOFError, RuntimeError, CheckpointingException) as error:
            raise damaged(folder, error) from error
        self.renamed = {_present_name(key, self.stored): key for key in self.stored}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            "model." + key.removeprefix(self.prefix): tuple(self.stored[stored].global_shape)
            for key, stored in self.renamed.items()
            if key.startswith(self.prefix)
        }

    def load(self, sharded: Sharded) -> Sharded:
        for items in sharded.values():
            for item in items.values():
                if isinstance(item, ShardedBase):
                    key = self.prefix + item.key.removeprefix("model.")
                    item.key = self.renamed.get(key, key)
        return dist_ckpt.load(sharded, self.folder)


def sharded_tensors(item: Any) -> list[ShardedTensor]:
    """The tensors of one entry of a sharded state dict; a factory has several."""
    if isinstance(item, ShardedTensorFactory):
        parts: Any = item.build()
        return list(parts.values() if isinstance(parts, dict) else parts)
    return [item] if isinstance(item, ShardedTensor) else []


class TensorSource(Protocol):
    """Global tensors that are read in parts."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As in `StoredWeights`."""

    def read(self, key: str, part: Slice) -> Tensor:
        """One part of the tensor `key`; an int in `part` drops its axis. `part` lies within the
        tensor's shape.
        """


def stored_dtype(source: TensorSource, key: str) -> torch.dtype:
    """Of a tensor of `source`: that of its first entry."""
    axes = len(source.shapes()[key])
    first = tuple(slice(0, 1) if axis >= axes - 1 else 0 for axis in range(axes))
    return source.read(key, first).dtype


class SourceWeights:
    """The weights of a `TensorSource`."""

    def __init__(self, source: TensorSource):
        self.source = source

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.source.shapes()

    def load(self, sharded: Sharded) -> Sharded:
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
        if not wanted.allow_shape_mismatch:
            return self.source.read(wanted.key, part)
        # An embedding table: its padding rows depend on the split. Those that the checkpoint does
        # not have are 0, as Megatron Core loads them.
        rows, *others = part
        assert isinstance(rows, slice)
        result = torch.zeros_like(wanted.data)
        stored_rows = self.source.shapes()[wanted.key][0]
        stop = min(rows.stop, stored_rows)
        if stop > rows.start:
            part = (slice(rows.start, stop), *others)
            result[: stop - rows.start] = self.source.read(wanted.key, part)
        return result
