# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that make a second start fast: the index of a data file (offsets, lengths and other
results of its check), and copies of it in a form that can be mapped into memory.

Their names hold a hash of all that they depend on, so they are never out of date. A file appears
complete, by being renamed; of several processes that need the same one the first makes it.

Below: files that a command writes line by line; stopped, it goes on where the file ends.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.core import leftovers
from nemo_aligner.core.content import SMALL as SMALL
from nemo_aligner.core.content import content_samples
from nemo_aligner.core.errors import UserError

FOLDER = ".nemo_aligner_index"
# Data files of at most `SMALL` bytes are read anew at each start, and nothing is written for them.


def file_fingerprint(path: Path) -> str:
    """A hash of the size of a file, its times (in ns) and (samples of) its content."""
    stat = path.stat()
    found = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
    found.update(content_samples(path))
    return found.hexdigest()


def key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def code_fingerprint() -> str:
    """A hash of the modules that read and check data: an index of other code is not used."""
    found = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        found.update(module.read_bytes())
    return found.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """A hash of what decides how it cuts a text; None if that cannot be read: nothing is kept."""
    inner: Any = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "backend_tokenizer"):  # of Hugging Face, fast
        state = inner.backend_tokenizer.to_str()
    elif hasattr(inner, "serialized_model_proto"):  # SentencePiece
        state = hashlib.sha256(inner.serialized_model_proto()).hexdigest()
    elif type(tokenizer).__name__ == "ByteLevelTokenizer":
        state = ""
    else:
        return None
    own = {
        name: repr(value)
        for name, value in sorted(vars(tokenizer).items())
        if isinstance(value, str | int | float | bool | dict | None)
        and not name.startswith("_inv_vocab")  # filled on first use
    }
    # Settings of the Python side of a tokenizer show in how it cuts a text full of edges.
    eos = getattr(inner, "eos_token", "")
    probe = tokenizer.text_to_ids(f" A  b\n\n\tnaïve 日本 {eos}x </s> ")
    ids = [tokenizer.eos_id, getattr(tokenizer, "bos_id", None), tokenizer.vocab_size]
    return key(type(tokenizer).__name__, type(inner).__name__, state, own, ids, list(probe))


def keep_array(
    data: Path, index_dir: str | None, name: str, dtype: np.dtype, make: Callable[[], np.ndarray]
) -> np.ndarray:
    """The array of `make`, [n] of `dtype`: from the file `name`, mapped into memory, if it is
    there and whole.
    """

    def write(path: Path) -> None:
        with path.open("wb") as file:  # by name, numpy adds an ending
            np.save(file, make())

    path = keep_file(data, index_dir, name, write)
    if path is not None:
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            if found.dtype == dtype and found.ndim == 1:
                return found
        except (ValueError, OSError, EOFError):
            pass  # damaged
    return make()


def keep_file(
    data: Path, index_dir: str | None, name: str, write: Callable[[Path], None]
) -> Path | None:
    """The path of the file `name` for the data file or folder `data`, which `write` makes unless
    it exists; None if no folder for it can be written. `UserError`: there is no room for it.
    """
    from filelock import FileLock
    from nemo.utils import logging  # here, as below: NeMo takes seconds to import

    chosen = Path(index_dir) if index_dir else (data if data.is_dir() else data.parent) / FOLDER
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    cache = os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets"
    folders = [chosen, Path(cache).expanduser() / "nemo_aligner"]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
        except OSError:
            continue  # not ours to write
        os.close(handle)
        try:
            with contextlib.ExitStack() as alone:
                # On a file system without locks all processes write, which does no harm.
                with contextlib.suppress(NotImplementedError, OSError):
                    alone.enter_context(FileLock(folder / f"{name}.lock"))
                if not (folder / name).is_file():  # another process may have been faster
                    logging.info(f"reading {data}; for the next start: {folder / name}")
                    write(Path(temporary))
                    os.chmod(temporary, 0o644)
                    os.replace(temporary, folder / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"there is no room in {folder} for {name}, which lets {data} be read without "
                "filling the memory; name another folder with model.data.index_mapping_dir."
            ) from None
        finally:
            Path(temporary).unlink(missing_ok=True)
        return folder / name
    return None


def keep_copy(
    data: Path, index_dir: str | None, stem: str, ending: str, write: Callable[[Path], None]
) -> Path:
    """The copy's path; where no folder can be written it lives as long as this process."""
    from nemo.utils import logging

    name = f"{stem}-{key(file_fingerprint(data))}{ending}"
    copy = keep_file(data, index_dir, name, write)
    if copy is None:
        copy = leftovers.temporary_folder("nemo_aligner_data_") / name
        logging.warning(
            f"no folder can be written to keep a copy of {data} for the next start: this process "
            f"writes its own in {copy.parent}. Set model.data.index_mapping_dir."
        )
        write(copy)
    return copy


def complete_lines(path: Path, check: Callable[[int, bytes], None]) -> int:
    """How many whole lines a file holds, 0 without one; a torn last line is removed. Its folder is
    made (`SaveError`: it cannot be). `check` gets the number of each line, from 0, and the line,
    and raises if the command would not have written it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return 0
    except OSError as error:
        from nemo_aligner.checkpoint.checksums import save_error  # heavy

        raise save_error(path, error) from None
    count, end = 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            check(count, line)
            count, end = count + 1, end + len(line)
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
    return count


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines, each with its newline, to a file; `SaveError`: it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        from nemo_aligner.checkpoint.checksums import save_error  # heavy

        raise save_error(path, error) from None
