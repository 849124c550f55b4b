# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of data files of any kind: each is read and checked once at start, a broken one is an
error with its file and row. What the check found is kept for the next start (`index_files.py`).
Below: from a path in the configuration to the sources of its records (docs/data.md).
"""

import functools
import glob
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.fields import (
    Columns,
    EqualPairError,
    Record,
    RecordSource,
    check_text,
)

# What is kept of a record's check: a whole number, or that with one or two more.
Inspect = Callable[[Record], int | tuple[int, float] | tuple[int, float, int]]
# Of each record: the place and the number of its row in its source, and what `Inspect` gave.
FOUND = np.dtype(
    [("at", "<i8"), ("row", "<i4"), ("note", "<i4"), ("number", "<f8"), ("extra", "<i8")]
)
_PACK = struct.Struct("<qiidq").pack


class Records(Sequence):
    """Records of data files, one file after the other, read from disk on access.

    Args:
        paths: files and folders (`open_sources`), or sources; an entry may have its own columns.
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
        record, columns = self.sources[number][at], self.columns[number]
        record = columns(record) if columns.fields else record
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
) -> tuple[Path, list[RecordSource], Columns]:
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
    columns: Columns,
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


class JsonLinesFile(RecordSource):
    """One JSON object per line, but for blank lines; a compressed file is read unpacked."""

    unit = "line"

    def __init__(self, path: Path, content: Path | bytes) -> None:
        super().__init__(path, [path])
        self.content = content

    def __getitem__(self, at: int) -> Record:
        # Opened anew each time: worker processes would share the position in an open file.
        with self._open() as file:
            file.seek(at)
            record: Record = json.loads(file.readline())
            return record

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        offset = 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield offset, number, _parse(line, f"{self.path}, line {number}")
                offset += len(line)

    def _open(self) -> BinaryIO:
        if isinstance(self.content, bytes):
            return io.BytesIO(self.content)
        return self.content.open("rb")


class GivenRecords(RecordSource):
    """The records of a sequence, in the place of a file."""

    unit = "record"

    def __init__(self, data: Sequence[Any], name: str) -> None:
        super().__init__(Path(f"{name} data"), [])
        self.rows = data

    def __getitem__(self, at: int) -> Record:
        record = self.rows[at]
        if not isinstance(record, Mapping):
            raise ConfigError(
                f"{self.path}: record {at} is a {type(record).__name__}; a dataset is built from "
                "records of jsonl files, {'text': ...}."
            )
        return dict(record)


def _parse(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(
            f"{where}: not valid JSON ({error}). Each line must be one JSON object."
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, not {type(record).__name__}.")
    return record


# --- from a path to sources ---

JSONL_ENDINGS = (".jsonl", ".json", ".ndjson")
TABLE_ENDINGS = (".parquet", ".arrow")
COMPRESSED_ENDINGS = (".gz", ".zst")
CHUNK_ID = "CHUNK_ID"  # in the name of a file: a number
_MAGIC = {b"PAR1": ".parquet", b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


class DataFile(NamedTuple):
    """An entry of a list of data files; `columns` of this one alone, None: those of all."""

    path: str
    columns: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, entry: Any, key: str) -> "DataFile":
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, Mapping):
            return cls(str(entry))
        entry = dict(entry)
        if "path" not in entry or set(entry) - {"path", "columns"}:
            raise ConfigError(
                f"{key} has the entry {entry}: give a path, or a mapping with path and columns."
            )
        return cls(str(entry["path"]), entry.get("columns"))

    def __str__(self) -> str:
        return self.path


def data_paths(value: Any, key: str) -> tuple[list[DataFile], list[float] | None]:
    """One entry (see `DataFile.of`) or a list; of weights and entries in turn also the weights."""
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    items = [value] if isinstance(value, str | Mapping) else list(value or [])
    if not items:
        raise ConfigError(f"{key} is not set: give a data file or a list of them.")
    numbers = [_number(item) for item in items]
    if all(number is None for number in numbers):
        return [DataFile.of(item, key) for item in items], None
    weights = [number for number in numbers[::2] if number is not None]
    in_turn = 2 * len(weights) == len(items) and all(number is None for number in numbers[1::2])
    if not in_turn or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"{key}={items}: a blend is a list of weights above 0 and files in turn, for example "
            "[0.3, a.jsonl, 0.7, b.jsonl]; without weights the files are used one after the other."
        )
    return [DataFile.of(item, key) for item in items[1::2]], weights


def _number(item: Any) -> float | None:
    try:
        return float(item)
    except (TypeError, ValueError):
        return None


def open_sources(path: Path, data_impl: str, index_dir: str | None) -> list[RecordSource]:
    if not data_impl.startswith("json"):
        from nemo_aligner.data.nlp.sources import TokenFile

        return [TokenFile(path, data_impl)]
    if path.is_dir():
        return _open_folder(path, index_dir)
    if path.is_file():
        return [_open_file(path, index_dir)]
    if glob.has_magic(str(path)):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not found:
            raise UserError(f"no data file matches {path}.")
        return [source for each in found for source in open_sources(each, data_impl, index_dir)]
    if _may_be_split(path):
        splits = _splits(path.parent)
        if path.name in splits:
            return [_open_file(file, index_dir) for file in splits[path.name]]
    raise UserError(f"data file {path} does not exist.")


