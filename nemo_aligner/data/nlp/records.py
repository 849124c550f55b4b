# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of data files of any kind: each is read and checked once at start, a broken one is an
error with its file and row. What the check found is kept for the next start (`index_files.py`).
`model.data.columns` says which columns of a file hold the fields that a job reads.
"""

import functools
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.data_rules import line_ends, plain_columns
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.sources import DataFile, Record, RecordSource, open_sources
from nemo_aligner.servers.worker import ALL_COLUMNS

NO_FORM = (
    "A conversation needs a form, and the tokenizer has no chat template: set "
    "model.data.chat_template to the file of one, or model.data.chat=True. (SFT reads a file as "
    "its first line says: give texts and conversations in files of their own.)"
)
# What is kept of a record's check: a whole number, or that with one or two more.
Inspect = Callable[[Record], int | tuple[int, float] | tuple[int, float, int]]
# Of each record: the place and the number of its row in its source, and what `Inspect` gave.
FOUND = np.dtype(
    [("at", "<i8"), ("row", "<i4"), ("note", "<i4"), ("number", "<f8"), ("extra", "<i8")]
)
_PACK = struct.Struct("<qiidq").pack


class EqualPairError(UserError):
    def __init__(self, how: str = "are equal") -> None:
        super().__init__(f"'chosen' and 'rejected' {how}, so there is nothing to prefer.")


class Records(Sequence):
    """Records of data files, one file after the other, read from disk on access.

    Args:
        paths: files and folders (`sources.py`), or sources; an entry may have its own columns.
        fields: texts that each record must have; with `allow_blank` they may be blank.
        inspect: called once with every record, in order; its results are kept in `notes`,
            `numbers` and `extra`. To a `UserError` of it the file and the row are added.
        data_cfg: `model.data`, or a section of it: `data_impl`, `columns`, `index_mapping_dir`.
        settings: gives a hash of all that `inspect` depends on (`settings_of`). None, or a
            function that returns it: nothing is kept for the next start.
        expand: makes the records of a row, at least one; None: a row is a record.

    Attributes:
        paths, counts, first_of_file: of each entry, how many records, number of the first.
        notes, numbers, extra: int32, float64, int64 [number of records], of `inspect`, else 0.
        starts: int64, numbers of the first records of the sources, of which an entry has some.

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
        data_cfg, self.expand = data_cfg or {}, expand
        self.paths: list[Path] = []
        self.sources: list[RecordSource] = []
        self.columns: list[Columns] = []
        self.counts: list[int] = []
        found: list[np.ndarray] = []
        once = functools.cache(settings or (lambda: None))

        def check(record: Record) -> Iterator[tuple[float, ...]]:
            check_text(record, *fields, allow_blank=allow_blank)
            for each in [record] if expand is None else expand(record):
                result = inspect(each)
                yield result if isinstance(result, tuple) else (result,)

        def read(source: RecordSource, columns: Columns) -> np.ndarray:
            size = sum(file.stat().st_size for file in source.files)
            depends_on = once() if size > index_files.SMALL else None
            if depends_on is None:
                return _read(source, columns, check)
            name = f"{source.path.name}-" + index_files.key(
                [index_files.file_fingerprint(file) for file in source.files],
                [list(fields), allow_blank, columns.fields],
                [depends_on, index_files.code_fingerprint()],
            )
            make = lambda: _read(source, columns, check)
            folder = data_cfg.get("index_mapping_dir")
            return index_files.keep_array(source.path, folder, f"{name}.npy", FOUND, make)

        for entry in paths:
            path, sources, columns = _open(entry, data_cfg, data_cfg.get("data_impl") or "jsonl")
            arrays = [read(source, columns) for source in sources]
            self.paths.append(path)
            self.sources += sources
            self.columns += [columns] * len(sources)
            self.counts.append(sum(map(len, arrays)))
            found += arrays
        # A single array stays mapped into memory.
        self._found = found[0] if len(found) == 1 else np.concatenate(found)
        names = ("note", "number", "extra")
        self.notes, self.numbers, self.extra = (self._found[name] for name in names)
        self.first_of_file = np.cumsum([0, *self.counts[:-1]])
        self._ends = np.cumsum([len(array) for array in found])  # of the sources
        self.starts = np.array([0, *self._ends[:-1]])

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        number, at = self._place(index)
        record = self.columns[number](self.sources[number][at])
        if self.expand is None:
            return record
        first, places = index, self._found["at"]
        while first > self.starts[number] and places[first - 1] == at:
            first -= 1
        return self.expand(record)[index - first]

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a record's source, and the place of its row in there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, int(self._found["at"][index])

    def row_of(self, index: int, first: int) -> int:
        """How many rows after that of the record `first` the row of a record is."""
        if self.expand is None:
            return index - first
        begins = np.diff(self._found["at"][first : index + 1]) != 0
        begins[self.starts[(self.starts > first) & (self.starts <= index)] - first - 1] = True
        return int(begins.sum())

    def where(self, index: int) -> str:
        source = self.sources[self._place(index)[0]]
        return f"{source.path}, {source.unit} {self._found['row'][index]}"

    def first_rows(self) -> Iterator[tuple[Path, Record, set[str]]]:
        """Of each entry: path, first record, columns that `columns` does not read."""
        for path, first in zip(self.paths, map(int, self.first_of_file), strict=True):
            number, at = self._place(first)
            row = self.sources[number][at]
            yield path, self[first], set(row) - self.columns[number].sources


