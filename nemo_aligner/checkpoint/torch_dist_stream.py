# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron Core's distributed checkpoints (torch_dist), and what else Python's pickle wrote,
as data and in parts: no file can run code, and a model need not fit into memory.

PyTorch reads the table of contents `.metadata`, and objects beside the tensors, with Python's
pickle, which calls what a file names. Here the table is first read by an unpickler that knows only
its classes; objects are read, as `common.pt` is, as by `torch.load(weights_only=True)`.
"""

import argparse
import contextlib
import dataclasses
import enum
import io
import math
import os
import pickle
import re
import tarfile
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from torch import Tensor
from torch.distributed._shard.sharded_tensor import metadata as older_metadata
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from nemo_aligner.checkpoint import forms
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.stored_weights import Slice, checked, load_weights, sharded_tensors
from nemo_aligner.core.errors import UserError

# --- as data ---


class _Path(PurePosixPath):
    """A path in a table."""


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 stores as a call of getattr."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise UserError(f"it asks for {name!r} of {kind!r}, which may run code; do not use this file")


def _classes(module: Any) -> dict[tuple[str, str], type]:
    """The dataclasses and enumerations of a module, which run nothing when they are made."""
    return {
        (module.__name__, name): found
        for name, found in vars(module).items()
        if isinstance(found, type)
        and found.__module__ == module.__name__
        and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    }


_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS = ("Path", "PosixPath", "PurePosixPath")
# All that a table may name. Megatron Core puts the savers' plans into it.
_NAMES: dict[tuple[str, str], Any] = {
    **_classes(metadata),
    **_classes(planner),
    **_classes(filesystem),
    **_classes(older_metadata),  # up to PyTorch 2.2
    # Megatron Core's up to 0.15, with one more field, about optimizers.
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): dcp.SavePlan,
    **{("torch", k): found for k, found in vars(torch).items() if isinstance(found, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _member,
    **{("pathlib", name): _Path for name in _PATHS},
    **{("pathlib._local", name): _Path for name in _PATHS},  # written by Python 3.13
}


# What files of Megatron hold beside tensors; objects of these modules stay unread.
_OBJECTS = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (argparse.Namespace, types.SimpleNamespace, io.BytesIO)
}
_INERT = ("megatron.", "numpy.", "transformer_engine.", "pathlib.", "signal.Signals")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise UserError(
                f"it names {module}.{name}, which no checkpoint needs and which may run code; do "
                "not use this file"
            )
        return _NAMES[module, name]


def read_metadata(stream: Any, path: Path) -> Metadata:
    """The table of contents of a checkpoint; `UserError`: it names something else."""
    try:
        found = _MetadataUnpickler(stream).load()
    except UserError as error:
        raise UserError(f"{path}: {error}.") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UserError(f"{path} is not the table of contents of a distributed checkpoint.")
    return found


def damaged(path: Path | str, error: Exception) -> UserError:
    """That `path` was not read, without PyTorch's advice to let it run code."""
    reason = str(error).partition("\n")[0]
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    elif named := re.search(r"GLOBAL ([\w.]+)", str(error)):
        reason = f"it names {named[1]}"
    elif isinstance(error, pickle.UnpicklingError) or not str(error):
        reason = f"no plain data: {type(error).__name__}"
    return UserError(f"{path} is damaged or incomplete ({reason}); copy it again.")


def read_table(folder: Path, files: FileSystem | None = None) -> Metadata:
    """The table of contents in `folder`, among `files` (None: of this machine); `UserError`: it is
    damaged, names something else, or is of another format.
    """
    files, file = files or FileSystem(), folder / forms.BACKEND_FILE
    try:
        with files.create_stream(file, "rb") as stream:
            forms.form_of_weights((), stream.read(), folder, formats=("torch_dist",))
        file = folder / forms.METADATA_FILE
        with files.create_stream(file, "rb") as stream:
            return read_metadata(stream, file)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly everything
        raise damaged(file, error) from error


class _Inert:
    """Stands for an object of Megatron or numpy, whose class is not imported."""

    def __init__(self, *_args: Any):
        pass

    def __setstate__(self, _state: Any) -> None:
        """Take nothing over."""


