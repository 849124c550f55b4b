# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data files that hold their records as tables or as tokens.

Rows of a table are read from an Arrow file that `datasets` maps into memory, which processes
share. A parquet file is copied to such a file once, a few rows at a time (`Dataset.from_parquet`
holds a row group at a time, which may be the whole file).
"""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.fields import Record as Record
from nemo_aligner.data.nlp.fields import RecordSource

if TYPE_CHECKING:
    import pyarrow
    from megatron.core.datasets.indexed_dataset import IndexedDataset


@contextlib.contextmanager
def damage(path: Path, what: str) -> Iterator[None]:
    """`UserError` for whatever a library raises on a file that is damaged or of another kind."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{path} {what} ({error}): it is damaged, cut short or of another kind; copy or write "
            "it again."
        ) from None


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
        for batch in _readable(iter(batches), self.path):
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

    with damage(path, "is not a parquet file"):
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

    with damage(path, "is not an Arrow file"):
        try:
            table: Any = MemoryMappedTable.from_file(str(path))
        except pa.ArrowInvalid:
            with pa.memory_map(str(path)) as file:
                table = InMemoryTable(pa.ipc.open_file(file).read_all())
    return ArrowTable(path, table, [path], [path])


def open_saved(folder: Path) -> ArrowTable:
    """The rows of a dataset that `datasets.Dataset.save_to_disk` wrote."""
    import datasets

    with damage(folder, "cannot be read as a dataset that save_to_disk wrote"):
        dataset = datasets.load_from_disk(str(folder), keep_in_memory=False)
    files = [Path(file["filename"]) for file in dataset.cache_files]
    state = [folder / name for name in ("state.json", "dataset_info.json")]
    return ArrowTable(folder, dataset.data, [*state, *files], files)


def _gathered(batches: Iterator["pyarrow.RecordBatch"]) -> Iterator["pyarrow.Table"]:
    """`batches` in tables of one batch of about `BATCH_BYTES` each."""
    import pyarrow as pa

    for first in batches:
        held, size = [first], first.nbytes
        while size < BATCH_BYTES and (batch := next(batches, None)) is not None:
            held.append(batch)
            size += batch.nbytes
        yield pa.Table.from_batches(held).combine_chunks()


def _readable(
    batches: Iterator["pyarrow.RecordBatch"], path: Path
) -> Iterator["pyarrow.RecordBatch"]:
    done = 0
    while True:
        with damage(path, f"cannot be read after row {done}"):
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
        self.rows = (_read_indexed if indexed else _read_array)(path)

    def __getitem__(self, at: int) -> Record:
        with damage(self.path, f"cannot be read at document {at}"):
            return {"text": self.rows[at]}


def _read_indexed(prefix: Path) -> "IndexedDataset":
    for ending in (".idx", ".bin"):
        if not Path(f"{prefix}{ending}").is_file():
            raise UserError(
                f"data file {prefix}{ending} does not exist. With model.data.data_impl=mmap a "
                "path names <path>.bin and <path>.idx, without the ending."
            )
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with damage(prefix, "has an .idx that cannot be read"):
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
    with damage(path, "is not a .npy file of tokens"), path.open("rb") as file:
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
