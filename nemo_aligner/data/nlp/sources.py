# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a path in the configuration to the sources of its records (docs/data.md): jsonl files,
tables, files of tokens, folders and patterns of them.

Rows of a table are read from an Arrow file that `datasets` maps into memory, which processes
share. A parquet file is copied to such a file once, a few rows at a time (`Dataset.from_parquet`
holds a row group at a time, which may be the whole file).
"""

import contextlib
import glob
import io
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import index_files

if TYPE_CHECKING:
    import pyarrow
    from megatron.core.datasets.indexed_dataset import IndexedDataset

Record = dict[str, Any]


@contextlib.contextmanager
def _damage(path: Path, what: str) -> Iterator[None]:
    """`UserError` for whatever a library raises on a file that is damaged or of another kind."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{path} {what} ({error}): it is damaged, cut short or of another kind; copy or write "
            "it again."
        ) from None


class RecordSource:
    """The rows of one data file, or of one saved dataset.

    Attributes:
        path: of the file or folder that the user gave; for messages.
        unit: what messages call a row: "line", "row", "document" or "record".
        files: whose content decides what the rows are.
    """

    unit: str

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path, self.files = path, files

    def __getitem__(self, at: int) -> Record:
        """The row at a place that `scan` gave, read from disk."""
        raise NotImplementedError

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        """All rows in order, each with its place and its number as messages give it."""
        raise NotImplementedError


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
        self.data = data

    def __getitem__(self, at: int) -> Record:
        return dict(self.data[at])

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        for number in range(len(self.data)):
            record = self.data[number]
            if not isinstance(record, Mapping):
                raise ConfigError(
                    f"{self.path}: record {number} is a {type(record).__name__}; a dataset is "
                    "built from records of jsonl files, {'text': ...}."
                )
            yield number, number, dict(record)


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


# Rows that are decoded together while a file is copied or checked.
ROWS_AT_ONCE = 256
# Of a batch in a copy: opening it reads the page where each batch begins, so there are few.
BATCH_BYTES = 8 << 20


class ArrowTable(RecordSource):
    """A `table` of `datasets`, which maps `arrow_files`; of one in memory there are none."""

    unit = "row"

    def __init__(self, path: Path, table: Any, files: list[Path], arrow_files: list[Path]) -> None:
        super().__init__(path, files)
        self.table, self.arrow_files = table, arrow_files

    def __getitem__(self, at: int) -> Record:
        return _without_nulls(self.table.fast_slice(at, 1).to_pylist()[0])

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        at = 0
        batches = self._read_through() if self.arrow_files else self.table.table.to_batches()
        for batch in _readable(batches, self.path):
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    yield at, at + 1, _without_nulls(row)
                    at += 1

    def _read_through(self) -> Iterator["pyarrow.RecordBatch"]:
        """By plain reading: pages of a mapped file count as memory of this process."""
        import pyarrow as pa

        for path in self.arrow_files:
            with pa.OSFile(str(path)) as file:
                try:
                    yield from pa.ipc.open_stream(file)
                except pa.ArrowInvalid:
                    file.seek(0)
                    reader = pa.ipc.open_file(file)
                    yield from map(reader.get_batch, range(reader.num_record_batches))


