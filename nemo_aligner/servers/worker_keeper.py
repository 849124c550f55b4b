# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The program between a server and a worker (`worker.py`); one process per worker.

    python worker_keeper.py SERVER_PID REQUESTS_FD REPLIES_FD WORKER_COMMAND...

It ends with the server, with the worker, or with SIGTERM, and then kills every process that the
worker has started; on Linux it adopts the orphans among them for that. It ends as the worker did.

What worker and descendants print goes through pipes which are always read, so that no writer
waits. In each `WINDOW_S`, `PRINTED_BYTES` of each go to the server's own; a line says how much was
left out. Only the standard library is needed, so that it starts in a moment.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

PRINTED_BYTES = 20_000
WINDOW_S = 60.0
# How long processes may take to die, and the server's output to accept what is left.
KILL_S, FLUSH_S = 10.0, 1.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    server, requests_fd, replies_fd = map(int, sys.argv[1:4])
    wake, waker = os.pipe()
    for number in (wake, waker):
        os.set_blocking(number, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    asked_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # it has ended already
        return
    outputs = [Output(1), Output(2)]
    worker = start_worker(sys.argv[4:], (requests_fd, replies_fd), outputs)
    status = None
    while status is None and not asked_to_end:
        wait(wake, outputs, WINDOW_S)
        status = reap()[0].get(worker)
    status = kill_descendants(worker, status, wake, outputs)
    finish(outputs)
    end_like(status)


def start_worker(command: list[str], passed: tuple[int, int], outputs: "list[Output]") -> int:
    """Return the process id of `command`, in a session of its own; `passed` are closed here."""
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            os.setsid()
            for output in outputs:
                os.dup2(output.writer, output.target)
            os.execv(command[0], [*command, *map(str, passed), str(keeper)])
        finally:
            os._exit(127)
    for number in (*passed, *(output.writer for output in outputs)):
        os.close(number)
    return worker


class Output:
    """One of the worker's output streams on its way to the server's."""

    def __init__(self, target: int):
        self.target = target
        self.reader, self.writer = os.pipe()  # not inherited across exec
        os.set_blocking(self.reader, False)
        self.open = True
        self.pending = b""
        self._left, self._dropped, self._window_ends = PRINTED_BYTES, 0, 0.0

    def read(self) -> bool:
        """Take what lies in the pipe, up to its usual size; whether there was something."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        self.open = bool(data)
        self.renew()
        self.pending += data[: self._left]
        self._dropped += max(len(data) - self._left, 0)
        self._left = max(self._left - len(data), 0)
        return self.open

    def renew(self, end: bool = False) -> None:
        """Begin a new window if the last one is over (`end`: it is), and say what it dropped."""
        if end or time.monotonic() >= self._window_ends:
            # A server whose output is stuck gets the line later.
            if self._dropped and len(self.pending) <= PRINTED_BYTES:
                line = f"[{self._dropped} bytes of a reward function's output are left out]"
                self.pending += f"\n{line}\n".encode()
                self._dropped = 0
            self._left = max(PRINTED_BYTES - len(self.pending), 0)
            self._window_ends = time.monotonic() + WINDOW_S

    def write(self) -> None:
        """Write a part that a pipe which polls as writable takes without waiting."""
        try:
            self.pending = self.pending[os.write(self.target, self.pending[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass
        except OSError:  # a closed log must not fail a sample
            self.pending = b""


def wait(wake: int, outputs: list[Output], timeout_s: float) -> None:
    """Forward output until a signal comes or `timeout_s` is over, at least once."""
    deadline = time.monotonic() + timeout_s
    while True:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for output in outputs:
            if output.open:
                poll.register(output.reader, select.POLLIN)
            if output.pending:
                poll.register(output.target, select.POLLOUT)
        ready = {number for number, _ in poll.poll(1000 * max(deadline - time.monotonic(), 0))}
        for output in outputs:
            output.renew()
            if output.reader in ready:
                output.read()
            if output.target in ready:
                output.write()
        if wake in ready:
            os.read(wake, 1 << 10)
            return
        if time.monotonic() >= deadline:
            return


def reap() -> tuple[dict[int, int], bool]:
    """The wait statuses of children that have ended, by id, and whether others are left."""
    ended: dict[int, int] = {}
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    except ChildProcessError:
        return ended, False
    return ended, True


def kill_descendants(
    worker: int, status: int | None, wake: int, outputs: list[Output]
) -> int | None:
    """Kill until no child is left; returns the worker's wait status, None if it still runs."""
    deadline = time.monotonic() + KILL_S
    left = True
    while left and time.monotonic() < deadline:
        for child in children() or [worker] * (status is None):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        ended, left = reap()
        status = ended.get(worker, status)
        if left:
            wait(wake, outputs, 0.01)
    return status


def children() -> list[int]:
    found, own = [], str(os.getpid()).encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    # PID (NAME, which may hold anything) STATE PARENT ...
                    if file.read().rpartition(b")")[2].split()[1] == own:
                        found.append(int(name))
    return found


def finish(outputs: list[Output]) -> None:
    """Forward what still lies in the pipes, for `FLUSH_S` at most: nobody writes any more."""
    deadline = time.monotonic() + FLUSH_S
    for output in outputs:
        while output.open and output.read() and time.monotonic() < deadline:
            pass
        output.renew(end=True)
        while output.pending and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(output.target, select.POLLOUT)
            if poll.poll(100):
                output.write()


def end_like(status: int | None) -> None:
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
