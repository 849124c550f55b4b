# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs of progress of a job, its exit code, and its `ending.json`. Imports nothing heavy."""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from enum import IntEnum
from pathlib import Path

ENDING_FILE = "ending.json"

_folder: Path | None = None  # where the ending of the job is still to be written
_writes = False  # this rank does that


class ExitCode(IntEnum):
    """Exit codes of scripts and commands; docs/troubleshooting.md says what to do about each."""

    FINISHED = 0
    FAILED = 1  # an error, an alarm, or what a server reported
    USER_ERROR = 2  # a key, a file or an address to correct; the disk is full
    TIME = 75  # the time limit is over
    PRE_EMPTED = 76  # SIGTERM, Ctrl-C or SIGUSR1
    LOST_PEER = 77  # a process that the job needs has ended, or hangs
    INTERRUPTED = 130  # Ctrl-C on a command that is no job


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its `parent` ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(ExitCode.FAILED)


class JobStopped(SystemExit):
    """The job ends before its last step, as it was asked to; `reason` says by whom."""

    code: ExitCode

    def __init__(self, code: ExitCode, reason: str):
        super().__init__(code)
        self.code, self.reason = code, reason


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a Ctrl-C that nobody else takes ends the process in one line."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nCtrl-C: the command has ended.", file=sys.stderr, flush=True)
        raise SystemExit(ExitCode.INTERRUPTED) from None


def keep_ending_in(folder: Path, is_rank_zero: bool = True) -> None:
    """Have rank 0 note the ending in `folder` (a former one goes); any rank may call it."""
    global _folder, _writes
    _folder, _writes = folder, is_rank_zero
    if is_rank_zero:
        (folder / ENDING_FILE).unlink(missing_ok=True)


def stand_in_for_rank_zero() -> None:
    """Have this rank write the ending, if rank 0, which is out of reach, has not."""
    global _writes
    _writes = _folder is not None and not (_folder / ENDING_FILE).exists()


def ending_file() -> Path | None:
    """Where the ending of this process is still to be written; None if it writes none."""
    return None if _folder is None or not _writes else _folder / ENDING_FILE


def note_ending(code: ExitCode, reason: str, step: int | None = None) -> None:
    """Write `ending.json`, if this process keeps one; `step`: finished steps, of a job that counts
    them. The first ending counts: what breaks later follows from it.
    """
    global _folder
    file = ending_file()
    if file is None:
        return
    _folder = None
    ending = {
        "code": int(code),
        "name": code.name,
        "reason": reason,
        "step": step,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # a full disk must not hide why the job ends
        # Several machines may write one.
        part = file.with_name(f"{ENDING_FILE}.{secrets.token_hex(4)}")
        part.write_text(json.dumps(ending) + "\n")
        os.replace(part, file)


# ------------------------------------------------------------------------------ signs of progress


class Progress:
    """The progress of this process, `progress`: the `count` of units of work that have ended,
    whether the main thread's work is counted (`is_expected`), and a watchdog's `before_exit`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_expected = False
        self.before_exit: Callable[[], object] | None = None
        self._phases: list[str] = []

    @property
    def phase(self) -> str:
        """What the main thread is about, the innermost name; "start" before the first."""
        return self._phases[-1] if self._phases else "start"

    def made(self) -> None:
        """A unit of work has ended; any thread calls it."""
        self.count += 1

    @contextlib.contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Inside, the main thread is in the phase `name`."""
        self.count += 1
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()
            self.count += 1

    @contextlib.contextmanager
    def expected(self, is_expected: bool = True) -> Iterator[None]:
        """Inside, units of work are counted, or, with False, not: a step may take long."""
        before, self.is_expected = self.is_expected, is_expected
        self.count += 1
        try:
            yield
        finally:
            self.is_expected = before
            self.count += 1


progress = Progress()
