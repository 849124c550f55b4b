# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A script that is one of the project's, an actor's or a critic's as `KILLED_SIDE` says, and gets
SIGKILL in the save (from 1) that `KILL_IN_SAVE` says, when all is written but the mark of
completeness.
"""

import os
import runpy
import signal
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/nlp/gpt"
NAMES = {"actor": "train_gpt_ppo_actor.py", "critic": "serve_ppo_critic.py"}

if __name__ == "__main__":
    from nemo_aligner.checkpoint import folders

    saves, mark = [], folders.mark

    def mark_or_die(*arguments):
        saves.append(arguments)
        if len(saves) == int(os.environ["KILL_IN_SAVE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        mark(*arguments)

    folders.mark = mark_or_die
    runpy.run_path(str(SCRIPTS / NAMES[os.environ["KILLED_SIDE"]]), run_name="__main__")