def _open(
    entry: Any, data_cfg: Mapping[str, Any], data_impl: str
) -> tuple[Path, list[RecordSource], "Columns"]:
    """The path, the sources and the columns of an entry of a list of data files."""
    columns = data_cfg.get("columns")
    if isinstance(entry, RecordSource):
        return entry.path, [entry], Columns(columns)
    file = DataFile.of(entry, "the list of data files")
    mapping = Columns(columns if file.columns is None else file.columns)
    path = Path(file.path)
    return path, open_sources(path, data_impl, data_cfg.get("index_mapping_dir")), mapping


def _read(
    source: RecordSource,
    columns: "Columns",
    check: Callable[[Record], Iterator[tuple[float, ...]]],
) -> np.ndarray:
    """What a check finds of all records of a source, `FOUND`."""
    state = lambda: [(file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
    before = state()
    found, equal = bytearray(), list[str]()
    for at, number, row in source.scan():
        try:
            for given in check(columns(row)):
                found += _PACK(at, number, *(*given, 0, 0)[:3])
        except EqualPairError as error:
            equal.append(str(number))
            why = error
        except UserError as error:
            raise UserError(f"{source.path}, {source.unit} {number}: {error}") from None
    if equal:
        count = f" ({len(equal)} in all)" * (len(equal) > 1)
        where = f"{source.path}, {source.unit} {', '.join(equal[:9])}{count}"
        raise UserError(f"{where}: {why}")
    if not found:
        raise UserError(f"data file {source.path} is empty.")
    if state() != before:
        raise UserError(
            f"{source.path} has changed while it was read; start again once it is complete."
        )
    return np.frombuffer(found, dtype=FOUND)


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
    try:
        _path, sources, columns = _open(entry, data_cfg or {}, "jsonl")
        return columns(next(sources[0].scan())[2])
    except (UserError, StopIteration):
        return {}


def settings_of(tokenizer: Tokenizer, *others: Any) -> str | None:
    """A hash of the tokenizer's state and of `others`; None if that state cannot be told."""
    state = index_files.tokenizer_fingerprint(tokenizer)
    return None if state is None else index_files.key(state, *others)


# --- columns ---

_IN_BRACES = re.compile(r"\{([^{}]+)\}")
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_RESPONSES = ("completion", "response", "output", "answer", "solution")
CONTINUE_PROMPT = {"chosen", "rejected", "response", "preference"}
# field -> usual names of its column in other layouts
OTHER_NAMES = {
    **dict.fromkeys(("prompt", "input"), _PROMPTS),
    **dict.fromkeys(("response", "output"), _RESPONSES),
    "preference": ("label",),
    "label": ("labels", "preference_strength"),
}
# Fields with the prompt, and arguments that a reward function has anyway.
NOT_COLUMNS = ("text", "prompt", "messages", "prompts", "responses", "lengths")


class Columns:
    """Makes records from the rows of a file; `sources` are the columns that are read, the
    outermost of nested ones.

    Args:
        fields: `model.data.columns` (docs/data.md), from the name of a field to where its value
            is; None or empty: rows are records as they are. `ConfigError`: another form.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self.fields = plain_columns(fields)
        self.sources: set[str] = set()
        for given in self.fields.values():
            for form in [given] if isinstance(given, str) else given:
                inner = [name.rpartition("?")[2] for name in _IN_BRACES.findall(form)] or [form]
                self.sources |= {*inner, *(column.split(".")[0] for column in inner)}

    def __call__(self, row: Record) -> Record:
        """`row` with the fields; its other columns stay. `UserError`: one cannot be made."""
        if not self.fields:
            return row
        return row | {name: self._value(name, form, row) for name, form in self.fields.items()}

    def _value(self, name: str, form: str | list[str], row: Record) -> Any:
        if isinstance(form, list):
            return [self._value(name, part, row) for part in form]
        if not _IN_BRACES.search(form):
            return self._column(name, form, row)

        def text(match: re.Match[str]) -> str:
            before, optional, column = match[1].rpartition("?")
            try:
                value = self._column(name, column, row)
            except UserError:
                if not optional:
                    raise
                value = None
            if optional and (value is None or isinstance(value, str) and not value.strip()):
                return ""
            check_kind(value, str, f"column '{column}' (columns.{name})")
            return before + value

        return _IN_BRACES.sub(text, line_ends(form))

    def _column(self, name: str, column: str, row: Record) -> Any:
        if column in row:
            return row[column]
        value: Any = row
        for key in column.split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise UserError(
                    f"there is no column '{column}' (columns.{name}); there are {sorted(row)}."
                )
        return value


def other_name(field: str, names: Iterable[str]) -> str | None:
    names = set(names)
    return next((name for name in OTHER_NAMES.get(field, ()) if name in names), None)


def prompt_hint(field: str, record: Record, names: Iterable[str], is_empty: bool = True) -> str:
    """How to read the one of the columns `names` that looks like the prompt, in `field`; empty:
    none does, or the record has a prompt that Alpaca's instruction is not left out of.
    """
    like = other_name(field, names)
    given = map(record.get, (field, "text", "messages", "conversations"))
    prompt = "".join(str(value) for value in given if value is not None).strip()
    if prompt and not is_empty and (like != "instruction" or str(record[like]) in prompt):
        return ""
    form = f"'{{{like}}}{{\\n\\n?{field}}}'" if field in record else like
    column = f'model.data.columns="{{{field}: {form}}}"'
    return f" '{like}' looks like the prompt: {column} reads it." if like else ""


def missing(fields: Sequence[str], record: Record, more: str = "") -> UserError:
    """The error of a record without some of `fields`, with the columns that look like them."""
    absent = [field for field in fields if record.get(field) is None]
    what = f"field{'s' * (len(absent) > 1)} {' and '.join(map(repr, absent))}"
    what += f" {'are' if len(absent) > 1 else 'is'} missing; the line has {sorted(record)}."
    also = CONTINUE_PROMPT.intersection(absent) and {"prompt"}.difference(record)
    likely = {field: other_name(field, record) for field in (*also, *absent)}
    columns = ", ".join(f"{field}: {name}" for field, name in likely.items() if name)
    line = f'model.data.columns="{{{columns}}}" reads what looks like them.' if columns else ""
    return UserError(" ".join(filter(None, (what, more, line))))


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number (of float32)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def check_kind(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        needed = "text" if kind is str else "an object"
        found = "null" if value is None else type(value).__name__
        raise UserError(f"{what} must be {needed}, not {found}.")


def columns_asked(record: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    """The columns of a prompt's record that a function asks for (`RewardFunction.columns`)."""
    columns: dict[str, Any] = {}
    for name in asked:
        if name == ALL_COLUMNS:
            columns |= {n: record[n] for n in record if n not in (*asked, *NOT_COLUMNS)}
        elif name in record:
            columns[name] = record[name]
        else:
            raise UserError(
                f"there is no column '{name}', which the reward function asks for, but "
                f"{sorted(record)}: add it, or name another one in model.data.columns."
            )
    return columns
