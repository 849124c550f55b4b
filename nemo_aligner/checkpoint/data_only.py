# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints are read as data: no file of one can run code.

PyTorch reads the table of contents `.metadata`, and objects beside the tensors, with Python's
pickle, which calls what a file names. Here the table is first read by an unpickler that knows only
its classes; objects are read, as `common.pt` is, as by `torch.load(weights_only=True)`.
"""

import argparse
import dataclasses
import enum
import io
import pickle
import re
import types
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as older_metadata
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nemo_aligner.checkpoint.forms import BACKEND_FILE, METADATA_FILE, form_of_weights
from nemo_aligner.core.errors import UserError

# What is beside tensors: Megatron Core 0.16 reads the file; 0.19 an object, or the file if there.
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state"


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
    (_MEGATRON, "MCoreSavePlan"): SavePlan,
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
    files, file = files or FileSystem(), folder / BACKEND_FILE
    try:
        with files.create_stream(file, "rb") as stream:
            form_of_weights((), stream.read(), folder, formats=("torch_dist",))
        file = folder / METADATA_FILE
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
