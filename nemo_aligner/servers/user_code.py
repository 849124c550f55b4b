# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Python code of a user, a function or a class in a file, and the processes that run it.

Each process is driven by a thread (`Pool`), which starts it, feeds it tasks, reads what comes
back, and kills and replaces it when an item takes too long or ends it.
"""

import ast
import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.parallel.environment import users_environment
from nemo_aligner.servers import worker as worker_program
from nemo_aligner.servers.threads import in_thread

PROBE_INTERVAL_S = 0.5  # looks at a worker, whose pipe another process may hold open
LOAD_TIMEOUT_S = 120.0


class WorkerEndedError(Exception):
    """The worker's process has ended; the message says how."""


class WorkerProcess:
    """A worker process and the two pipes to it. One thread uses it; any thread may kill it.

    Args:
        path, kind, name: the user's file, and the "function" or "class" that is used of it.
        setting: "key=value" of the configuration, for messages.
    """

    def __init__(self, path: str, kind: str, name: str, setting: str):
        self._where = f"{setting} ({path})"
        self.known: set[int] = set()  # conversations of which it has the state (worker.py)
        requests_end, self._requests = os.pipe()
        self._replies, replies_end = os.pipe()
        numbers = [str(number) for number in (requests_end, replies_end, os.getpid())]
        program = [sys.executable, "-X", "faulthandler", worker_program.__file__, path, kind, name]
        # The code may import nemo_aligner, also where the package is not installed.
        paths = filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])])
        try:
            self.process = subprocess.Popen(  # its keeper
                program + numbers,
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

    def load(self) -> Any:
        """What is told of the code, once it is loaded; `UserError`: it cannot be."""
        try:
            kind, told = self.receive(LOAD_TIMEOUT_S)
        except TimeoutError:
            kind, told = "error", f"loading the file took longer than {LOAD_TIMEOUT_S:g} s"
        except WorkerEndedError as error:
            kind, told = "error", f"loading the file ended the process ({error})"
        if kind == "error":
            raise UserError(f"{self._where}: {told}")
        return told

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def outcomes(self, items: Sequence[Any], timeout_s: float) -> Iterator[list[Any]]:
        """What comes of each item, [kind, value], within `timeout_s`; else as `receive`."""
        self.send(items, timeout_s)
        for _ in items:
            yield self.receive(timeout_s)

    def send(self, message: Sequence[Any], timeout_s: float) -> None:
        """Send a message. `TimeoutError`: the process does not read it; `WorkerEndedError`."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while data:
            self._wait(self._writer, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise WorkerEndedError(self._how_it_ended()) from None

    def receive(self, timeout_s: float) -> list[Any]:
        """The next message, [kind, value]. `TimeoutError`: there is none; `WorkerEndedError`."""
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
    """(absolute path, name) of "path/to/file.py:name", the value of `key`; else `UserError`."""
    path, _, name = str(spec).rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{key}={spec} does not name a {kind}; write path/to/file.py:{kind}, such as "
            f"{example}."
        )
    absolute = Path(path).expanduser().absolute()
    if not absolute.is_file():
        raise UserError(f"{key}={spec}: the file {absolute} does not exist; correct the path.")
    source = absolute.read_text(encoding="utf-8", errors="replace")
    try:
        statements = ast.parse(source, absolute.name).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}={spec}: the file cannot be imported: {error}.") from None
    if not re.search(rf"\b({name}|import \*|__getattr__)", source):
        type_ = ast.ClassDef if kind == "class" else ast.FunctionDef
        own = [node.name for node in statements if isinstance(node, type_)] or ["none at all"]
        raise UserError(f"{key}={spec}: the file has no {kind} '{name}'; it has {', '.join(own)}.")
    return str(absolute), name


@dataclass(eq=False)
class Task:
    """Items that one worker works off, in their order."""

    left: deque[Any]  # items without an outcome
    # from a worker and `left` to the message that the worker gets, and the time limit of an item
    message: Callable[[Any, Sequence[Any]], tuple[list[Any], float]]
    # takes the outcome of an item: its value, or with kind "error" why there is none
    note: Callable[[Any, str, Any], None]
    fail: Callable[[Exception], None]  # called if no worker could be started
    is_over: Callable[[], bool] = lambda: False  # whether nobody waits for outcomes any more


class Pool:
    """Threads, each with a worker of its own and a queue of tasks, which may be shared; all have
    loaded the code, else the error of one is raised. `make` starts a worker: a `WorkerProcess`, or
    what takes its place (`web.py`). `limit`: the time limit of an item and its key, for messages.
    """

    told: Any = None  # by a worker of the code

    def __init__(
        self,
        make: Callable[[], Any],
        queues: "Sequence[queue.SimpleQueue[Task | None]]",
        limit: str,
    ):
        self._make, self._queues, self._limit = make, queues, limit
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[Any] = set()
        ready: list[Future[None]] = [Future() for _ in queues]
        self.threads = [in_thread("worker", self._drive, *each) for each in zip(queues, ready)]
        try:
            for future in ready:
                future.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the workers. Any thread may call it, more than once."""
        with self._lock:
            self._closed = True
            workers = list(self._running)
        for worker in workers:
            worker.kill()
        for tasks in self._queues:
            tasks.put(None)
        end = time.monotonic() + 5.0
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    # ---- the thread of a worker, which the kernel kills with it ----

    def start(self) -> Any:
        """Start a worker and wait until it has loaded the code; `UserError`: it cannot."""
        with self._lock:
            if self._closed:
                raise UserError("the workers are shut down")
            worker = self._make()
            self._running.add(worker)
        try:
            self.told = worker.load()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Any) -> Any:
        if worker is not None:
            worker.kill()
            worker.release()
            with self._lock:
                self._running.discard(worker)
        return None

    def _drive(self, tasks: "queue.SimpleQueue[Task | None]", ready: "Future[None]") -> None:
        worker = None
        try:
            worker = self.start()
            ready.set_result(None)
            while (task := tasks.get()) is not None and not self._closed:
                if task.is_over():  # it has failed on another sample
                    continue
                worker = self._work_off(worker, task) or self._start_ahead()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            self._end(worker)

    def _start_ahead(self) -> Any:
        """A worker for the next task; None if none starts: `_work_off` tries again, or fails."""
        with contextlib.suppress(Exception):
            return self.start()

    def _work_off(self, worker: Any, task: Task) -> Any:
        try:
            while task.left and not task.is_over():
                if worker is None or not worker.is_alive():
                    worker = self._end(worker)
                    worker = self.start()
                why = self._feed(worker, task)
                if why is not None:
                    worker = self._end(worker)
                    task.note(task.left.popleft(), "error", why)
        except Exception as error:  # no new worker could start: not the fault of an item
            task.fail(error)
        # A worker may still have items of a request that failed.
        return self._end(worker) if task.left else worker

    def _feed(self, worker: Any, task: Task) -> str | None:
        """Have `worker` work on what is left; returns what the first item did to it, or None."""
        message, limit_s = task.message(worker, task.left)
        try:
            for kind, value in worker.outcomes(message, limit_s):
                task.note(task.left.popleft(), kind, value)
                progress.made()
                if task.is_over():
                    break
        except TimeoutError:
            return f"it took longer than {self._limit} and was stopped"
        except WorkerEndedError as error:
            return f"it ended its process ({error})"
        return None
