# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A Triton server of another project as a child process of a test, with nothing left behind."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from nemo_aligner.servers.ports import find_free_port
from tests.patience import Deadline
from tests.processes import family, kill_all

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def running_triton(port: int):
    """Triton in this process: serves what is bound in the `with` block, then, until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the tests
    from pytriton.triton import Triton, TritonConfig

    options = {"allow_grpc": False, "allow_metrics": False, "exit_timeout_secs": 10}
    config = TritonConfig(http_address="127.0.0.1", http_port=port, **options)
    with tempfile.TemporaryDirectory() as workspace:
        with Triton(config=config, workspace=workspace + "/w") as triton:
            yield triton
            triton.run()
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


class TritonProcess:
    """A Python process with a Triton server of its own, on a port of its own. Leaving the `with`
    block ends it.

    Args:
        model: the endpoint that is served last.
    """

    def __init__(self, model: str):
        self.directory = Path(tempfile.mkdtemp(prefix="srv_", dir="/tmp"))
        self.port, self.model = find_free_port(), model
        self.process: subprocess.Popen | None = None

    def run_python(self, *command: str) -> None:
        """Run `python command`, with Triton's libraries in its path, without waiting until it is
        ready.
        """
        from nemo_aligner.servers.triton_environment import find_libpython

        libraries = [find_libpython(), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.directory),
            "PYTRITON_HOME": str(self.directory),  # of servers without a workspace of their own
            "LD_LIBRARY_PATH": ":".join(path for path in libraries if path),
        }
        with (self.directory / "log.txt").open("a") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process = subprocess.Popen([sys.executable, *command], env=environment, **streams)

    def is_ready(self) -> bool:
        from nemo_aligner.servers.exchange import Peer

        return Peer("127.0.0.1", self.port).status(f"/v2/models/{self.model}/ready", 2.0) == 200

    def wait_until_ready(self, limit_s: float = 60.0) -> None:
        """Return once the last endpoint is served."""
        deadline = Deadline(limit_s)
        while not self.is_ready():
            if self.process.poll() is not None or deadline.passed():
                raise AssertionError(
                    f"the server did not come up:\n{(self.directory / 'log.txt').read_text()}"
                )
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.directory)

    def family(self) -> list[psutil.Process]:
        """Its processes: Python, then Triton with its stubs."""
        return family(self.process.pid) if self.process.poll() is None else []

    def kill(self) -> None:
        """Send SIGKILL to all of its processes: to clients, the loss of its machine."""
        if self.process is None:
            return
        files = self._files_elsewhere()
        kill_all(reversed(self.family()))  # Triton first
        self.process.wait(10)
        # Of one that has ended by itself nothing else is known; the spelling is PyTriton's.
        files |= set(Path("/dev/shm").glob(f"pytrtion{self.process.pid}-*"))
        for file in files:
            if file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink(missing_ok=True)

    def _files_elsewhere(self) -> set[Path]:
        """What its processes have in shared memory, and the copies of models that Triton makes."""
        found = set()
        for member in self.family():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended since
                mapped = Path(f"/proc/{member.pid}/maps").read_text()
                used = " ".join([mapped, *member.cmdline()])
                found |= set(re.findall(r"/dev/shm/\S+|/tmp/folder\w{6}\b", used))
        return {Path(path) for path in found}
