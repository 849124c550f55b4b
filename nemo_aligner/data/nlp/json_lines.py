# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One jsonl file as a source of records, read from disk on access; and what a source is.

The sources of other kinds of files are in `arrow_files.py` and `token_files.py`; `data_files.py`
chooses among them, and `records.py` checks and joins them.
"""

import array
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from nemo_aligner.core.errors import UserError

Record = dict[str, Any]


class RecordSource(Protocol):
    """The rows of one data file, or of one saved dataset.

    Attributes:
        path: of the file or folder that the user gave; for messages.
        unit: what messages call a row: "line", "row" or "document".
        files: whose content decides what the rows are.
        offsets: int64, what a later start needs to find the rows without `scan`; may be empty.
    """

    path: Path
    unit: str
    files: list[Path]
    offsets: np.ndarray

    def __len__(self) -> int:
        """Number of rows; known after `scan`, or once `offsets` are set."""

    def __getitem__(self, number: int) -> Record:
        """One row, read from disk."""

    def scan(self) -> Iterator[tuple[int, Record]]:
        """All rows in order, each with its number in the file as messages give it."""


class JsonLinesFile:
    """A `RecordSource` over a file with one JSON object per line. Blank lines do not count.

    Args:
        path: the file, for messages.
        content: the text: a file (of a compressed one the unpacked copy), or bytes.
    """

    unit = "line"

    def __init__(self, path: Path, content: Path | bytes) -> None:
        self.path = path
        self.content = content
        self.files = [path]
        self.offsets = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, number: int) -> Record:
        # Opened anew each time: worker processes of a DataLoader would share the position in an
        # open file.
        with self._open() as file:
            file.seek(self.offsets[number])
            record: Record = json.loads(file.readline())
            return record

    def scan(self) -> Iterator[tuple[int, Record]]:
        """All records in order; only their byte offsets are kept.

        Raises:
            UserError: a line is not a JSON object; names the file and the line.
        """
        offsets, offset = array.array("q"), 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    offsets.append(offset)
                    yield number, _parse(line, f"{self.path}, line {number}")
                offset += len(line)
        self.offsets = np.frombuffer(offsets, dtype=np.int64)

    def _open(self) -> BinaryIO:
        if isinstance(self.content, bytes):
            return io.BytesIO(self.content)
        return self.content.open("rb")


def _parse(line: bytes, where: str) -> Record:
    """One line as an object; `where` opens an error message."""
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(
            f"{where}: not valid JSON ({error}). Each line must be one JSON object."
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, not {type(record).__name__}.")
    return record
