# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints are read as data: no file of one can run code.

PyTorch reads two of their members with Python's pickle, which calls whatever a file names: the
table of contents `.metadata`, and objects beside the tensors. Here the first is read by an
unpickler that knows the classes of such tables and nothing else, before PyTorch reads it; the
second as `torch.load(weights_only=True)` reads them. `common.pt` is read so by Megatron Core.
"""

import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _metadata_fn as METADATA_FILE
from torch.distributed.checkpoint.metadata import Metadata

from nemo_aligner.core.errors import UserError

# What a table of contents may name beside the classes of `torch_metadata` and the dtypes.
_NAMES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),  # written by Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            module = "pathlib"
        known = name in _NAMES.get(module, ())
        if module == torch_metadata.__name__:
            found = vars(torch_metadata).get(name)
            known = isinstance(found, type) and found.__module__ == module
        elif module == "torch" and not known:
            known = isinstance(vars(torch).get(name), torch.dtype)
        if not known:
            raise UserError(
                f"it names {module}.{name}, which no checkpoint needs and which may run code; do "
                "not use this file"
            )
        return super().find_class(module, name)


def read_metadata(stream: Any, path: Path) -> Metadata:
    """The table of contents of a distributed checkpoint.

    Args:
        stream: of the file, open for reading bytes.
        path: of the file, for the message.

    Raises:
        UserError: the file is damaged, or names what is not part of such a table.
    """
    try:
        found = _MetadataUnpickler(stream).load()
    except UserError as error:
        raise UserError(f"{path}: {error}.") from None
    except Exception as error:  # a damaged pickle can raise nearly everything
        raise UserError(f"{path} is damaged or incomplete ({error}); copy it again.") from error
    if not isinstance(found, Metadata):
        raise UserError(f"{path} is not the table of contents of a distributed checkpoint.")
    return found


def check_metadata(folder: str | Path) -> None:
    """Check the table of contents of the distributed checkpoint in `folder`, which PyTorch will
    read with pickle.

    Raises:
        UserError: as `read_metadata`, or there is none.
    """
    path = Path(folder) / METADATA_FILE
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(
            f"{folder} is damaged or incomplete ({error.strerror}: {path.name}); copy it again."
        ) from error
    _check_file(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _check_file(path: Path, _modified_ns: int, _size: int) -> None:
    with path.open("rb") as stream:
        read_metadata(stream, path)


@contextmanager
def objects_as_data(folder: str | Path) -> Iterator[None]:
    """Let PyTorch load objects beside tensors only where `torch.load(weights_only=True)` does.

    Raises:
        UserError: an object names something that is no data.
    """
    own: Callable[..., None] = DefaultLoadPlanner.load_bytes

    def load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        try:
            # Megatron Core wraps some objects once more.
            with torch.serialization.safe_globals([io.BytesIO]):
                torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{folder}: the object {read_item.storage_index.fqn} is more than data and may "
                f"run code ({str(error).splitlines()[0]}); do not use this file."
            ) from error
        value.seek(0)
        own(self, read_item, value)

    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
    try:
        yield
    finally:
        DefaultLoadPlanner.load_bytes = own  # type: ignore[method-assign]
