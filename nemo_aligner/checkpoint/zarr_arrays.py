# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints in the format zarr, which Megatron Core wrote before torch_dist.

Each tensor is a folder with `.zarray`, a JSON text (version 2 of zarr), and one file of plain
numbers per chunk: Megatron Core never compressed them, so NumPy reads them.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.checkpoint.forms import refusal
from nemo_aligner.checkpoint.stored_weights import Slice, checked
from nemo_aligner.core.errors import UserError

ARRAY_FILE = ".zarray"
# NumPy has no bfloat16: writers used one of these names for it.
BFLOAT16 = ("bfloat16", "<V2", "|V2", "V2")


class ZarrArrays:
    """A `TensorSource` of the arrays in `folder`, of the `.nemo` at `path`.

    Raises:
        UserError: an array is compressed, of an unknown type, or its file is damaged.
    """

    def __init__(self, folder: Path, path: Path):
        self.folder, self.path = folder, path
        self.arrays = {
            child.name: self._described(child)
            for child in sorted(folder.iterdir())
            if (child / ARRAY_FILE).is_file()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(array["shape"]) for key, array in self.arrays.items()}

    def read(self, key: str, part: Slice) -> Tensor:
        array = self.arrays[key]
        spans = [range(p, p + 1) if isinstance(p, int) else range(p.start, p.stop) for p in part]
        bfloat16 = array["dtype"] in BFLOAT16
        result = np.empty([len(span) for span in spans], self._number(array["dtype"]))
        chunk_shape = array["chunks"]
        touched = [
            range(span.start // size, -(-span.stop // size))
            for span, size in zip(spans, chunk_shape, strict=True)
        ]
        for index in itertools.product(*touched):
            chunk = self._chunk(key, index)
            begins = [i * size for i, size in zip(index, chunk_shape, strict=True)]
            overlaps = [
                range(max(span.start, begin), min(span.stop, begin + size))
                for span, begin, size in zip(spans, begins, chunk_shape, strict=True)
            ]
            target = tuple(
                slice(o.start - span.start, o.stop - span.start)
                for o, span in zip(overlaps, spans, strict=True)
            )
            source = tuple(
                slice(o.start - begin, o.stop - begin)
                for o, begin in zip(overlaps, begins, strict=True)
            )
            result[target] = chunk[source]
        tensor = torch.from_numpy(result)
        if bfloat16:
            tensor = tensor.view(torch.bfloat16)
        checked(tensor, key, self.path)
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
        """The type of the numbers in a file; bfloat16 is read as plain 16 bits."""
        return np.dtype(np.int16 if dtype in BFLOAT16 else dtype)

    def _described(self, array: Path) -> dict:
        try:
            found = json.loads((array / ARRAY_FILE).read_text())
            self._number(found["dtype"])
            readable = len(found["shape"]) == len(found["chunks"]) and found["order"] == "C"
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path}: {array.name}/{ARRAY_FILE} cannot be read ({error}); copy it again."
            ) from error
        if found.get("compressor") is not None or found.get("filters") or not readable:
            raise refusal("compressed_zarr", self.path, f"{array.name}/{ARRAY_FILE}")
        return found
