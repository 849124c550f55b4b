# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a job ends: all its processes together, with one message. Imports nothing heavy."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from nemo_aligner.core.endings import ExitCode, JobStopped, end_with, interruptible, note_ending
from nemo_aligner.core.errors import (
    AlarmError,
    LostPeerError,
    ServerJobError,
    ServerRequestError,
    UserError,
)
from nemo_aligner.launch.start_up import remarks, warn_of_unsupported_versions
from nemo_aligner.parallel.environment import adopt_mpi_ranks, is_rank_zero
from nemo_aligner.training.stop_requests import stop_requests

P = ParamSpec("P")
R = TypeVar("R")

# Processes of this node that were started from this one (`processes.launch_processes`).
started_processes: list[subprocess.Popen] = []
# The lists of them that Lightning's launcher watches.
_watched: list[list[subprocess.Popen]] = []
_ends_at_once = threading.Event()
STARTED_BY = "NEMO_ALIGNER_STARTED_BY"

# After an error: how long another process may take to fail for the same reason.
_FAILURE_GRACE_S = 5.0
# After a user's error: how long another rank leaves the message to rank 0.
_RANK_ZERO_FIRST_S = 10.0
# After the work: how long another process may take to end.
_EXIT_GRACE_S = 60.0


def user_errors_end_the_job(main: Callable[P, R], is_job: bool = False) -> Callable[P, R]:
    """Decorator of a script's `main`: every process of the job ends with it, in success and in
    failure, with a code of `ExitCode`. `is_job`: the same command continues what a Ctrl-C ends. An
    error whose message says what to do is printed without a traceback, by rank 0 alone if all
    ranks have it. SIGTERM, Ctrl-C and SIGUSR1 are requests to end (training/stop_requests.py).
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with interruptible(), remarks.aside(), stop_requests.watching(end_at_once, is_job):
            return _run(main, *args, **kwargs)

    return run


def _run(main: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    end_with_starter()
    try:
        adopt_mpi_ranks(os.environ)  # here, so that its error is one message too
        warn_of_unsupported_versions()
        try:
            result = main(*args, **kwargs)
        finally:
            if _ends_at_once.is_set():  # what fails now follows from the end of other processes
                time.sleep(_EXIT_GRACE_S)
    except (UserError, ServerRequestError, ServerJobError, AlarmError) as error:
        if not is_rank_zero():
            time.sleep(_RANK_ZERO_FIRST_S)  # rank 0 ends this process if it has failed too
        print(f"\nERROR: {error}", file=sys.stderr, flush=True)
        code = _exit_code(error)
        note_ending(code, str(error), stop_requests.step)
        _end_started_processes(0.0)
        raise SystemExit(code) from None
    except JobStopped:
        _end_started_processes(_EXIT_GRACE_S)
        if _was_started():
            raise SystemExit(ExitCode.FINISHED) from None
        raise
    except KeyboardInterrupt:
        _end_started_processes(0.0)
        raise
    except BaseException as error:
        if not isinstance(error, SystemExit):
            remarks.show()
        note_ending(ExitCode.FAILED, f"{type(error).__name__}: {error}", stop_requests.step)
        _end_started_processes(_FAILURE_GRACE_S)
        raise
    if not _end_started_processes(_EXIT_GRACE_S):
        note_ending(ExitCode.FAILED, "another process of the job failed", stop_requests.step)
        raise SystemExit(ExitCode.FAILED)
    note_ending(ExitCode.FINISHED, "finished", stop_requests.step)
    return result


def adopt(processes: list[subprocess.Popen]) -> None:
    """Have `processes`, which Lightning's launcher watches, end with this one."""
    started_processes.extend(processes)
    _watched.append(processes)


def end_at_once(code: ExitCode, asked_by: int | None = None) -> NoReturn:
    """End this process, which cannot do it in order, and the job; any thread calls it. If rank 0
    has started it, that one ends first, by the same signal `asked_by`: Lightning would change the
    code.
    """
    _ends_at_once.set()
    if _was_started():
        for _ in range(2):  # the first one alone may wait for the end of a step
            if asked_by is not None:
                os.kill(os.getppid(), asked_by)
            time.sleep(_RANK_ZERO_FIRST_S / 2)
    _end_started_processes(0.0)
    sys.stdout.flush()
    os._exit(code)


def end_with_starter() -> None:
    """If rank 0 has started this process, let it be killed when rank 0 ends, or end now if it has.
    Call it early: an orphan would wait for the other ranks.
    """
    starter = os.environ.get(STARTED_BY)
    if starter is not None:
        end_with(int(starter))


def _was_started() -> bool:
    """Lightning's launcher kills the job if a process that rank 0 started does not end with 0."""
    return os.environ.get(STARTED_BY) == str(os.getppid())


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, UserError):
        return ExitCode.USER_ERROR
    if isinstance(error, LostPeerError):
        # A scheduler asks all jobs of a pair at once, and the peer was faster.
        return ExitCode.PRE_EMPTED if stop_requests.received else ExitCode.LOST_PEER
    return ExitCode.FAILED


def _end_started_processes(grace_s: float) -> bool:
    """Wait, then kill what is left; True if all ended well by themselves."""
    for processes in _watched:
        # Lightning would kill this process before its error is printed.
        processes.clear()
    deadline = time.monotonic() + grace_s
    for process in started_processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
    for rank, process in enumerate(started_processes, 1):
        if process.poll():  # what this one fails of may be the death of that one
            print(f"rank {rank} has ended with code {process.returncode}.", file=sys.stderr)
    alive = [process for process in started_processes if process.poll() is None]
    for process in alive:
        process.kill()
        process.wait()
    return not alive and all(process.returncode == 0 for process in started_processes)
