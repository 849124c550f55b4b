# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights by the names of Megatron Core, written as a Hugging Face folder, tensor by tensor."""

import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, Unsupported
from nemo_aligner.checkpoint.hugging_face.folder import INDEX_FILE, WEIGHTS_FILE
from nemo_aligner.checkpoint.hugging_face.weights import PREFIX, Layout, Place
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource, distinct, stored_dtype

SHARD_BYTES = 5_000_000_000  # of a file, as in transformers
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# Padded to the vocabulary of a split
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Written:
    """Tensors of Hugging Face that come from one of Megatron Core, or a layer or expert of it."""

    # key, part: what is read
    key: str
    part: Slice
    place: Place  # what it is
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors of Hugging Face, by their names
    dtype: torch.dtype  # of all of them

    def sizes(self) -> dict[str, int]:
        return {
            name: torch.Size(shape).numel() * self.dtype.itemsize
            for name, shape in self.shapes.items()
        }


def plan(
    source: TensorSource,
    architecture: Architecture,
    keys: Mapping[str, Any],
    vocab_rows: int,
    dtype: torch.dtype | None = None,
    leave_out: Sequence[str] = (),
) -> list[Written]:
    """What a folder will hold, layer by layer.

    Args:
        vocab_rows: rows of the embedding table without its padding; those that the source does
            not have are zeros.
        dtype: to convert to; None: as stored.
        leave_out: names of weights after `model.` that are not written.

    Raises:
        Unsupported: a weight has no name in this architecture.
    """
    layout = Layout(architecture, keys)
    result = []
    shapes = source.shapes()
    for key in distinct(shapes):
        name, shape = key.removeprefix(PREFIX), shapes[key]
        if name in leave_out:
            continue
        axes = layout.numbered_axes(key)
        for index in itertools.product(*(range(size) for size in shape[:axes])):
            place = layout.place(key, index)
            if place is None:
                raise Unsupported(
                    f"{architecture.class_name} has no weight for {name}; the model would compute "
                    "something else."
                )
            rest = shape[axes:]
            if name in _VOCABULARY:
                rest = (vocab_rows, *rest[1:])
            part: Slice = (*index, *map(partial(slice, 0), map(min, rest, shape[axes:])))
            stored = stored_dtype(source, key)
            result.append(Written(key, part, place, _shapes(layout, place, rest), dtype or stored))
    return sorted(result, key=_order)


def _shapes(layout: Layout, place: Place, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    rows: dict[str, int] = {}
    for run in layout.runs(place, shape[0]):
        rows[run.name] = rows.get(run.name, 0) + run.count
    transposed = place.rule.transposed
    return {
        name: ((count, *shape[1:])[::-1] if transposed else (count, *shape[1:]))
        for name, count in rows.items()
    }


def _order(item: Written) -> tuple[int, int, int, str]:
    """The embedding, the layers, then the rest."""
    place = item.place
    if place.layer is None:
        last = 0 if "embedding" in item.key else 2
        return (last, 0, 0, item.key)
    return (1, place.layer, -1 if place.expert is None else place.expert, item.key)


def read_tensors(source: TensorSource, layout: Layout, item: Written) -> dict[str, Tensor]:
    stored = source.read(item.key, item.part)
    transposed = item.place.rule.transposed and stored.dim() > 1
    result = {
        name: torch.zeros(shape[::-1] if transposed else shape, dtype=item.dtype)
        for name, shape in item.shapes.items()
    }
    first = 0
    for run in layout.runs(item.place, stored.shape[0]):
        result[run.name][run.start : run.start + run.count] = stored[first : first + run.count]
        first += run.count
    if transposed:
        return {name: tensor.T.contiguous() for name, tensor in result.items()}
    return result


def write_tensors(
    folder: Path,
    source: TensorSource,
    layout: Layout,
    items: Sequence[Written],
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Write `model.safetensors`, or numbered files and their index, into `folder`.

    Args:
        shard_bytes: largest size of a file; a larger tensor has a file of its own.
        progress: called with the number of bytes that were written.
    """
    shards = _shards(items, shard_bytes)
    names = [WEIGHTS_FILE]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, source, layout, shard, progress)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sum(item.sizes().values()) for item in items)},
            "weight_map": {
                tensor: name
                for name, shard in zip(names, shards, strict=True)
                for item in shard
                for tensor in item.shapes
            },
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _shards(items: Sequence[Written], shard_bytes: int) -> list[list[Written]]:
    shards: list[list[Written]] = [[]]
    size = 0
    for item in items:
        more = sum(item.sizes().values())
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += more
    return shards


def _write_file(
    file: Path,
    source: TensorSource,
    layout: Layout,
    items: Sequence[Written],
    progress: Callable[[int], None],
) -> None:
    """Write one safetensors file. The library's own writer needs all of its tensors at once; the
    format is a length, a JSON header and the bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        for name, size in item.sizes().items():
            header[name] = {
                "dtype": DTYPES[item.dtype],
                "shape": list(item.shapes[name]),
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned, as the format asks for
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for item in items:
            for tensor in read_tensors(source, layout, item).values():
                stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
                progress(tensor.nbytes)
