# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests leave on the machine, removed at their end."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from nemo_aligner.core.leftovers import temporary_folder

ROOT = Path(__file__).resolve().parents[1]
_SWEEP = "from nemo_aligner.core.leftovers import sweep_once; sweep_once()"


class Traces:
    """A temporary folder for this run of the tests and all their processes, unless TMPDIR names
    one. What pytest keeps for a look at failed tests stays where it is by default.

    Args:
        tritons: folder in which each Triton makes an empty `python_env_*`.
    """

    def __init__(self, tritons: Path = Path("/tmp")) -> None:
        self._since, self._tritons = time.time(), tritons
        if "TMPDIR" not in os.environ:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
            # Short: the paths of sockets in it have a limit. It goes when this process ends.
            os.environ["TMPDIR"] = tempfile.tempdir = str(temporary_folder("tests_", "/tmp"))

    def remove(self) -> None:
        """Remove what killed processes have left, as the next job would, and the folders that
        killed Tritons have left since this object was made; no Triton may be alive.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", _SWEEP], cwd=ROOT, timeout=60)
        left = list(self._tritons.glob("python_env_*"))
        if "tritonserver" in [process.info["name"] for process in psutil.process_iter(["name"])]:
            return
        for path in left:
            with contextlib.suppress(OSError):  # it has gone by itself, or is not empty
                status = path.lstat()
                if status.st_uid == os.geteuid() and status.st_ctime >= self._since:
                    path.rmdir()
