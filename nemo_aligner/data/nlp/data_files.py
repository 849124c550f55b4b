# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a path in the configuration to the sources of its records: a file, a folder that `datasets`
wrote or whose data files it finds, one split of such a folder, or a pattern (docs/data.md).
"""

import glob
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.sources import (
    JsonLinesFile,
    RecordSource,
    TokenFile,
    open_arrow,
    open_parquet,
    open_saved,
)

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
        if len(names) == 1:
            return [open_saved(folder / names[0])]
        raise UserError(_choose_split(folder, names))
    splits = _splits(folder)
    if len(splits) > 1:
        raise UserError(_choose_split(folder, sorted(splits)))
    if not splits:
        raise UserError(
            f"the folder {folder} holds no data: no file that ends in "
            f"{', '.join(JSONL_ENDINGS + TABLE_ENDINGS)}, and nothing that save_to_disk wrote."
        )
    (files,) = splits.values()
    return [_open_file(file, index_dir) for file in files]


def _choose_split(folder: Path, names: list[str]) -> str:
    return (
        f"the folder {folder} holds several splits, {', '.join(names)}: name one of them, for "
        f"example {folder / (names or ['train'])[0]}."
    )


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

    unpacked = partial(pa.input_stream, str(path), {".gz": "gzip", ".zst": "zstd"}[kind])
    with unpacked() as file:
        start = _read(file, index_files.SMALL + 1, path)
    if len(start) <= index_files.SMALL:
        return JsonLinesFile(path, start)

    def write(target: Path) -> None:
        with unpacked() as source, target.open("wb") as copy:
            while block := _read(source, 1 << 20, path):
                copy.write(block)

    return JsonLinesFile(path, index_files.keep_copy(path, index_dir, path.stem, ".jsonl", write))


def _read(file: BinaryIO, size: int, path: Path) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError) as error:
        raise UserError(
            f"{path} cannot be unpacked ({error}): it is damaged or cut short; copy it again."
        ) from None
