# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of files of tokens, in the place of `JsonLines`: Megatron's indexed datasets, and arrays
of NumPy.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, IndexedDataset

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.json_lines import JsonLines, Record

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
    ImportError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    AssertionError,
)


class TokenFiles(Sequence):
    """Records `{"text": tokens}` of files of tokens, one after the other.

    Args:
        paths: the files; with "mmap" without their endings .bin and .idx.
        data_impl: "mmap" or "packed_jsonl" (see `config/data_rules.py`).
        inspect: called once with every record; its results are kept in `notes`. To a `UserError`
            that it raises, the file and the number of the document are added.

    Attributes:
        paths, notes, counts, first_of_file: as in `JsonLines`.

    Raises:
        UserError: a file is missing, empty or of another form.
    """

    def __init__(
        self, paths: Sequence[str], data_impl: str, inspect: Callable[[Record], int]
    ) -> None:
        read = _read_indexed if data_impl == "mmap" else _read_array
        self.paths = [Path(path) for path in paths]
        self.files = [read(path) for path in self.paths]
        self.counts = [len(file) for file in self.files]
        self.first_of_file = np.cumsum([0, *self.counts[:-1]])
        notes = []
        for path, file in zip(self.paths, self.files, strict=True):
            if not len(file):
                raise UserError(f"data file {path} is empty.")
            for number in range(len(file)):
                try:
                    tokens = file[number]
                except _DAMAGED as error:
                    raise UserError(
                        f"{path}, document {number} cannot be read ({error}): the file is damaged "
                        "or incomplete; write it again."
                    ) from None
                try:
                    notes.append(inspect({"text": tokens}))
                except UserError as error:
                    raise UserError(f"{path}, document {number}: {error}") from None
        self.notes = np.array(notes, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.notes)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        number = int(np.searchsorted(self.first_of_file, index, side="right")) - 1
        return {"text": self.files[number][int(index - self.first_of_file[number])]}


def open_records(
    paths: Sequence[str], data_impl: str, inspect: Callable[[Record], int]
) -> JsonLines | TokenFiles:
    """The records of `paths` in the form `data_impl`; `inspect` checks their fields."""
    if data_impl.startswith("json"):
        return JsonLines(paths, [], inspect)
    return TokenFiles(paths, data_impl, inspect)


def _read_indexed(prefix: Path) -> IndexedDataset:
    for ending in (".idx", ".bin"):
        if not Path(f"{prefix}{ending}").is_file():
            raise UserError(
                f"data file {prefix}{ending} does not exist. With model.data.data_impl=mmap a "
                "path names <path>.bin and <path>.idx, without the ending."
            )
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
