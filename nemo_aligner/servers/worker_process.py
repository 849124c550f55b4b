# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The handle on a process that runs code of a user (`reward_worker.py`,
`environment_worker.py`).
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.core.gpus import users_environment
from nemo_aligner.servers import worker_keeper

# A worker that has died without closing its pipe (a process that it started may hold it, too) is
# noticed this fast.
PROBE_INTERVAL_S = 0.5


class WorkerEndedError(Exception):
    """The worker's process has ended; the message says how."""


class WorkerProcess:
    """A worker process and the two pipes to it. One thread uses it; any thread may kill it.

    Args:
        path, name, program: the user's file, what is used of it, and the path of the program.

    Attributes:
        process: its keeper (`worker_keeper.py`), which ends as the worker does and takes with it
            what the function has started. A Ctrl-C on the server's terminal does not reach them.
    """

    def __init__(self, path: str, name: str, program: str):
        requests_end, self._requests = os.pipe()
        self._replies, replies_end = os.pipe()
        numbers = [str(number) for number in (os.getpid(), requests_end, replies_end)]
        keeper = [sys.executable, "-I", "-S", worker_keeper.__file__, *numbers]
        worker = [sys.executable, "-X", "faulthandler", program, path, name]
        # A program may import its neighbours, also where the package is not installed.
        package = str(Path(__file__).parents[2])
        paths = [path for path in (os.environ.get("PYTHONPATH"), package) if path]
        try:
            self.process = subprocess.Popen(
                keeper + worker,
                stdin=subprocess.DEVNULL,
                pass_fds=(requests_end, replies_end),
                start_new_session=True,
                env={**users_environment(), "PYTHONPATH": os.pathsep.join(paths)},
            )
        except BaseException:
            self.release()
            raise
        finally:
            os.close(requests_end)
            os.close(replies_end)
        os.set_blocking(self._requests, False)
        self._reader, self._writer = select.poll(), select.poll()
        self._reader.register(self._replies, select.POLLIN)
        self._writer.register(self._requests, select.POLLOUT)
        self._buffer = b""

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: Sequence[Any], timeout_s: float) -> None:
        """Send a message, of what the program takes.

        Raises:
            TimeoutError: the process does not read.
            WorkerEndedError: it has ended.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while data:
            self._wait(self._writer, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise WorkerEndedError(self._how_it_ended()) from None

    def receive(self, timeout_s: float) -> list[Any]:
        """Wait for the next message and return it, [kind, value].

        Raises:
            TimeoutError: there is none within `timeout_s`.
            WorkerEndedError: the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._wait(self._reader, deadline)
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise WorkerEndedError(self._how_it_ended())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _wait(self, poller: "select.poll", deadline: float) -> None:
        """Return when a pipe is ready, also if this thread only runs after the deadline."""
        while True:
            alive = self.is_alive()  # before the poll: what was written before the end is read
            left = deadline - time.monotonic()
            if poller.poll(1000 * max(min(left, PROBE_INTERVAL_S), 0.0)):
                return
            if not alive:
                raise WorkerEndedError(self._how_it_ended())
            if left <= 0:
                raise TimeoutError

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its pipe only
            self.process.wait(3.0)
        code = self.process.poll()
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:  # the kernel may not let them go: they are left behind
            self.process.kill()

    def release(self) -> None:
        """Close the pipes; only the thread that uses them calls it."""
        os.close(self._requests)
        os.close(self._replies)
