# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What libraries log and warn of goes to a file of the run, except errors, and unless
`NEMO_ALIGNER_VERBOSE` is in the environment (`-v` of the command). Imports nothing heavy.
"""

import contextlib
import logging
import os
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

VERBOSE = "NEMO_ALIGNER_VERBOSE"
FILE = "libraries.log"
KEPT = 100  # remarks of a process that has no file for them

_PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}  # where pip and distributions put packages
_OWN = os.path.realpath(Path(__file__).parents[1]) + os.sep


def is_verbose() -> bool:
    return os.environ.get(VERBOSE, "0").lower() not in ("", "0", "false", "no")


class Remarks:
    """There is one, `remarks`."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=KEPT)
        self._path: Path | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, remarks of libraries are kept; after an error they are where it is printed."""
        if is_verbose():
            yield
            return
        handle, show = logging.Logger.handle, warnings.showwarning

        def handle_ours(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or not is_library(_origin(record)):
                handle(logger, record)
            elif not logger.disabled:
                self.add(f"{record.levelname} {logger.name}: {record.getMessage()}")

        def show_ours(message, category, filename, lineno, file=None, line=None):
            if file is None and is_library(filename):
                self.add(warnings.formatwarning(message, category, filename, lineno, line))
            else:
                show(message, category, filename, lineno, file, line)

        logging.Logger.handle = handle_ours  # type: ignore[assignment, method-assign]
        warnings.showwarning = show_ours
        try:
            yield
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
            if warnings.showwarning is show_ours:  # NeMo puts its own in the place
                warnings.showwarning = show

    def add(self, text: str) -> None:
        """Keep a remark; any thread calls it."""
        text = text.rstrip("\n")
        self._kept.append(text)
        if self._path is not None:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def write_to(self, folder: Path) -> None:
        """Keep remarks, also those so far, in a file of `folder`."""
        self._path = folder / FILE
        self._path.write_text("".join(f"{text}\n" for text in self._kept), encoding="utf-8")

    def show(self) -> None:
        """After a crash: say where they are, or print them if there is no file."""
        if self._path is not None:
            print(f"What libraries said before: {self._path}", file=sys.stderr)
        elif self._kept:
            print("What libraries said before:", *self._kept, sep="\n", file=sys.stderr)


def is_library(path: str) -> bool:
    """Whether a file is of an installed package or of Python, and not of this package."""
    path = os.path.realpath(path)
    is_theirs = path.startswith(_PYTHON) or not _INSTALLED.isdisjoint(path.split(os.sep))
    return is_theirs and not path.startswith(_OWN)


def _origin(record: logging.LogRecord) -> str:
    """The file whose code says it."""
    if record.funcName == "_showwarning" and record.args:  # a warning that NeMo logs
        return str(record.args[0] if isinstance(record.args, tuple) else "").partition(":")[0]
    return record.pathname


remarks = Remarks()
