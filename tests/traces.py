# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests leave on the machine, removed at their end.

Processes that are killed leave what they had. A job's is removed by the next job; that of other
servers of the tests, and what Triton and Python make under names that say nothing, is not.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nemo_aligner.core.leftovers import SHARED_MEMORY, temporary_folder

ROOT = Path(__file__).resolve().parents[1]
_SWEEP = "from nemo_aligner.core.leftovers import sweep_once; sweep_once()"


class Traces:
    """A temporary folder for this run of the tests and all their processes.

    What pytest keeps for a look at failed tests stays where it is by default.
    """

    def __init__(self) -> None:
        self._since = time.time()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        # Short: the paths of sockets in it have a limit. It is removed when this process ends.
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary_folder("tests_", "/tmp"))

    def remove(self) -> None:
        """Remove what killed processes have left; call it when all have ended.

        What lies in `/tmp` is an empty folder that each Triton makes, in shared memory that of
        Python's `multiprocessing`.
        """
        subprocess.run([sys.executable, "-c", _SWEEP], cwd=ROOT, timeout=60, check=True)
        in_use = _mapped_files()
        for path in Path("/tmp").glob("python_env_*"):
            if self._is_of_this_run(path) and "tritonserver" not in in_use:
                path.rmdir()
        for path in [*SHARED_MEMORY.glob("psm_*"), *SHARED_MEMORY.glob("sem.mp-*")]:
            if self._is_of_this_run(path) and str(path) not in in_use:
                path.unlink()

    def _is_of_this_run(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            return status.st_uid == os.geteuid() and status.st_ctime >= self._since
        return False


def _mapped_files() -> str:
    """The maps of all processes that this user may look into, which name the files they use."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(path.read_text(errors="replace"))
    return "".join(maps)
