# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripts of the project that are killed while they save a checkpoint.

`KILL_IN_SAVE` says in which of their saves (from 1) they get SIGKILL, when all is written but the
mark of completeness.
"""

import os
import runpy
import signal
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/nlp/gpt"


def run_killed(path: str) -> None:
    """Run the script of the project that is called as the file `path` is."""
    from nemo_aligner.checkpoint import checkpointing

    saves, mark = [], checkpointing.mark

    def mark_or_die(*arguments):
        saves.append(arguments)
        if len(saves) == int(os.environ["KILL_IN_SAVE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        mark(*arguments)

    checkpointing.mark = mark_or_die
    runpy.run_path(str(SCRIPTS / Path(path).name), run_name="__main__")
