# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints (torch_dist) of one process, for models that do not fit into memory.
Megatron Core reads and writes a whole state dict at once; here PyTorch's reader and writer get
plans of one part of one tensor. The format is the same.
"""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from nemo_aligner.checkpoint.checksums import ChecksummedFiles, Checksums, save_error
from nemo_aligner.checkpoint.data_only import COMMON_FILE, damaged, read_table
from nemo_aligner.checkpoint.stored_weights import Slice, checked
from nemo_aligner.core.errors import UserError


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor to be written."""

    key: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where the part lies
    size: tuple[int, ...]  # of the part
    dtype: torch.dtype  # of the tensor


def write(
    chunks: Sequence[Chunk],
    read: Callable[[Chunk], Tensor],
    folder: Path,
    common: Mapping[str, Any] | None = None,
    states: bool = False,
) -> Checksums:
    """Write a distributed checkpoint into the existing, empty `folder`; in one process. Returns
    the checksums of its large files, by name.

    Args:
        read: values of the shape `chunk.size`; called once for each chunk, in order.
        common: what to write beside the tensors.
        states: write the empty extra states that Megatron Core asks for in its own models.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
    files = writer.fs = ChecksummedFiles()
    try:
        dcp.save(
            {}, storage_writer=writer, planner=_WritePlanner(chunks, read, states), no_dist=True
        )
    except dcp.api.CheckpointException as error:
        if files.error is not None:
            raise save_error(folder, files.error) from error
        raise error.failures[0][0] from error  # what went wrong: a damaged source
    torch.save(dict(common or {}), folder / COMMON_FILE)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    return files.checksums


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


class _WritePlanner(dcp.DefaultSavePlanner):
    def __init__(self, chunks: Sequence[Chunk], read: Callable[[Chunk], Tensor], states: bool):
        super().__init__()
        self.chunks = {(chunk.key, chunk.offset): chunk for chunk in chunks}
        self.read = read
        names = [name for chunk in chunks for name in _extra_states(chunk)] if states else []
        self.states = [
            dcp.WriteItem(dcp.metadata.MetadataIndex(name), dcp.planner.WriteItemType.BYTE_IO)
            for name in names
        ]

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan([*map(_write_item, self.chunks.values()), *self.states])

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: dcp.WriteItem) -> Tensor | io.BytesIO:
        offset = write_item.index.offset
        if offset is None:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        return self.read(self.chunks[write_item.index.fqn, tuple(offset)])


def _extra_states(chunk: Chunk) -> list[str]:
    """Names of the extra states of a part of a weight."""
    module = chunk.key.removesuffix(".weight")
    if not module.rpartition(".")[2].startswith("linear_") or module == chunk.key:
        return []
    axes = len(chunk.shape) - 2
    numbers = (chunk.offset[:axes] or (0,), chunk.shape[:axes] or (1,))
    shard = "_".join(".".join(map(str, part)) for part in numbers)
    modules = [module]
    if module.endswith("self_attention.linear_proj"):  # Transformer Engine's has one
        modules.append(module.replace("linear_proj", "core_attention"))
    return [f"{name}._extra_state/shard_{shard}" for name in modules]


def _write_item(chunk: Chunk) -> dcp.WriteItem:
    offset = torch.Size(chunk.offset)
    return dcp.WriteItem(
        index=dcp.metadata.MetadataIndex(chunk.key, offset),
        type=dcp.planner.WriteItemType.SHARD,
        tensor_data=dcp.planner.TensorWriteData(
            chunk=dcp.ChunkStorageMetadata(offset, torch.Size(chunk.size)),
            properties=dcp.metadata.TensorProperties(dtype=chunk.dtype),
            size=torch.Size(chunk.shape),
        ),
    )


def _present_name(key: str, stored: Container[str]) -> str:
    """A model's name of `key`: the norm before experts was first stored under that of an MLP's."""
    stem, mlp_norm, kind = key.partition("mlp.linear_fc1.layer_norm_")
    if not mlp_norm or f"{stem}mlp.linear_fc1.weight" in stored:
        return key
    return f"{stem}pre_mlp_layernorm.{kind}"


class TorchDistTensors:
    """A `TensorSource` of a distributed checkpoint (torch_dist); `UserError`: it is damaged, or
    could run code. Its names have `prefix` for `model.`; `folder` is among `files` (None: this
    machine's).
    """

    def __init__(self, folder: Path, prefix: str = "model.", files: FileSystem | None = None):
        self.folder = folder
        self.reader = dcp.FileSystemReader(folder)
        if files is not None:
            self.reader.fs = files
        table = read_table(folder, self.reader.fs)
        self.reader.set_up_storage_reader(table, is_coordinator=True)
        entries = table.state_dict_metadata
        self.stored: dict[str, tuple[str, dcp.TensorStorageMetadata]] = {
            "model." + _present_name(key, entries).removeprefix(prefix): (key, entry)
            for key, entry in entries.items()
            if isinstance(entry, dcp.TensorStorageMetadata) and key.startswith(prefix)
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(entry.size) for key, (_name, entry) in self.stored.items()}

    def read(self, key: str, part: Slice) -> Tensor:
        name, entry = self.stored[key]
        spans = [
            range(axis, axis + 1) if isinstance(axis, int) else range(*axis.indices(size))
            for axis, size in zip(part, entry.size, strict=True)
        ]
        starts, sizes = [span.start for span in spans], [len(span) for span in spans]
        result = torch.empty(sizes, dtype=entry.properties.dtype)
        wanted = dcp.ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))
        for item in create_read_items_for_chunk_list(name, entry, [wanted]):
            self._read_item(item, result, starts)
        return result[tuple(0 if isinstance(axis, int) else slice(None) for axis in part)]

    def object(self, key: str) -> io.BytesIO:
        index, nothing = dcp.metadata.MetadataIndex(key), torch.Size()
        item = dcp.ReadItem(
            dcp.planner.LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing
        )
        return self._read_item(item, torch.empty(0), ()).content

    def _read_item(
        self, item: dcp.ReadItem, result: Tensor, offset: Sequence[int]
    ) -> "_ReadPlanner":
        file = self.folder
        try:
            stored_in = self.reader.storage_data[item.storage_index].relative_path
            file /= stored_in
            if file.parent != self.folder:
                raise UserError(f"{self.folder} names the file {stored_in}, outside of it.")
            planner = _ReadPlanner(result, offset, file)
            self.reader.read_data(dcp.LoadPlan([item]), planner).wait()
        except UserError:
            raise
        except Exception as error:  # a damaged file can raise nearly everything
            raise damaged(file, error) from error
        return planner


class _ReadPlanner(dcp.DefaultLoadPlanner):
    """Puts what is read of `file` into `result`, which begins at `offset`."""

    def __init__(self, result: Tensor, offset: Sequence[int], file: Path):
        self.result, self.offset, self.file = result, offset, file

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.content = value

    def resolve_tensor(self, read_item: dcp.ReadItem) -> Tensor:
        where = tuple(
            slice(start, start + length)
            for start, length in zip(read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.result[where]

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: Tensor) -> None:
        checked(tensor, read_item.storage_index.fqn, self.file)
