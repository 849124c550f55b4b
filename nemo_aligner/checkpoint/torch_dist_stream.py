# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron Core's distributed checkpoints (torch_dist), as data and in parts: no file of one
can run code, and a model need not fit into memory.
"""

import contextlib
import io
import math
import os
import tarfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import (
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from nemo_aligner.checkpoint.data_only import COMMON_FILE, damaged, read_objects, read_table
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.stored_weights import Slice, checked, load_weights, sharded_tensors
from nemo_aligner.core.errors import UserError


class TarFiles(FileSystem):
    """The files in the uncompressed tar file at `path`, read in place."""

    def __init__(self, tar: tarfile.TarFile, path: Path):
        super().__init__()
        self.path = path
        self.members = {Path(member.name): member for member in tar if member.isreg()}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "rb", f"mode {mode!r}: a tar file is only read"
        member = self.members.get(Path(path).relative_to(self.path))
        if member is None:
            raise FileNotFoundError(f"{path} is missing")
        # tar.extractfile would copy what it reads once more.
        with open(self.path, "rb") as stream:
            yield _create_file_view(stream, member.offset_data, member.size)


def _present_name(key: str, stored: Container[str]) -> str:
    """A model's name of `key`: the norm before experts was first stored under that of an MLP's."""
    stem, mlp_norm, kind = key.partition("mlp.linear_fc1.layer_norm_")
    if not mlp_norm or f"{stem}mlp.linear_fc1.weight" in stored:
        return key
    return f"{stem}pre_mlp_layernorm.{kind}"


class TorchDistTensors:
    """A `TensorSource` of a distributed checkpoint (torch_dist); `UserError`: it is damaged, or
    could run code. Its names have `prefix` for `model.`, or with None are as stored, and their
    values are not `checked`; `folder` is among `files` (None: this machine's).
    """

    def __init__(
        self, folder: Path, prefix: str | None = "model.", files: FileSystem | None = None
    ):
        self.folder, self.is_checked = folder, prefix is not None
        self.reader = dcp.FileSystemReader(folder)
        if files is not None:
            self.reader.fs = files
        table = read_table(folder, self.reader.fs)
        self.reader.set_up_storage_reader(table, is_coordinator=True)
        entries = table.state_dict_metadata
        # Name -> stored name, and where its parts lie.
        self.stored: dict[str, tuple[str, dcp.TensorStorageMetadata]] = {}
        for key, entry in entries.items():
            if isinstance(entry, dcp.TensorStorageMetadata) and key.startswith(prefix or ""):
                name = _present_name(key, entries)
                name = name if prefix is None else f"model.{name.removeprefix(prefix)}"
                self.stored[name] = (key, entry)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(entry.size) for key, (_name, entry) in self.stored.items()}

    def read(self, key: str, part: Slice) -> Tensor:
        name, entry = self.stored[key]
        spans = [
            range(axis, axis + 1) if isinstance(axis, int) else range(*axis.indices(size))
            for axis, size in zip(part, entry.size, strict=True)
        ]
        sizes = torch.Size(map(len, spans))
        result = torch.empty(sizes, dtype=entry.properties.dtype)
        wanted = dcp.ChunkStorageMetadata(torch.Size(span.start for span in spans), sizes)
        found = 0
        for item in create_read_items_for_chunk_list(name, entry, [wanted]):
            place = zip(item.dest_offsets, item.lengths, strict=True)
            self._read_item(item, result[tuple(slice(i, i + n) for i, n in place)])
            found += math.prod(item.lengths)
        if found != result.numel():
            raise UserError(
                f"{self.folder} is incomplete: of {name} it has {found} of {result.numel()} "
                "values. Copy it again, or use another checkpoint."
            )
        return result[tuple(0 if isinstance(axis, int) else slice(None) for axis in part)]

    def object(self, key: str) -> io.BytesIO:
        index, nothing = dcp.metadata.MetadataIndex(key), torch.Size()
        kind = dcp.planner.LoadItemType.BYTE_IO
        return self._read_item(dcp.ReadItem(kind, index, nothing, index, nothing, nothing)).content

    def _read_item(self, item: dcp.ReadItem, target: Tensor | None = None) -> "_ReadPlanner":
        file, planner = self.folder, _ReadPlanner(target)
        try:
            stored_in = self.reader.storage_data[item.storage_index].relative_path
            file /= stored_in
            if file.parent != self.folder:
                raise UserError(f"{self.folder} names the file {stored_in}, outside of it.")
            self.reader.read_data(dcp.LoadPlan([item]), planner).wait()
            if target is not None and self.is_checked:
                checked(target, item.storage_index.fqn, file)
        except UserError:
            raise
        except Exception as error:  # a damaged file can raise nearly everything
            raise damaged(file, error) from error
        return planner


class _ReadPlanner(dcp.DefaultLoadPlanner):
    """Puts one tensor that is read into `target`, or bytes into `content`."""

    def __init__(self, target: Tensor | None = None):
        self.target = target

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.content = value

    def resolve_tensor(self, read_item: dcp.ReadItem) -> Tensor:
        assert self.target is not None
        return self.target


def load(sharded_state_dict: dict[str, Any], stored: TorchDistTensors) -> dict[str, Any]:
    """Load a checkpoint with names as stored into a sharded state dict; all ranks call it.
    `UserError` on all ranks: it is damaged, holds other tensors, or could run code.

    Objects, which only Transformer Engine has, are not read: those of `sharded_state_dict` stay.
    They are empty unless it computes in fp8, which is not supported.
    """
    wanted, _ = extract_matching_values(
        sharded_state_dict, lambda item: isinstance(item, (ShardedBase, LocalNonpersistentObject))
    )
    common_file, shapes = stored.folder / COMMON_FILE, stored.shapes()
    with failing_together():
        for item in nested_values(wanted):
            for tensor in sharded_tensors(item):
                found, shape = shapes.get(tensor.key), tuple(tensor.global_shape)
                if found is None or (found != shape and not tensor.allow_shape_mismatch):
                    raise UserError(
                        f"{stored.folder} does not fit this job, or is incomplete: of "
                        f"{tensor.key} it has {found}, wanted is {shape}. Use another checkpoint."
                    )
        common = read_objects(common_file, common_file, unread=())
    return merge(common, load_weights(stored, wanted))
