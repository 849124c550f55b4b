# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in old forms: a file of each rank of a former job,

    model_weights.ckpt                                one rank
    mp_rank_01/model_weights.ckpt                     tensor-parallel rank 1, one pipeline stage
    tp_rank_01_pp_rank_002/model_weights.ckpt         tensor-parallel rank 1 of stage 2

a state dict with the names of Megatron Core's modules, layers numbered within their stage, which
loads at any split; or zarr, Megatron Core's format before torch_dist: for each tensor a folder
with `.zarray` (JSON, zarr version 2) and a file of plain numbers per chunk, never compressed.
"""

import itertools
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.checkpoint import stored_weights
from nemo_aligner.checkpoint.forms import RANK_FOLDER, WEIGHTS_FILE, refusal
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource
from nemo_aligner.checkpoint.torch_dist_stream import read_objects
from nemo_aligner.core.errors import UserError

# Axis along which tensor-parallel ranks share a weight; others are whole on each.
SPLIT_AXES = dict.fromkeys(
    """word_embeddings.weight output_layer.weight linear_qkv.weight linear_qkv.bias
    linear_fc1.weight linear_fc1.bias""".split(),
    0,
) | dict.fromkeys("linear_proj.weight linear_fc2.weight rm_head.weight".split(), 1)
GATED = ("linear_fc1.weight", "linear_fc1.bias")  # with a gate each rank has [gate, up]
# Names of layers without Transformer Engine, and what distributed checkpoints call them.
OTHER_NAMES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


class RankTensors:
    """A `TensorSource` of the weights of each rank, with layers by number; `UserError`: weights
    are missing, or layers are of another kind.

    Args:
        stages: state dicts of tensor-parallel ranks by stage, or virtual stage, in the order of
            their layers; in the last a tied output layer is a copy.
        gated: an MLP's first linear layer holds a gate and its partner (`swiglu`, ...).
    """

    def __init__(self, stages: Sequence[Sequence[Mapping[str, Any]]], path: Path, gated: bool):
        self.path, self.gated = path, gated
        self.tensors: dict[str, list[Tensor]] = {}  # global name -> shards of the ranks
        first_layer = 0
        for loaded in stages:
            shards = [{_stored_name(name): state[name] for name in state} for state in loaded]
            if any(shard.keys() != shards[0].keys() for shard in shards):
                raise UserError(
                    f"{path}: ranks of one stage hold different weights; copy it again."
                )
            names = [name for name in shards[0] if isinstance(shards[0][name], Tensor)]
            layers = {stored_weights.unnumbered(name)[1] for name in names} - {None}
            for name in names:
                key, layer = stored_weights.unnumbered(name)
                whole = (
                    name if layer is None else stored_weights.numbered(key, first_layer + layer)
                )
                self.tensors.setdefault(whole, [shard[name] for shard in shards])
            first_layer += len(layers)
        if any(name.startswith("model.language_model.") for name in self.tensors):
            raise refusal("legacy_layers", path)
        if any(".experts." in name for name in self.tensors):
            raise refusal("rank_experts", path)
        if not self.tensors:
            raise UserError(f"{path} holds no weights; copy it again.")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {}
        for name, shards in self.tensors.items():
            shape = list(shards[0].shape)
            axis = SPLIT_AXES.get(_leaf(name))
            if axis is not None:
                shape[axis] = sum(shard.shape[axis] for shard in shards)
            shapes[name] = tuple(shape)
        return shapes

    def read(self, key: str, part: Slice) -> Tensor:
        return stored_weights.checked(
            self._whole(key)[part], key.removeprefix("model."), self.path
        )

    def _whole(self, name: str) -> Tensor:
        shards = self.tensors[name]
        axis = SPLIT_AXES.get(_leaf(name))
        if axis is None or len(shards) == 1:
            return shards[0]
        if self.gated and _leaf(name) in GATED:
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return torch.cat(shards, axis)


def rank_files(folder: Path, path: Path, gated: bool) -> TensorSource:
    """NeMo's files in `folder`, of the `.nemo` at `path`; `UserError`: the file of a rank is
    missing, holds other objects than tensors, or has layers of another kind.
    """
    single = folder / WEIGHTS_FILE
    files = [[single]] if single.is_file() else files_of_ranks(folder, WEIGHTS_FILE, path)
    stages: list[list[dict[str, Tensor]]] = []
    for ranks in files:
        stages.append([])
        for file in ranks:
            what = f"{file.name} in {path}"
            # Its tensors stay in the file until they are used.
            loaded = read_objects(file, what, mmap=zipfile.is_zipfile(file))
            if not isinstance(loaded, dict):
                raise UserError(f"{what} is not a state dict; it is not NeMo's.")
            stages[-1].append(loaded)
    return stored_weights.EitherName(RankTensors(stages, path, gated))


def files_of_ranks(
    folder: Path, name: str, path: Path, sizes: tuple[int, int] | None = None
) -> list[list[Path]]:
    """The files `name` below `folder`, of the checkpoint at `path`, by stage and tensor-parallel
    rank; `UserError`: one is missing of `sizes`, stages first (None: as the numbers there).
    """
    files = {}
    for child in folder.iterdir():
        match = RANK_FOLDER.fullmatch(child.name)
        if match is not None:
            files[int(match["stage"] or 0), int(match["rank"])] = child / name
    stages, ranks = sizes or (max(place[axis] for place in files) + 1 for axis in (0, 1))
    for stage, rank in itertools.product(range(stages), range(ranks)):
        if (stage, rank) not in files or not files[stage, rank].is_file():
            raise UserError(
                f"{path} lacks {name} of tensor-parallel rank {rank} of stage {stage}, in a job "
                f"of {ranks} x {stages} ranks; copy it again."
            )
    return [[files[stage, rank] for rank in range(ranks)] for stage in range(stages)]


def _stored_name(name: str) -> str:
    """A name as Megatron Core stores it, without the wrappers of NeMo's models."""
    name = "model." + name.removeprefix("model.").removeprefix("module.")
    for other, stored in OTHER_NAMES:
        name = name.replace(other, stored)
    return name


