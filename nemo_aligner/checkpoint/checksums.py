# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checksums of the files of a checkpoint or a `.nemo`, computed while they are written.

The manifest `CHECKSUMS.xxh128` has one line for each other file below its folder, in the form of
`xxhsum`: `xxh128sum --check CHECKSUMS.xxh128` compares them without this package. XXH3 with 128
bits is the standard that is fast enough for files of gigabytes (docs/jobs.md has the numbers); it
finds damage, not forgery.
"""

import contextlib
import errno
import functools
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
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
# Written right after it was read for its checksum, such a block is still in the processor's cache.
_CACHED_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


# --- writing ---


class _Stream:
    def __init__(self, file: Any, failed: Callable[[OSError], None]):
        self.file, self.failed = file, failed
        self.hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._noting_errors():
            for start in range(0, len(view), _CACHED_BYTES):
                block = view[start : start + _CACHED_BYTES]
                self.hash.update(block)
                self.file.write(block)
                progress.made()
        return len(view)

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        with self._noting_errors():
            self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        with self._noting_errors():
            self.file.close()

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed(error)
            raise


class ChecksummedFiles(FileSystem):
    """The files that PyTorch's writer of distributed checkpoints makes, with their checksums.

    Attributes:
        checksums: of each file that was written, by its name.
        error: the first that the system reported; PyTorch's own, after it, hides what happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksums: Checksums = {}
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with self.opened(path, mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _Stream(file, self._note)
            yield stream
        self.checksums[Path(path).name] = stream.hash.hexdigest()

    def opened(self, path: str | os.PathLike, mode: str) -> contextlib.AbstractContextManager[Any]:
        return Path(path).open(mode)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)

    def _note(self, error: OSError) -> None:
        self.error = self.error or error


def file_checksum(file: IO[bytes]) -> str:
    """Checksum of the rest of a file, which is open for reading."""
    found = xxhash.xxh3_128()
    while block := file.read(_BLOCK_BYTES):
        found.update(block)
        progress.made()
    return found.hexdigest()


def write_durably(path: Path, content: bytes) -> str:
    """Write a file as a whole or not at all, also after a loss of power; returns its checksum."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)
    return xxhash.xxh3_128(content).hexdigest()


def sync_folder(folder: Path) -> None:
    """Have the system keep which files a folder has, also after a loss of power."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_manifest(folder: Path, known: Mapping[str, str]) -> str:
    """Write the manifest of `folder`, whose files then survive a loss of power; one process calls
    it. Returns the checksum of the manifest.

    Args:
        known: checksums of the files that were computed while they were written, and that are
            synchronized. The others, which are small, are read.
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
    """The error about `path`, which could not be written, where `needed` bytes were to be."""
    if error.errno not in _NO_SPACE:
        return SaveError(f"{path} cannot be written: {error}.")
    size = "" if needed is None else f"{_megabytes(needed)} are needed, "
    return SaveError(
        f"no space left ({error.strerror}) for {path}: {size}{_free_space(path)}. Free some, or "
        "raise the quota; the checkpoints that were complete before still are."
    )


def _free_space(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            filesystem = os.statvfs(place)
        except FileNotFoundError:  # not there yet, or another rank has removed it with its folder
            continue
        return f"{_megabytes(filesystem.f_bavail * filesystem.f_frsize)} are free"
    return "an unknown size is free"


def check_space(folder: Path, needed: int) -> None:
    """Check that `needed` bytes fit into `folder`; else `SaveError`. One process calls it."""
    filesystem = os.statvfs(folder)
    if filesystem.f_blocks and filesystem.f_bavail * filesystem.f_frsize < needed:
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


def read_manifest(folder: Path) -> Checksums | None:
    """The checksums in a folder's manifest, or `DamagedFileError`; without one None, a warning."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        warn_without(folder)
        return None
    return parse_manifest(content, folder / MANIFEST)


@functools.cache
def warn_without(path: Path) -> None:
    """Warn, once per process, that the files at `path` cannot be checked."""
    logging.warning(
        f"{path} has no {MANIFEST}: this package wrote it before it had checksums, or other "
        "software did. Damage to its files would not be noticed."
    )


def check_files(folder: Path, names: Iterable[str], checksums: Checksums) -> None:
    """Compare the files `names` of `folder` with the checksums of all its files.

    Raises:
        DamagedFileError: a file is missing or another; names all such files.
    """
    damaged = [name for name in names if _found(folder / name) != checksums[name]]
    if damaged:
        raise _damaged(folder, damaged)


def check_all_are_listed(
    folder: Path, select: Callable[[str], bool], checksums: Checksums
) -> None:
    """Check that the manifest of `folder` was not cut. That of a complete checkpoint, which gets
    further files, is compared with its mark.

    Raises:
        DamagedFileError: names the files that are not in it.
    """
    if (folder / MARKER).is_file():
        return
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = (path.as_posix() for path in files if not path.name.startswith("."))
    if unlisted := _unlisted(filter(select, names), checksums):
        raise _damaged(folder, unlisted)


def _unlisted(names: Iterable[str], checksums: Checksums) -> list[str]:
    return sorted({*names} - {*checksums, MANIFEST})


def _found(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file_checksum(file)
    except FileNotFoundError:
        return None


def check_files_together(folder: Path, select: Callable[[str], bool] = lambda _name: True) -> None:
    """Compare the files of `folder` with its manifest; all ranks call it, each reads a part of
    them. A folder without a manifest gets a warning.

    Args:
        select: says of a file, by its path below the folder, whether it is compared.

    Raises:
        DamagedFileError: on all ranks; names the files that are missing or others.
    """
    outcome: str | None = None
    try:
        checksums = read_manifest(folder) or {}
        names = sorted(filter(select, checksums))
        if checksums:
            check_all_are_listed(folder, select, checksums)
        rank, size = parallel_state.get_rank(), parallel_state.get_world_size()
        check_files(folder, names[rank::size], checksums)
    except DamagedFileError as error:
        outcome = str(error)
    messages = [message for message in gathered(outcome) if message is not None]
    if messages:
        raise DamagedFileError("\n".join(dict.fromkeys(messages)))


def check_members(tar: tarfile.TarFile, path: Path, select: Callable[[str], bool]) -> None:
    """Compare members of an uncompressed or compressed tar file with the manifest in it. A file
    without one gets a warning.

    Raises:
        DamagedFileError: names the members that are missing or others.
    """
    members = {member.name.removeprefix("./"): member for member in tar.getmembers()}
    manifest = members.get(MANIFEST)
    stream = None if manifest is None or not manifest.isreg() else tar.extractfile(manifest)
    if stream is None:
        warn_without(path)
        return
    checksums = parse_manifest(stream.read(), path / MANIFEST)
    files = (name for name, member in members.items() if member.isreg())
    damaged = _unlisted(filter(select, files), checksums)
    for name in filter(select, sorted(checksums)):
        member = members.get(name)
        found = tar.extractfile(member) if member is not None and member.isreg() else None
        if found is None or file_checksum(found) != checksums[name]:
            damaged.append(name)
    if damaged:
        raise _damaged(path, damaged)


def _damaged(path: Path, names: list[str]) -> DamagedFileError:
    verb = "is" if len(names) == 1 else "are"
    return DamagedFileError(
        f"{path} is damaged or incomplete: {', '.join(names)} {verb} not what was written (see "
        f"{MANIFEST}). {_remedy(path)}"
    )


def _remedy(path: Path) -> str:
    if (path / MARKER).is_file():
        return "Copy it again, or use another checkpoint."
    return f"Copy it again; if you changed it yourself, remove {MANIFEST} from it."
