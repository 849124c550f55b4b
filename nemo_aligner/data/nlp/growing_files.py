# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A file that a command writes line by line; stopped, the command goes on where the file ends."""

from collections.abc import Callable, Iterable
from pathlib import Path

from nemo_aligner.checkpoint.checksums import save_error


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
        raise save_error(path, error) from None
