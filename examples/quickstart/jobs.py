# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The child processes of a walk-through: started, followed through their metrics file, and stopped
in every case.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# A critic server ends its job (Triton, shared memory, ports) within 15 s of SIGTERM; kill only
# after that.
STOP_SECONDS = 20.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None)  # loaded now: after a fork few calls are safe
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobFailed(Exception):
    """A child process ended with an error.

    Attributes:
        job: which one.
    """

    def __init__(self, job: "Job"):
        super().__init__(
            f"{job.name} ended with exit code {job.process.returncode}; its log is {job.log_path}"
        )
        self.job = job


class Interrupted(BaseException):
    """A signal asked for the end; not an `Exception`, so that nothing swallows it."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Job:
    """One script of the project in its own process, with its own folder, log and metrics file."""

    def __init__(
        self, name: str, command: list[str], folder: Path, env: dict[str, str] | None = None
    ):
        self.name = name
        self.command = command
        self.folder = folder
        self.log_path = folder.parent / f"{folder.name}.log"
        self.env = env or {}
        self.metrics = MetricsTail(folder / "metrics.jsonl")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder.parent,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    **self.env,
                },
                # Ctrl-C reaches only this process, which stops the children in order.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_lines(self, count: int = 25) -> list[str]:
        """The end of the log."""
        text = (
            self.log_path.read_bytes()[-64_000:].decode("utf-8", errors="replace")
            if self.log_path.exists()
            else ""
        )
        return text.replace("\r", "\n").splitlines()[-count:]

    def stop(self) -> None:
        """Send SIGTERM to the process, which ends its own children; then kill what is left of its
        group.
        """
        if self.process is None:
            return
        if self.is_running():
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Jobs:
    """Context in which jobs run: signals become `Interrupted`, and every child is stopped when it
    is left, in whatever way.
    """

    def __init__(self):
        self.started: list[Job] = []
        self.peak_memory = 0
        self._old_handlers = {}

    def __enter__(self) -> "Jobs":
        self._old_handlers = {signum: signal.signal(signum, _interrupt) for signum in SIGNALS}
        return self

    def __exit__(self, *exc_info) -> None:
        # A second Ctrl-C must not cut the clean-up short; STOP_SECONDS bounds it.
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        # The newest first, so that an actor does not see its critic vanish.
        for job in reversed(self.started):
            job.stop()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)

    def start(self, job: Job) -> None:
        self.started.append(job)
        job.start()

    def follow(
        self, job: Job, on_records, companions: tuple[Job, ...] = (), poll_seconds: float = 0.1
    ) -> None:
        """Wait for `job`, and hand its new metrics records to `on_records` as they appear.

        Args:
            on_records: called with a list, which is empty as a heartbeat.
            companions: the job needs them until it ends.

        Raises:
            JobFailed: the job failed, or one of the companions ended before it.
        """
        next_memory = 0.0
        while True:
            running = job.is_running()
            on_records(job.metrics.poll())
            if time.monotonic() >= next_memory:
                self.peak_memory = max(self.peak_memory, tree_memory())
                next_memory = time.monotonic() + 2.0
            if not running and job.process.returncode == 0:
                return
            # First: when a companion dies, the job fails too, but its reason says less.
            for companion in companions:
                if not companion.is_running():
                    raise JobFailed(companion)
            if not running:
                raise JobFailed(job)
            time.sleep(poll_seconds)


class MetricsTail:
    """Reads the complete lines that a `metrics.jsonl`, which may not exist yet, has gained since
    the last call.
    """

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0

    def poll(self) -> list[dict]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


def tree_memory() -> int:
    """Bytes of memory of this process and all its descendants; shared pages count once (PSS) where
    the system reports them.
    """
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", None) or info.rss
        except psutil.Error:
            continue  # the process has ended since it was listed
    return total


def _interrupt(signum, frame) -> None:
    raise Interrupted(signum)


def _end_with_parent() -> None:
    """In the child, before exec: ask Linux for SIGTERM when the parent dies, even if it is
    killed.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
