# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checksums of the files of a checkpoint or a `.nemo`, computed while they are written.

The manifest `CHECKSUMS.xxh128` lists all other files below its folder, in the form of `xxhsum`:
`xxh128sum --check CHECKSUMS.xxh128`. XXH3 finds damage, not forgery (docs/jobs.md: its speed).
"""

import contextlib
import errno
import functools
import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import xxhash
from nemo.utils import logging
from torch.distributed.checkpoint.filesystem import FileSystem

from nemo_aligner.checkpoint.forms import MARKER
from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import DamagedFileError, SaveError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered

MANIFEST = "CHECKSUMS.xxh128"
Checksums = dict[str, str]  # path below the folder -> hexadecimal digits

_LINE = re.compile(r"(?P<checksum>[0-9a-f]{32})  (?P<name>.+)")
_BLOCK_BYTES = 4 << 20
# Written, then read for its checksum: a block of this size stays in the processor's cache.
_CACHED_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


# --- writing ---


class _Stream(io.FileIO):
    """A new file with the checksum of what is written to it."""

    def __init__(self, path: str | os.PathLike, files: "ChecksummedFiles"):
        super().__init__(path, "w")
        self.files, self.hash = files, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        """Write the first block of `data`, as raw files may."""
        block = memoryview(data).cast("B")[:_CACHED_BYTES]
        try:
            written = super().write(block)
        except OSError as error:
            self.files.error = self.files.error or error
            raise
        self.hash.update(block[:written])
        progress.made()
        return written

    def close(self) -> None:
        """Close the file, which then survives a loss of power."""
        try:
            if not self.closed:
                os.fsync(self.fileno())
        except OSError as error:  # some file systems say only now that there is no room
            self.files.error = self.files.error or error
            raise
        finally:
            super().close()


class ChecksummedFiles(FileSystem):
    """The files that PyTorch's writer of distributed checkpoints makes, with their checksums.

    `error` is the first that the system reported, which PyTorch's own hides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksums: Checksums = {}
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", f"mode {mode!r}: files are only written"
        stream = _Stream(path, self)
        # PyTorch writes much in small parts.
        with io.BufferedWriter(stream, _CACHED_BYTES) as file:
            yield file
        self.checksums[Path(path).name] = stream.hash.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def file_checksum(file: IO[bytes]) -> str:
    """Checksum of the rest of an open file."""
    found = xxhash.xxh3_128()
    while block := file.read(_BLOCK_BYTES):
        found.update(block)
        progress.made()
    return found.hexdigest()


def write_durably(path: Path, content: bytes) -> str:
    """Write a file as a whole or not at all, even if power fails; returns its checksum."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)
    return xxhash.xxh3_128(content).hexdigest()


def sync_folder(folder: Path) -> None:
    """Keep the names of a folder's files if power fails."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_manifest(folder: Path, known: Mapping[str, str]) -> str:
    """Write the manifest of `folder`, whose files then survive a loss of power; returns its
    checksum. One process calls it. `known`: files already synchronized; the others are read.
    """
    found = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in found and name not in (MANIFEST, MARKER):
            with path.open("rb") as file:
                found[name] = file_checksum(file)
                os.fsync(file.fileno())
    lines = "".join(f"{found[name]}  {name}\n" for name in sorted(found))
    return write_durably(folder / MANIFEST, os.fsencode(lines))


def save_error(path: Path, error: OSError, needed: int | None = None) -> SaveError:
    """The error about `path`, which could not be written; `needed`: bytes."""
    if error.errno not in _NO_SPACE:
        return SaveError(f"{path} cannot be written: {error}.")
    size = "" if needed is None else f"{_megabytes(needed)} are needed, "
    free = "an unknown size is"
    for place in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):  # not yet there, or another rank removed it
            free = f"{_megabytes(shutil.disk_usage(place).free)} are"
            break
    return SaveError(
        f"no space left ({error.strerror}) for {path}: {size}{free} free. Free some, or raise the "
        "quota; the checkpoints that were complete before still are."
    )


