# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of tokens as sources of records: Megatron's indexed datasets, and arrays of NumPy."""

import pickle
import struct
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.json_lines import Record

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

# What a pickled array of arrays of numbers is made of, by module (of NumPy 1 and 2) and name.
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ARRAY_MODULES = ("numpy", *_MULTIARRAY)
_ARRAY_NAMES = ("_reconstruct", "ndarray", "dtype", "scalar")
# What reading a file that is damaged or of another form raises.
_DAMAGED = (
    ValueError,
    TypeError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
    tokenize.TokenError,  # numpy reads a header with it, from Python 3.12 on
    ImportError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    AssertionError,
)


class TokenFile:
    """A `RecordSource` of records `{"text": tokens}`.

    Args:
        path: the file; with "mmap" without its endings .bin and .idx.
        data_impl: "mmap" or "packed_jsonl" (see `config/data_rules.py`).
    """

    unit = "document"

    def __init__(self, path: Path, data_impl: str) -> None:
        indexed = data_impl == "mmap"
        self.path = path
        self.documents = (_read_indexed if indexed else _read_array)(path)
        self.files = [Path(f"{path}.idx"), Path(f"{path}.bin")] if indexed else [path]
        self.offsets = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> Record:
        return {"text": self.documents[number]}

    def scan(self) -> Iterator[tuple[int, Record]]:
        """All documents in order, numbered from 0."""
        for number in range(len(self)):
            try:
                tokens = self.documents[number]
            except _DAMAGED as error:
                raise UserError(
                    f"{self.path}, document {number} cannot be read ({error}): the file is "
                    "damaged or incomplete; write it again."
                ) from None
            yield number, {"text": tokens}


def _read_indexed(prefix: Path) -> "IndexedDataset":
    for ending in (".idx", ".bin"):
        if not Path(f"{prefix}{ending}").is_file():
            raise UserError(
                f"data file {prefix}{ending} does not exist. With model.data.data_impl=mmap a "
                "path names <path>.bin and <path>.idx, without the ending."
            )
    from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, IndexedDataset

    with Path(f"{prefix}.idx").open("rb") as file:
        if file.read(len(_INDEX_HEADER)) != _INDEX_HEADER:
            raise UserError(f"{prefix}.idx is not the index of an indexed dataset.")
    try:
        return IndexedDataset(str(prefix))
    except _DAMAGED as error:
        raise UserError(
            f"{prefix}.idx is damaged or incomplete ({error!r}); write it and the .bin again."
        ) from None


class _ArrayUnpickler(pickle.Unpickler):
    """Loads arrays of numbers only: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _ARRAY_MODULES and name in _ARRAY_NAMES:
            if module in _MULTIARRAY:  # the file may be of another version than this NumPy
                module = np.empty(0).__reduce__()[0].__module__
            return super().find_class(module, name)
        raise UserError(f"it holds {module}.{name}, but only arrays of numbers are loaded")


def _read_array(path: Path) -> list[np.ndarray]:
    if not path.is_file():
        raise UserError(f"data file {path} does not exist.")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            if header(file)[2].hasobject:
                array = _ArrayUnpickler(file).load()
            else:
                file.seek(0)
                array = np.load(file, allow_pickle=False)
        samples = [np.asarray(sample) for sample in array]
    except (UserError, *_DAMAGED) as error:
        raise UserError(
            f"{path} is not a .npy file of tokens, or is damaged: {error}. Write it again with "
            "numpy.save."
        ) from None
    for number, sample in enumerate(samples):
        if sample.ndim != 1 or not np.issubdtype(sample.dtype, np.integer):
            raise UserError(
                f"{path}, document {number}: {sample.dtype} of shape {sample.shape}, but the "
                "tokens of a text are whole numbers in one dimension. Packed sequences of DPO or "
                "SFT cannot be read here."
            )
    return samples
