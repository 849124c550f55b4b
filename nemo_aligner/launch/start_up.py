# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a job does before and around its heavy imports, the check of the installed packages, and
where goes what libraries say. Imports no package.
"""

import contextlib
import functools
import gc
import logging
import os
import platform
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from nemo_aligner.parallel.environment import is_rank_zero


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
            origin = record.pathname
            if record.funcName == "_showwarning" and record.args:  # a warning that NeMo logs
                said = record.args[0] if isinstance(record.args, tuple) else ""
                origin = str(said).partition(":")[0]
            if record.levelno >= logging.ERROR or not is_library(origin):
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


remarks = Remarks()