def check_space(folder: Path, needed: int) -> None:
    """`SaveError` if `needed` bytes do not fit into `folder`. One process calls it."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:
        raise save_error(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


# --- reading ---


def parse_manifest(content: bytes, path: Path) -> Checksums:
    """The checksums in a manifest; `DamagedFileError` if it is none."""
    *lines, rest = os.fsdecode(content).split("\n")
    matches = [_LINE.fullmatch(line) for line in lines]
    found = {match["name"]: match["checksum"] for match in matches if match is not None}
    leads_out = any(Path(name).is_absolute() or ".." in Path(name).parts for name in found)
    if not lines or rest or None in matches or leads_out:
        raise DamagedFileError(
            f"{path} is damaged: it is not a list of checksums. {_remedy(path.parent)}"
        )
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Warn, once per process."""
    logging.warning(text)


def check_folder(
    folder: Path, select: Callable[[str], bool] = lambda _name: True, rank: int = 0, size: int = 1
) -> None:
    """Compare files of `folder` that `select` takes, by their paths below it, with its manifest;
    without one warn. `rank`, `size`: compare one of `size` shares. `DamagedFileError` names all
    that are missing, changed or not listed.
    """
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    _compare(folder, files, lambda name: files[name].open("rb"), select, rank, size)


def check_files_together(folder: Path, select: Callable[[str], bool] = lambda _name: True) -> None:
    """`check_folder` by all ranks, each of which reads a share; an error is raised on all."""
    outcome: str | None = None
    try:
        check_folder(folder, select, parallel_state.get_rank(), parallel_state.get_world_size())
    except DamagedFileError as error:
        outcome = str(error)
    messages = [message for message in gathered(outcome) if message is not None]
    if messages:
        raise DamagedFileError("\n".join(dict.fromkeys(messages)))


def check_members(tar: tarfile.TarFile, path: Path, select: Callable[[str], bool]) -> None:
    """As `check_folder`, of the members of the tar file at `path`, compressed or not."""
    members = {m.name.removeprefix("./"): m for m in tar.getmembers() if m.isreg()}
    _compare(path, members, lambda name: tar.extractfile(members[name]), select)


def _compare(
    path: Path,
    there: Collection[str],
    opened: Callable[[str], Any],
    select: Callable[[str], bool],
    rank: int = 0,
    size: int = 1,
) -> None:
    """`check_folder` of the files `there`, which `opened` opens by name."""
    if MANIFEST not in there:
        warn_once(
            f"{path} has no {MANIFEST}: this package wrote it before it had checksums, or other "
            "software did. Damage to its files would not be noticed."
        )
        return
    with opened(MANIFEST) as file:
        checksums = parse_manifest(file.read(), path / MANIFEST)

    def is_changed(name: str) -> bool:
        try:
            with opened(name) as file:
                return file_checksum(file) != checksums[name]
        except (FileNotFoundError, KeyError):
            return True

    damaged = sorted({name for name in there if select(name)} - {*checksums, MANIFEST})
    # Others put hidden files there, and a complete checkpoint gets further files; its manifest is
    # compared with its mark.
    damaged = [name for name in damaged if not Path(name).name.startswith(".")]
    if (path / MARKER).is_file() or not damaged:
        damaged = list(filter(is_changed, sorted(filter(select, checksums))[rank::size]))
    if damaged:
        verb = "is" if len(damaged) == 1 else "are"
        raise DamagedFileError(
            f"{path} is damaged or incomplete: {', '.join(damaged)} {verb} not what was written "
            f"(see {MANIFEST}). {_remedy(path)}"
        )


def _remedy(path: Path) -> str:
    if (path / MARKER).is_file():
        return "Copy it again, or use another checkpoint."
    return f"Copy it again; if you changed it yourself, remove {MANIFEST} from it."
