# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables as sources of records: parquet and Arrow files, and what `datasets` saved to disk.

Rows are read from an Arrow file that is mapped into memory by `datasets`: it takes no memory of
its own, and processes share it. A parquet file is copied to such a file once, a few rows at a time
(`Dataset.from_parquet` holds a row group of it at a time, which may be the whole file).

`datasets` and `pyarrow` are imported when such a file is opened.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.json_lines import Record

if TYPE_CHECKING:
    import pyarrow

# Rows that are decoded together while a file is copied or checked.
ROWS_AT_ONCE = 256
# Of a batch in a copy: opening it reads the page where each batch begins, so there are few.
BATCH_BYTES = 8 << 20


class ArrowTable:
    """A `RecordSource` over the rows of a table.

    Args:
        path: the file or folder, for messages.
        table: a table of `datasets`.
        files: whose content decides what the rows are.
        arrow_files: the Arrow files that `table` maps; empty for a table in memory.
    """

    unit = "row"

    def __init__(self, path: Path, table: Any, files: list[Path], arrow_files: list[Path]) -> None:
        self.path = path
        self.table = table
        self.files = files
        self.arrow_files = arrow_files
        self.offsets = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> Record:
        return _without_nulls(self.table.fast_slice(int(number), 1).to_pylist()[0])

    def scan(self) -> Iterator[tuple[int, Record]]:
        """All rows in order, decoded a few at a time."""
        number = 0
        batches = self._read_through() if self.arrow_files else iter(self.table.table.to_batches())
        while (batch := _next(batches, self.path, number)) is not None:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield number, _without_nulls(row)

    def _read_through(self) -> Iterator["pyarrow.RecordBatch"]:
        """Batches of the files by plain reading: pages of a mapped file would count as memory of
        this process until another one needs it.
        """
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
    """A row whose structs lack what is null in them: Arrow gives all structs of a column the same
    fields, and does not know a null that was written from a field that was not there.
    """

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {column: cleaned(value) for column, value in row.items()}


def open_parquet(path: Path, index_dir: str | None) -> ArrowTable:
    """The rows of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.table import InMemoryTable, MemoryMappedTable

    try:
        # Without read-ahead, a file is not held in memory by whole row groups.
        file = pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a parquet file, or is cut short ({error}); copy or write it again."
        ) from None
    with file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) <= index_files.SMALL:
            batches = list(_batches_of(file, path))
            table = InMemoryTable(pa.Table.from_batches(batches, file.schema_arrow))
            return ArrowTable(path, table, [path], [])

        def write(target: Path) -> None:
            with pa.OSFile(str(target), "wb") as sink:
                with pa.ipc.new_stream(sink, file.schema_arrow) as writer:
                    for table in _gathered(_batches_of(file, path)):
                        writer.write_table(table)

        name = f"{path.name}-{index_files.key(index_files.file_fingerprint(path))}.arrow"
        copy = index_files.keep_file(path, index_dir, name, write)
        if copy is None:
            copy = index_files.temporary_folder(path) / name
            write(copy)
    return ArrowTable(path, MemoryMappedTable.from_file(str(copy)), [path], [copy])


def open_arrow(path: Path) -> ArrowTable:
    """The rows of an Arrow file, in its form for streams (as `datasets` writes) or for files."""
    import pyarrow as pa
    from datasets.table import InMemoryTable, MemoryMappedTable

    try:
        try:
            table: Any = MemoryMappedTable.from_file(str(path))
        except pa.ArrowInvalid:
            with pa.memory_map(str(path)) as file:
                table = InMemoryTable(pa.ipc.open_file(file).read_all())
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not an Arrow file, or is cut short ({error}); copy or write it again."
        ) from None
    return ArrowTable(path, table, [path], [path])


def open_saved(folder: Path) -> ArrowTable:
    """The rows of a dataset that `datasets.Dataset.save_to_disk` wrote."""
    import datasets
    import pyarrow as pa

    try:
        dataset = datasets.load_from_disk(str(folder), keep_in_memory=False)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise UserError(
            f"{folder} cannot be read as a dataset that save_to_disk wrote ({error}); copy or "
            "write it again."
        ) from None
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


def _batches_of(file: Any, path: Path) -> Iterator["pyarrow.RecordBatch"]:
    """The rows of an open parquet file, a few at a time."""
    batches, done = iter(file.iter_batches(batch_size=ROWS_AT_ONCE)), 0
    while (batch := _next(batches, path, done)) is not None:
        done += batch.num_rows
        yield batch


def _next(
    batches: Iterator["pyarrow.RecordBatch"], path: Path, done: int
) -> "pyarrow.RecordBatch | None":
    """The next of `batches`, of which `done` rows have been read; None at the end."""
    import pyarrow as pa

    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read after row {done} ({error}): the file is damaged or "
            "incomplete; copy or write it again."
        ) from None
