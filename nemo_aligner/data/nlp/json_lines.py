# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of jsonl files, checked at start and read on access.

Every line is read once at start: a broken one is an error with its file and number, and only its
byte offset is kept.
"""

import array
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.core.errors import UserError

Record = dict[str, Any]


class JsonLines(Sequence):
    """Records of jsonl files, one after the other, read from disk on access.

    Blank lines do not count.

    Args:
        paths: the files.
        fields: strings that each record must have.
        inspect: called once with every record; its results are kept in `notes`. To a `UserError`
            that it raises, the file and the line are added.
        allow_blank: the strings of `fields` may be blank.

    Attributes:
        notes: int64 [number of records].
        counts: records per file.

    Raises:
        UserError: a file is missing or empty, or a line is broken; the message names the file and
            the line.
    """

    def __init__(
        self,
        paths: Sequence[str],
        fields: Sequence[str],
        inspect: Callable[[Record], int],
        allow_blank: bool = False,
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self.counts: list[int] = []
        offsets, notes = array.array("q"), array.array("q")
        for path in self.paths:
            if not path.is_file():
                raise UserError(
                    f"data file {path} does not "
                    f"exist{' (it is a folder)' if path.is_dir() else ''}."
                )
            before, offset = len(offsets), 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        record = _parse(line, fields, allow_blank, where)
                        offsets.append(offset)
                        try:
                            notes.append(inspect(record))
                        except UserError as error:
                            raise UserError(f"{where}: {error}") from None
                    offset += len(line)
            self.counts.append(len(offsets) - before)
            if len(offsets) == before:
                raise UserError(f"data file {path} is empty.")
        self.offsets = np.array(offsets, dtype=np.int64)
        self.notes = np.array(notes, dtype=np.int64)
        self.first_of_file = np.cumsum([0, *self.counts[:-1]])

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        file_number = int(np.searchsorted(self.first_of_file, index, side="right")) - 1
        # Opened anew each time: worker processes of a DataLoader would share the position in an
        # open file.
        with self.paths[file_number].open("rb") as file:
            file.seek(self.offsets[index])
            record: Record = json.loads(file.readline())
            return record


def _parse(line: bytes, fields: Sequence[str], allow_blank: bool, where: str) -> Record:
    """Parse one line to a record that has `fields`; `where` opens an error message."""
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(
            f"{where}: not valid JSON ({error}). Each line must be one JSON object."
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, not {type(record).__name__}.")
    for field in fields:
        try:
            check_text(record, field, allow_blank)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return record


def check_text(record: Record, field: str, allow_blank: bool = False) -> None:
    """Raise `UserError` unless a record has text in `field`, by default one that is not blank."""
    if field not in record:
        hint = ""
        if "messages" in record or "conversations" in record:
            hint = (
                " A conversation needs a form: set model.data.chat_template=tokenizer, or the "
                "file of a template, or model.data.chat=True for NeMo's chat format."
            )
        raise UserError(f"field '{field}' is missing; the line has {sorted(record)}.{hint}")
    if not isinstance(record[field], str):
        raise UserError(f"field '{field}' must be text, not {type(record[field]).__name__}.")
    if not (allow_blank or record[field].strip()):
        raise UserError(f"field '{field}' is empty.")