def read_objects(
    file: Path | io.BytesIO,
    what: Path | str,
    mmap: bool = False,
    classes: Sequence[Any] = (),
    unread: tuple[str, ...] = _INERT,
) -> Any:
    """What `torch.save` wrote: tensors (in the file until used if `mmap`), plain values, arguments
    of Megatron and objects of `classes`, without objects of modules `unread`; `UserError`: the
    file `what` is damaged, or names what is no data.
    """
    content = file.getvalue() if isinstance(file, io.BytesIO) else None

    def opened() -> Any:
        return file if content is None else io.BytesIO(content)

    own = {f"{kind.__module__}.{kind.__name__}": kind for kind in classes}
    known = _OBJECTS | own
    try:
        names = [*known]  # of a file before PyTorch 1.6
        if content is not None or zipfile.is_zipfile(file):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(opened())
        unknown = [n for n in names if n not in known and not n.startswith(unread)]
        if unknown:
            raise UserError(
                f"{what} names {unknown[0]}, which no checkpoint needs and which may run code; do "
                "not use this file."
            )
        # Only what is not allowed yet: the context takes away at its end what it added.
        allowed: list[Any] = [(known.get(name, _Inert), name) for name in {*names, *own}]
        with torch.serialization.safe_globals(allowed):
            found = torch.load(opened(), map_location="cpu", weights_only=True, mmap=mmap)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly everything
        raise damaged(what, error) from error
    # Megatron Core wraps some objects once more.
    return read_objects(found, what) if isinstance(found, io.BytesIO) else found


# --- in parts ---


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


class TorchDistTensors:
    """A `TensorSource` of a distributed checkpoint (torch_dist); `UserError`: it is damaged, or
    could run code. Its names have `prefix` for `model.`, or with None are as stored, and their
    values are not `checked`; `folder` is among `files` (None: this machine's).
    """

    def __init__(
        self, folder: Path, prefix: str | None = "model.", files: FileSystem | None = None
    ):
        self.folder, self.is_checked = folder, prefix is not None
        self.files = files or FileSystem()
        table = read_table(folder, self.files)
        self.places, entries = table.storage_data, table.state_dict_metadata
        # Name -> stored name, and where its parts lie.
        self.stored: dict[str, tuple[str, dcp.TensorStorageMetadata]] = {}
        for key, entry in entries.items():
            if isinstance(entry, dcp.TensorStorageMetadata) and key.startswith(prefix or ""):
                name = key if prefix is None else f"model.{key.removeprefix(prefix)}"
                # The norm before experts was first stored under the name of an MLP's.
                stem, mlp_norm, _kind = key.partition("mlp.linear_fc1.layer_norm_")
                if mlp_norm and f"{stem}mlp.linear_fc1.weight" not in entries:
                    name = name.replace(mlp_norm, "pre_mlp_layernorm.")
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
            with self._opened(item.storage_index) as (file, view):
                stored = torch.load(view, map_location="cpu", weights_only=True)
                values = stored[_block(item.storage_offsets, item.lengths)]
                target = result[_block(item.dest_offsets, item.lengths)]
                if target.shape != values.shape:
                    raise ValueError(f"{name} has a part of shape {tuple(stored.shape)}")
                target.copy_(values)
                if self.is_checked:
                    checked(target, name, file)
            found += math.prod(item.lengths)
        if found != result.numel():
            raise UserError(
                f"{self.folder} is incomplete: of {name} it has {found} of {result.numel()} "
                "values. Copy it again, or use another checkpoint."
            )
        return result[tuple(0 if isinstance(axis, int) else slice(None) for axis in part)]

    def object(self, key: str) -> io.BytesIO:
        with self._opened(metadata.MetadataIndex(key)) as (_file, view):
            return io.BytesIO(view.read())

    @contextlib.contextmanager
    def _opened(self, index: metadata.MetadataIndex) -> Iterator[tuple[Path, Any]]:
        """The file of a part of a tensor or an object, and what it holds of it."""
        file = self.folder
        try:
            place = self.places[index]
            file /= place.relative_path
            if file.parent != self.folder:
                raise UserError(
                    f"{self.folder} names the file {place.relative_path}, outside of it."
                )
            with self.files.create_stream(file, "rb") as stream:
                yield file, _create_file_view(stream, place.offset, place.length)
        except UserError:
            raise
        except Exception as error:  # a damaged file can raise nearly everything
            raise damaged(file, error) from error


def _block(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))


def load(sharded_state_dict: dict[str, Any], stored: TorchDistTensors) -> dict[str, Any]:
    """Load a checkpoint with names as stored into a sharded state dict; all ranks call it.
    `UserError` on all ranks: it is damaged, holds other tensors, or could run code.

    Objects, which only Transformer Engine has, are not read: those of `sharded_state_dict` stay.
    They are empty unless it computes in fp8, which is not supported.
    """
    wanted, _ = dict_utils.extract_matching_values(
        sharded_state_dict, lambda item: isinstance(item, (ShardedBase, LocalNonpersistentObject))
    )
    common_file, shapes = stored.folder / forms.COMMON_FILE, stored.shapes()
    with failing_together():
        for item in dict_utils.nested_values(wanted):
            for tensor in sharded_tensors(item):
                found, shape = shapes.get(tensor.key), tuple(tensor.global_shape)
                if found is None or (found != shape and not tensor.allow_shape_mismatch):
                    raise UserError(
                        f"{stored.folder} does not fit this job, or is incomplete: of "
                        f"{tensor.key} it has {found}, wanted is {shape}. Use another checkpoint."
                    )
        common = read_objects(common_file, common_file, unread=())
    return dict_utils.merge(common, load_weights(stored, wanted))