def open_quickly(path: Path, data_impl: str, index_dir: str | None) -> list[RecordSource]:
    """As `open_sources`, but of what takes long to open it checks only that it exists."""
    names = [f"{path}.idx", f"{path}.bin"] if data_impl == "mmap" else [str(path)]
    exists = all(glob.glob(name, recursive=True) or Path(name).exists() for name in names)
    if exists and not (data_impl.startswith("json") and path.is_file()):
        return []
    is_large = exists and path.stat().st_size > index_files.SMALL and _kind(path)
    return [] if is_large else open_sources(path, data_impl, index_dir)


def _open_folder(folder: Path, index_dir: str | None) -> list[RecordSource]:
    from nemo_aligner.data.nlp.sources import open_saved

    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [open_saved(folder)]
    if (folder / "dataset_dict.json").is_file():
        names = sorted(each.parent.name for each in folder.glob("*/state.json"))
        return [open_saved(folder / _only_split(folder, names))]
    splits = _splits(folder)
    if not splits:
        raise UserError(
            f"the folder {folder} holds no data: no file that ends in "
            f"{', '.join(JSONL_ENDINGS + TABLE_ENDINGS)}, and nothing that save_to_disk wrote."
        )
    return [_open_file(file, index_dir) for file in splits[_only_split(folder, sorted(splits))]]


def _only_split(folder: Path, names: list[str]) -> str:
    if len(names) != 1:
        raise UserError(
            f"the folder {folder} holds several splits, {', '.join(names)}: name one of them, for "
            f"example {folder / (names or ['train'])[0]}."
        )
    return names[0]


def _ending(path: Path) -> str:
    last = path.suffix.lower()
    if last in COMPRESSED_ENDINGS:
        return last if path.with_suffix("").suffix.lower() in JSONL_ENDINGS else ""
    return last if last in JSONL_ENDINGS + TABLE_ENDINGS else ""


def _may_be_split(path: Path) -> bool:
    """`datasets` reads all folders below, which takes long for a wrong path in a large folder."""
    if path.name not in ("train", "validation", "test"):
        return any(path.parent.glob(f"data/{glob.escape(path.name)}-*-of-*"))
    return any(_ending(each) for pattern in ("*", "*/*") for each in path.parent.glob(pattern))


def _splits(folder: Path) -> dict[str, list[Path]]:
    """The data files of each split of a folder, by the rules of `datasets.load_dataset`."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = str(folder.absolute())
    try:
        patterns = get_data_patterns(base)
        found = DataFilesDict.from_patterns(patterns, base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        return {}
    splits, others = dict[str, list[Path]](), list[str]()
    for split, names in found.items():
        for file in (folder / Path(name).relative_to(base) for name in names):
            if _ending(file):
                splits.setdefault(str(split), []).append(file)
            else:
                others.append(str(file))
    if splits and others:
        from nemo.utils import logging

        logging.warning(f"not read in the folder {folder}: {', '.join(others)}")
    return splits


def _open_file(path: Path, index_dir: str | None) -> RecordSource:
    if not path.stat().st_size:
        raise UserError(f"data file {path} is empty.")
    kind = _kind(path)
    if not kind:
        return JsonLinesFile(path, path)
    if kind in COMPRESSED_ENDINGS:
        return _open_compressed(path, kind, index_dir)
    from nemo_aligner.data.nlp.sources import open_arrow, open_parquet

    return open_arrow(path) if kind == ".arrow" else open_parquet(path, index_dir)


def _kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind in TABLE_ENDINGS + COMPRESSED_ENDINGS:
        return kind
    with path.open("rb") as file:
        first = file.read(4)
    return next((end for magic, end in _MAGIC.items() if first.startswith(magic)), "")


def _open_compressed(path: Path, kind: str, index_dir: str | None) -> JsonLinesFile:
    """Unpacked into memory if it is small, else into a copy that is kept."""
    import pyarrow as pa

    from nemo_aligner.data.nlp.sources import damage

    def blocks(size: int) -> Iterator[bytes]:
        with pa.input_stream(str(path), {".gz": "gzip", ".zst": "zstd"}[kind]) as file:
            while True:
                with damage(path, "cannot be unpacked"):
                    block = file.read(size)
                if not block:
                    return
                yield block

    start = next(blocks(index_files.SMALL + 1), b"")
    if len(start) <= index_files.SMALL:
        return JsonLinesFile(path, start)

    def write(target: Path) -> None:
        with target.open("wb") as copy:
            copy.writelines(blocks(1 << 20))

    return JsonLinesFile(path, index_files.keep_copy(path, index_dir, path.stem, ".jsonl", write))