def _leaf(name: str) -> str:
    """Module and parameter of a name."""
    return ".".join(name.split(".")[-2:])


ARRAY_FILE = ".zarray"
# NumPy has no bfloat16: names that writers used.
BFLOAT16 = ("bfloat16", "<V2", "|V2", "V2")


class ZarrArrays:
    """A `TensorSource` of zarr arrays in `folder`, of the `.nemo` at `path`; `UserError`: one is
    compressed, of an unknown type, or damaged.
    """

    def __init__(self, folder: Path, path: Path):
        self.folder, self.path = folder, path
        self.arrays: dict[str, dict] = {}
        for file in sorted(folder.glob(f"*/{ARRAY_FILE}")):
            name = f"{file.parent.name}/{ARRAY_FILE}"
            try:
                array = json.loads(file.read_text())
                self._number(array["dtype"])
                readable = len(array["shape"]) == len(array["chunks"]) and array["order"] == "C"
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{path}: {name} cannot be read ({error}); copy it again."
                ) from error
            if array.get("compressor") is not None or array.get("filters") or not readable:
                raise refusal("compressed_zarr", path, name)
            self.arrays[file.parent.name] = array

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(array["shape"]) for key, array in self.arrays.items()}

    def read(self, key: str, part: Slice) -> Tensor:
        array = self.arrays[key]
        spans = [range(p, p + 1) if isinstance(p, int) else range(p.start, p.stop) for p in part]
        found = np.empty([len(span) for span in spans], self._number(array["dtype"]))
        pairs = list(zip(spans, array["chunks"], strict=True))
        touched = [range(span.start // size, -(-span.stop // size)) for span, size in pairs]
        for index in itertools.product(*touched):
            places, inside = [], []
            for (span, size), number in zip(pairs, index, strict=True):
                first = max(span.start, number * size)
                last = min(span.stop, (number + 1) * size)
                places.append(slice(first - span.start, last - span.start))
                inside.append(slice(first - number * size, last - number * size))
            found[tuple(places)] = self._chunk(key, index)[tuple(inside)]
        tensor = torch.from_numpy(found)
        if array["dtype"] in BFLOAT16:
            tensor = tensor.view(torch.bfloat16)
        stored_weights.checked(tensor, key, self.path)
        return tensor[tuple(0 if isinstance(p, int) else slice(None) for p in part)]

    def _chunk(self, key: str, index: tuple[int, ...]) -> np.ndarray:
        array = self.arrays[key]
        file = self.folder / key / array.get("dimension_separator", ".").join(map(str, index))
        if not file.is_file():
            raise UserError(
                f"{self.path} lacks the chunk {file.name} of {key}; it is incomplete: copy it "
                "again."
            )
        number = self._number(array["dtype"])
        expected = int(np.prod(array["chunks"])) * number.itemsize
        if file.stat().st_size != expected:
            raise UserError(
                f"{self.path}: the chunk {file.name} of {key} has {file.stat().st_size} bytes in "
                f"the place of {expected}; copy it again."
            )
        return np.memmap(file, number, "r", shape=tuple(array["chunks"]))

    def _number(self, dtype: str) -> np.dtype:
        """The type of numbers in a file; bfloat16 is read as plain 16 bits."""
        return np.dtype(np.int16 if dtype in BFLOAT16 else dtype)