def _without_nulls(row: Record) -> Record:
    """A row whose structs lack what is null: Arrow gives all of a column the same fields."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {column: cleaned(value) for column, value in row.items()}


def open_parquet(path: Path, index_dir: str | None) -> ArrowTable:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.table import InMemoryTable, MemoryMappedTable

    with _damage(path, "is not a parquet file"):
        # Without read-ahead, a file is not held in memory by whole row groups.
        file = pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    with file:
        batches = _readable(file.iter_batches(batch_size=ROWS_AT_ONCE), path)
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) <= index_files.SMALL:
            table = InMemoryTable(pa.Table.from_batches(list(batches), file.schema_arrow))
            return ArrowTable(path, table, [path], [])

        def write(target: Path) -> None:
            with pa.OSFile(str(target), "wb") as sink:
                with pa.ipc.new_stream(sink, file.schema_arrow) as writer:
                    for table in _gathered(batches):
                        writer.write_table(table)

        copy = index_files.keep_copy(path, index_dir, path.name, ".arrow", write)
    return ArrowTable(path, MemoryMappedTable.from_file(str(copy)), [path], [copy])


def open_arrow(path: Path) -> ArrowTable:
    """The rows of an Arrow file, in its form for streams or for files."""
    import pyarrow as pa
    from datasets.table import InMemoryTable, MemoryMappedTable

    with _damage(path, "is not an Arrow file"):
        try:
            table: Any = MemoryMappedTable.from_file(str(path))
        except pa.ArrowInvalid:
            with pa.memory_map(str(path)) as file:
                table = InMemoryTable(pa.ipc.open_file(file).read_all())
    return ArrowTable(path, table, [path], [path])


def open_saved(folder: Path) -> ArrowTable:
    """The rows of a dataset that `datasets.Dataset.save_to_disk` wrote."""
    import datasets

    with _damage(folder, "cannot be read as a dataset that save_to_disk wrote"):
        dataset = datasets.load_from_disk(str(folder), keep_in_memory=False)
    files = [Path(file["filename"]) for file in dataset.cache_files]
    state = [folder / name for name in ("state.json", "dataset_info.json")]
    return ArrowTable(folder, dataset.data, [*state, *files], files)


def _gathered(batches: Iterator["pyarrow.RecordBatch"]) -> Iterator["pyarrow.Table"]:
    """`batches` in tables of one batch of about `BATCH_BYTES` each."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= BATCH_BYTES:
            yield pa.Table.from_batches(held).combine_chunks()
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _readable(
    batches: Iterable["pyarrow.RecordBatch"], path: Path
) -> Iterator["pyarrow.RecordBatch"]:
    done, batches = 0, iter(batches)
    while True:
        with _damage(path, f"cannot be read after row {done}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        done += batch.num_rows


# What a pickled array of numbers is made of, by module (of NumPy 1 and 2) and name.
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ARRAY_MODULES = ("numpy", *_MULTIARRAY)
_ARRAY_NAMES = ("_reconstruct", "ndarray", "dtype", "scalar")


class TokenFile(RecordSource):
    """Records `{"text": tokens}`; of "mmap" the path has no ending."""

    unit = "document"

    def __init__(self, path: Path, data_impl: str) -> None:
        indexed = data_impl == "mmap"
        files = [Path(f"{path}.idx"), Path(f"{path}.bin")] if indexed else [path]
        super().__init__(path, files)
        self.documents = (_read_indexed if indexed else _read_array)(path)

    def __getitem__(self, at: int) -> Record:
        return {"text": self.documents[at]}

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        for number in range(len(self.documents)):
            with _damage(self.path, f"cannot be read at document {number}"):
                tokens = self.documents[number]
            yield number, number, {"text": tokens}


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
    with _damage(prefix, "has an .idx that cannot be read"):
        return IndexedDataset(str(prefix))


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
    form = np.lib.format
    with _damage(path, "is not a .npy file of tokens"), path.open("rb") as file:
        old = form.read_magic(file) == (1, 0)
        read = form.read_array_header_1_0 if old else form.read_array_header_2_0
        if read(file)[2].hasobject:
            array = _ArrayUnpickler(file).load()
        else:
            array = np.load(path, allow_pickle=False)
        samples = [np.asarray(sample) for sample in array]
    for number, sample in enumerate(samples):
        if sample.ndim != 1 or not np.issubdtype(sample.dtype, np.integer):
            raise UserError(
                f"{path}, document {number}: {sample.dtype} of shape {sample.shape}, but the "
                "tokens of a text are whole numbers in one dimension."
            )
    return samples


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
    if kind == ".arrow":
        return open_arrow(path)
    if kind == ".parquet":
        return open_parquet(path, index_dir)
    return _open_compressed(path, kind, index_dir) if kind else JsonLinesFile(path, path)


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

    def blocks(size: int) -> Iterator[bytes]:
        with pa.input_stream(str(path), {".gz": "gzip", ".zst": "zstd"}[kind]) as file:
            while True:
                with _damage(path, "cannot be unpacked"):
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
