# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of data files of any kind: each is read and checked once at start, a broken one is an
error with its file and row. What the check found is kept for the next start (`index_files.py`).
"""

import array
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.chat_records import EqualPairError
from nemo_aligner.data.nlp.columns import Columns, check_kind, missing
from nemo_aligner.data.nlp.data_files import DataFile, open_sources
from nemo_aligner.data.nlp.sources import Record, RecordSource

NO_FORM = (
    "A conversation needs a form, and the tokenizer has no chat template: set "
    "model.data.chat_template to the file of one, or model.data.chat=True. (SFT reads a file as "
    "its first line says: give texts and conversations in files of their own.)"
)
# What is kept of a record's check: a whole number, or that with one or two more.
Inspect = Callable[[Record], int | tuple[int, float] | tuple[int, float, int]]


class Records(Sequence):
    """Records of data files, one file after the other, read from disk on access.

    Args:
        paths: files and folders (`data_files.py`); an entry may have columns of its own.
        fields: texts that each record must have; with `allow_blank` they may be blank.
        inspect: called once with every record, in order; its results are kept in `notes`,
            `numbers` and `extra`. To a `UserError` of it the file and the row are added.
        data_cfg: `model.data`, or a section of it: `data_impl`, `columns`, `index_mapping_dir`.
        settings: gives a hash of all that `inspect` depends on (`settings_of`). None, or a
            function that returns it: nothing is kept for the next start.
        expand: makes the records of a row, at least one; None: a row is a record.

    Attributes:
        paths, counts, first_of_file: of each entry, how many records, number of the first.
        notes, numbers, extra: int64, float64, int64 [number of records], of `inspect`, else 0.
        starts: int64, numbers of the first records of the sources, of which an entry has some.
        rows: int64 [number of records], with `expand`: the rows of all files, counted.

    `UserError`: a file is missing, empty or damaged, or a record is broken; with file and row.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        fields: Sequence[str],
        inspect: Inspect,
        allow_blank: bool = False,
        *,
        data_cfg: Mapping[str, Any] | None = None,
        settings: Callable[[], str | None] | None = None,
        expand: Callable[[Record], list[Record]] | None = None,
    ) -> None:
        data_cfg = data_cfg or {}
        index_dir = data_cfg.get("index_mapping_dir")
        self.expand = expand
        entries = [DataFile.of(entry, "the list of data files") for entry in paths]
        self.paths = [Path(entry.path) for entry in entries]
        self.sources: list[RecordSource] = []
        self.columns: list[Columns] = []
        self.counts: list[int] = []
        found: list[index_files.Index] = []
        once = functools.cache(settings or (lambda: None))

        def check(record: Record) -> Iterator[tuple[float, ...]]:
            check_text(record, *fields, allow_blank=allow_blank)
            for each in [record] if expand is None else expand(record):
                result = inspect(each)
                yield result if isinstance(result, tuple) else (result,)

        def index_of(source: RecordSource, columns: Columns) -> index_files.Index:
            size = sum(file.stat().st_size for file in source.files)
            depends_on = once() if size > index_files.SMALL else None
            make = lambda: self._read(source, columns, check)
            if depends_on is None:
                return make()
            name = f"{source.path.name}-" + index_files.key(
                [index_files.file_fingerprint(file) for file in source.files],
                [list(fields), allow_blank, columns.fields],
                [depends_on, index_files.code_fingerprint()],
            )
            index = index_files.keep_index(source.path, index_dir, f"{name}.npy", make)
            source.offsets = index.offsets
            return index

        for entry, path in zip(entries, self.paths, strict=True):
            columns = data_cfg.get("columns") if entry.columns is None else entry.columns
            mapping = Columns(columns)
            sources = open_sources(path, data_cfg.get("data_impl") or "jsonl", index_dir)
            indices = [index_of(source, mapping) for source in sources]
            self.sources += sources
            self.columns += [mapping] * len(sources)
            self.counts.append(sum(len(index.notes) for index in indices))
            found += indices
        self.notes = _joined([index.notes for index in found])
        self.numbers = _joined([index.numbers for index in found])
        self.extra = _joined([index.extra for index in found])
        self.first_of_file = np.cumsum([0, *self.counts[:-1]])
        self._ends = np.cumsum([len(index.notes) for index in found])  # of the sources
        self.starts = np.array([0, *self._ends[:-1]])
        self.rows: np.ndarray | None = None
        if expand is not None:
            before = np.cumsum([0, *(index.rows[-1] + 1 for index in found)])
            self.rows = np.concatenate([i.rows + n for i, n in zip(found, before, strict=False)])

    def _read(
        self,
        source: RecordSource,
        columns: Columns,
        check: Callable[[Record], Iterator[tuple[float, ...]]],
    ) -> index_files.Index:
        before = _state(source)
        kinds: tuple[array.array[Any], ...] = tuple(map(array.array, "qdq"))
        rows, equal = array.array("q"), list[str]()
        for place, (number, row) in enumerate(source.scan()):
            try:
                for given in check(columns(row)):
                    for kept, value in zip(kinds, (*given, 0, 0), strict=False):
                        kept.append(value)
                    if self.expand is not None:
                        rows.append(place)
            except EqualPairError as error:
                equal.append(str(number))
                why = error
            except UserError as error:
                raise UserError(f"{source.path}, {source.unit} {number}: {error}") from None
        if equal:
            count = f" ({len(equal)} in all)" * (len(equal) > 1)
            where = f"{source.path}, {source.unit} {', '.join(equal[:9])}{count}"
            raise UserError(f"{where}: {why}")
        if not kinds[0]:
            raise UserError(f"data file {source.path} is empty.")
        if _state(source) != before:
            raise UserError(
                f"{source.path} has changed while it was read; start again once it is complete."
            )
        notes, numbers, extra = (np.frombuffer(kept, dtype=kept.typecode) for kept in kinds)
        of_rows = np.array(rows, dtype=np.int64)
        return index_files.Index(source.offsets, notes, numbers, extra, of_rows)

    def __len__(self) -> int:
        return len(self.notes)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        number, place = self._place(index)
        record = self.columns[number](self.sources[number][place])
        if self.rows is None or self.expand is None:
            return record
        return self.expand(record)[int(index - np.searchsorted(self.rows, self.rows[index]))]

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a record's source, and that of its row in there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, self.row_of(int(index), int(self._ends[number - 1]) if number else 0)

    def row_of(self, index: int, first: int) -> int:
        """How many rows after that of the record `first` the row of a record is."""
        return index - first if self.rows is None else int(self.rows[index] - self.rows[first])

    def where(self, index: int) -> str:
        number, place = self._place(index)
        source = self.sources[number]
        row, _ = next(itertools.islice(source.scan(), place, None))
        return f"{source.path}, {source.unit} {row}"

    def first_rows(self) -> Iterator[tuple[Path, Record, set[str]]]:
        """Of each entry with records: path, first record, columns that `columns` does not read."""
        for path, first, count in zip(self.paths, self.first_of_file, self.counts, strict=True):
            if count:
                number, place = self._place(int(first))
                row = self.sources[number][place]
                yield path, self[int(first)], set(row) - self.columns[number].sources


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """One array; a single one stays mapped into memory."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _state(source: RecordSource) -> list[tuple[int, int]]:
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]


def check_text(record: Record, *fields: str, allow_blank: bool = False) -> None:
    """Raise `UserError` unless a record has text in `fields`, by default not only blanks."""
    if any(field not in record for field in fields):
        talks = "messages" in record or "conversations" in record
        raise missing(fields, record, NO_FORM if talks else "")
    for field in fields:
        check_kind(record[field], str, f"field '{field}'")
        if not (allow_blank or record[field].strip()):
            raise UserError(f"field '{field}' is empty.")


def first_record(entry: Any, data_cfg: Mapping[str, Any] | None = None) -> Record:
    """The first record of a data file, read as `data_cfg` says; empty if none can be read."""
    file, data_cfg = DataFile.of(entry, "the list of data files"), data_cfg or {}
    try:
        source = open_sources(Path(file.path), "jsonl", data_cfg.get("index_mapping_dir"))[0]
        _number, row = next(source.scan(), (0, {}))
        return Columns(data_cfg.get("columns") if file.columns is None else file.columns)(row)
    except UserError:
        return {}


def settings_of(tokenizer: Tokenizer, *others: Any) -> str | None:
    """A hash of the tokenizer's state and of `others`; None if that state cannot be told."""
    state = index_files.tokenizer_fingerprint(tokenizer)
    return None if state is None else index_files.key(state, *others)
