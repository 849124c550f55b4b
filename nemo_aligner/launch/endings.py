# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a process of a job starts: what it does before and around its heavy imports, the check of
installed packages, and where goes what libraries say; and how the job ends: all its processes
together, with one message. Imports no package.
"""

import contextlib
import functools
import gc
import logging
import os
import platform
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from nemo_aligner.core.endings import ExitCode, JobStopped, end_with, interruptible, note_ending
from nemo_aligner.core.errors import (
    AlarmError,
    LostPeerError,
    ServerJobError,
    ServerRequestError,
    UserError,
)
from nemo_aligner.parallel.environment import adopt_mpi_ranks, is_rank_zero
from nemo_aligner.training.stop_requests import stop_requests


@contextlib.contextmanager
def long_imports() -> Iterator[None]:
    """Inside, no garbage is collected, and later not of the million objects of these imports: they
    live as long as the process and cost a quarter of a second per collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()


def share_cores(devices: Any, jobs: int = 1, env: MutableMapping[str, str] | None = None) -> None:
    """Set OMP_NUM_THREADS unless the user has: ranks of one machine (`devices`, or those of
    torchrun and mpirun), and `jobs`, divide its cores. Call it before torch is imported.
    """
    env = os.environ if env is None else env
    if env.get("OMP_NUM_THREADS"):
        return
    if env.get("SLURM_CPUS_PER_TASK"):  # given to this rank of this job alone
        env["OMP_NUM_THREADS"] = env["SLURM_CPUS_PER_TASK"]
        return
    from nemo_aligner.config.parallel_rules import count_devices  # imports packages

    ranks = int(env.get("LOCAL_WORLD_SIZE") or count_devices(devices))
    env["OMP_NUM_THREADS"] = str(max(available_cores() // (ranks * jobs), 1))


def available_cores() -> int:
    """Cores that this process may use, by its affinity and the limit of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()  # "max" without a limit
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


# -------------------------------------------------------------------------------------- versions

DISTRIBUTION = "nemo-aligner-mcore"


def unsupported() -> dict[str, str]:
    """Each requirement of `setup.py` that the environment violates, and what is there instead.
    Empty without an installed `nemo-aligner-mcore`, whose metadata hold the requirements.
    """
    # Here: whoever looks for missing packages (nemo_aligner/doctor.py) imports this module.
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another Python
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        installed = installed_version(requirement.name)
        try:
            fits = installed and requirement.specifier.contains(installed, prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            there = f"installed: {installed}" if installed else "not installed"
            found[f"{requirement.name}{extras}{requirement.specifier}"] = there
    return found


def installed_version(name: str) -> str | None:
    """Version of an installed package; None also where only remains of one are left."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, TypeError):
        return None


def versions() -> dict[str, str]:
    """What a run depends on, for its record."""
    names = (DISTRIBUTION, "torch", "megatron-core", "nemo_toolkit", "transformer-engine")
    found = {name: installed_version(name) for name in names}
    python = f"{platform.python_version()} on {platform.platform()}"
    return {"python": python} | {name: text for name, text in found.items() if text}


@functools.cache
def warn_of_unsupported_versions() -> None:
    """Rank 0 says on stderr, in one line, which packages this project was not tested with."""
    wrong = unsupported()
    if wrong and is_rank_zero():
        needs = "; ".join(f"{wanted} ({there})" for wanted, there in wrong.items())
        names = " ".join(f"'{wanted}'" for wanted in wrong)
        print(
            f"WARNING: nemo_aligner needs {needs}. Remedy: pip install {names}",
            file=sys.stderr,
            flush=True,
        )


# ------------------------------------------------------------------------------ what libraries say


# What libraries log and warn of goes to a file of the run, except errors, and unless this is in
# the environment (`-v` of the command).
VERBOSE = "NEMO_ALIGNER_VERBOSE"
FILE = "libraries.log"
KEPT = 100  # remarks of a process that has no file for them

_PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}  # where pip and distributions put packages
_OWN = os.path.realpath(Path(__file__).parents[1]) + os.sep


def is_verbose() -> bool:
    return os.environ.get(VERBOSE, "0").lower() not in ("", "0", "false", "no")


class Remarks:
    """There is one, `remarks`."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=KEPT)
        self._path: Path | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, remarks of libraries are kept; after an error they are where it is printed."""
        if is_verbose():
            yield
            return
        handle, show = logging.Logger.handle, warnings.showwarning

        def handle_ours(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or not is_library(_origin(record)):
                handle(logger, record)
            elif not logger.disabled:
                self.add(f"{record.levelname} {logger.name}: {record.getMessage()}")

        def show_ours(message, category, filename, lineno, file=None, line=None):
            if file is None and is_library(filename):
                self.add(warnings.formatwarning(message, category, filename, lineno, line))
            else:
                show(message, category, filename, lineno, file, line)

        logging.Logger.handle = handle_ours  # type: ignore[assignment, method-assign]
        warnings.showwarning = show_ours
        try:
            yield
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
            if warnings.showwarning is show_ours:  # NeMo puts its own in the place
                warnings.showwarning = show

    def add(self, text: str) -> None:
        """Keep a remark; any thread calls it."""
        text = text.rstrip("\n")
        self._kept.append(text)
        if self._path is not None:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def write_to(self, folder: Path) -> None:
        """Keep remarks, also those so far, in a file of `folder`."""
        self._path = folder / FILE
        self._path.write_text("".join(f"{text}\n" for text in self._kept), encoding="utf-8")

    def show(self) -> None:
        """After a crash: say where they are, or print them if there is no file."""
        if self._path is not None:
            print(f"What libraries said before: {self._path}", file=sys.stderr)
        elif self._kept:
            print("What libraries said before:", *self._kept, sep="\n", file=sys.stderr)


def is_library(path: str) -> bool:
    """Whether a file is of an installed package or of Python, and not of this package."""
    path = os.path.realpath(path)
    is_theirs = path.startswith(_PYTHON) or not _INSTALLED.isdisjoint(path.split(os.sep))
    return is_theirs and not path.startswith(_OWN)


def _origin(record: logging.LogRecord) -> str:
    """The file whose code says it."""
    if record.funcName == "_showwarning" and record.args:  # a warning that NeMo logs
        return str(record.args[0] if isinstance(record.args, tuple) else "").partition(":")[0]
    return record.pathname


remarks = Remarks()


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
