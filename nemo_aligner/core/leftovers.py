# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Temporary folders and shared memory of this process; what killed processes left is removed.

Each process notes the paths in a record before it creates them, and holds a lock on the record
while it lives. The first path that a process claims, and the start of each job, makes it look for
records that nobody holds, and remove what they name.

The records lie in a folder that only this user can write; without one nothing is recorded or
removed. Names hold 64 random bits; a path that is a link or of another user stays.
"""

import atexit
import contextlib
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Not in TMPDIR, which may be another one for each job, while shared memory is the machine's.
RECORDS = Path("/tmp") / f"nemo_aligner-{os.geteuid()}"
_OURS = re.compile(r"[a-z_]+_[0-9a-f]{16}")
_lock = threading.Lock()
_claimed: list[Path] = []  # by this process
_record: int | None = None  # descriptor of its record
_record_name = ""
_swept = False


def temporary_folder(prefix: str, base: str | Path | None = None) -> Path:
    """Return a new folder of mode 0700 in `base`, removed when this process ends, or later."""
    folder = claim(Path(base or tempfile.gettempdir()), prefix)
    folder.mkdir(mode=0o700)
    return folder


def shared_memory_prefix() -> str:
    """Return a prefix for names of shared memory, which is removed as temporary folders are."""
    return claim(SHARED_MEMORY, "nemo_aligner_").name


def claim(folder: Path, prefix: str, token: str | None = None) -> Path:
    """Note, and return, a path for something temporary that the caller creates. `prefix`:
    lower-case letters and underscores; `token`: 16 hexadecimal digits that processes agreed on.
    """
    global _record
    path = folder.absolute() / f"{prefix}{token or secrets.token_hex(8)}"
    assert _OURS.fullmatch(path.name), path
    sweep_once()
    with _lock:
        if not _claimed:
            atexit.register(_end, os.getpid())
        _claimed.append(path)
        with contextlib.suppress(OSError):
            if _record is None:
                with _records() as records:
                    _record = _new_record(records)
            os.write(_record, os.fsencode(path) + b"\0")
    return path


def token_of_machine(token: str) -> str:
    """16 hexadecimal digits from those of all ranks, others on each machine: they may share a
    folder.
    """
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{token} {socket.gethostname()} {boot}".encode()).hexdigest()[:16]


def sweep_once() -> None:
    """Remove what killed processes left; only the first call in a process does something."""
    global _swept
    with _lock, contextlib.suppress(OSError):
        if not _swept:
            _swept = True
            with _records() as records:
                for name in os.listdir(records):
                    with contextlib.suppress(OSError):
                        _sweep(records, name)


@contextlib.contextmanager
def _records() -> Iterator[int]:
    """Descriptor of the folder of the records; `OSError`: none that only this user can write."""
    with contextlib.suppress(FileExistsError):
        RECORDS.mkdir(mode=0o700)
    folder = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{RECORDS} is open to other users")
        yield folder
    finally:
        os.close(folder)


def _new_record(records: int) -> int:
    global _record_name
    while True:
        _record_name = secrets.token_hex(8)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        record = os.open(_record_name, flags, 0o600, dir_fd=records)
        fcntl.flock(record, fcntl.LOCK_EX)
        if os.fstat(record).st_nlink:  # nobody has taken it for one that was left
            return record
        os.close(record)


def _end(owner: int) -> None:
    """Remove what this process, `owner`, has left itself, and its record; not in a fork of it."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        _remove_all(_claimed)
        if _record is not None:
            with _records() as records:
                os.unlink(_record_name, dir_fd=records)


def _sweep(records: int, name: str) -> None:
    record = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=records)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(record)
        if status.st_nlink and stat.S_ISREG(status.st_mode):
            words = os.pread(record, status.st_size, 0).split(b"\0")[:-1]
            _remove_all([Path(os.fsdecode(word)) for word in words])
            os.unlink(name, dir_fd=records)
    finally:
        os.close(record)


def _remove_all(paths: list[Path]) -> None:
    """Remove what has these paths or, of shared memory, begins with them; else `OSError`."""
    for path in paths:
        if not path.is_absolute() or not _OURS.fullmatch(path.name):
            continue
        if path.parent == SHARED_MEMORY:
            for file in glob.glob(f"{path}*"):
                if _is_own(Path(file), stat.S_ISREG):
                    os.unlink(file)
        elif _is_own(path, stat.S_ISDIR):
            shutil.rmtree(path)


def _is_own(path: Path, has_kind: Callable[[int], bool]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return status.st_uid == os.geteuid() and has_kind(status.st_mode)
    return False
