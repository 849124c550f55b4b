# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Python code of a user, a function or a class in a file, and the processes that run it."""

import ast
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.gpus import users_environment
from nemo_aligner.servers import worker_keeper

# A worker that has died without closing its pipe (a process that it started may hold it, too) is
# noticed this fast.
PROBE_INTERVAL_S = 0.5

# How long the file may take to load.
LOAD_TIMEOUT_S = 120.0


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


def split_spec(spec: str, key: str, kind: str, example: str) -> tuple[str, str]:
    """(absolute path, name) of "path/to/file.py:name", the value of `key`.

    Raises:
        ConfigError: it is not of that form.
        UserError: there is no such file, it is no Python, or does not hold the name at all. More
            is known when it runs.
    """
    path, _, name = str(spec).rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{key}={spec} does not name a {kind}; write path/to/file.py:{kind}, such as "
            f"{example}."
        )
    absolute = Path(path).expanduser().absolute()
    if not absolute.is_file():
        raise UserError(
            f"{key}={spec}: the file {absolute} does not exist; a relative path counts from the "
            "folder in which the job is started."
        )
    source = absolute.read_text(encoding="utf-8", errors="replace")
    try:
        statements = ast.parse(source, absolute.name).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}={spec}: the file cannot be imported: {error}.") from None
    if not re.search(rf"\b({name}|import \*|__getattr__)", source):
        type_ = {"class": ast.ClassDef}.get(kind, ast.FunctionDef)
        own = ", ".join(node.name for node in statements if isinstance(node, type_))
        raise UserError(
            f"{key}={spec}: the file has no {kind} '{name}'; it has {own or 'none at all'}."
        )
    return str(absolute), name


class ClosedError(UserError):
    """The workers are shut down, so none can start."""


class Workers:
    """The worker processes that run one function or class. Any thread may call the methods; a
    worker ends with the thread that started it.

    Args:
        program: path of the program that a worker runs (`worker.py`).
        setting: "key=value" of the configuration, for messages.

    Attributes:
        described: what the program told of the code, once a worker has loaded it.
    """

    described: Any = None

    def __init__(self, path: str, name: str, program: str, setting: str):
        self.path, self.name, self.program, self.setting = path, name, program, setting
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[WorkerProcess] = set()

    def start(self) -> WorkerProcess:
        """Start a worker and wait until it has loaded the code.

        Raises:
            UserError: it cannot be loaded.
            ClosedError: after `close`.
        """
        worker = WorkerProcess(self.path, self.name, self.program)
        with self._lock:
            self._running.add(worker)
            closed = self._closed
        try:
            if closed:
                raise ClosedError(f"{self.setting} is shut down")
            kind, text = worker.receive(LOAD_TIMEOUT_S)
        except TimeoutError:
            kind, text = "error", f"loading the file took longer than {LOAD_TIMEOUT_S:g} s"
        except WorkerEndedError as error:
            kind, text = "error", f"loading the file ended the process ({error})"
        except BaseException:
            self.end(worker)
            raise
        if kind == "error":
            self.end(worker)
            raise UserError(f"{self.setting} ({self.path}): {text}")
        self.described = text
        return worker

    def end(self, worker: WorkerProcess | None) -> None:
        """Kill a worker; only the thread that started it calls it. None is nothing to do."""
        if worker is not None:
            worker.kill()
            worker.release()
            with self._lock:
                self._running.discard(worker)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._running)
        for worker in workers:
            worker.kill()
