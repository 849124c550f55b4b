# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripts of the project that meet a fault while they save a checkpoint.

`KILL_IN_SAVE` says in which of their saves (from 1) they get SIGKILL, when all is written but the
mark of completeness; `NO_SPACE_IN_SAVE` in which the disk is full when weights are written.
"""

import errno
import os
import runpy
import signal
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/nlp/gpt"


def run_killed(path: str) -> None:
    """Run the script of the project that is called as the file `path` is."""
    from nemo_aligner.checkpoint import checksums, folders

    saves, mark, write = [], folders.mark, checksums._Stream.write

    def mark_or_die(*arguments):
        saves.append(arguments)
        if len(saves) == int(os.environ.get("KILL_IN_SAVE", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        mark(*arguments)

    def write_or_fail(stream, data):
        if len(saves) + 1 == int(os.environ.get("NO_SPACE_IN_SAVE", 0)):
            saves.append("failed")
            error = OSError(errno.ENOSPC, "No space left on device")
            stream.failed(error)
            raise error
        return write(stream, data)

    folders.mark = mark_or_die
    checksums._Stream.write = write_or_fail
    runpy.run_path(str(SCRIPTS / Path(path).name), run_name="__main__")
