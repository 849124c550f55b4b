# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether jobs can run on this machine, and what to do where not: `nemo-aligner doctor`. Nothing
beyond Python's own library is imported without a safeguard: packages may be missing.
"""

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType

from nemo_aligner.core.errors import UserError
from nemo_aligner.launch import start_up
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.servers.triton_environment import check_libpython, folder_of_workspaces

OK, WARNING, MISSING = "ok", "warning", "missing"
PYTHONS = ((3, 10), (3, 13))  # the first, and the first that is too new; as in setup.py
GLIBC = (2, 35)  # of the wheels of PyTriton 0.7
# Packages with a line of their own, by the imported module; later ones import earlier ones.
IMPORTED = {
    "numpy": "numpy",
    "torch": "torch",
    "megatron-core": "megatron.core",
    "nvidia-pytriton": "pytriton",
}
MAKE = "Install Python 3.10, 3.11 or 3.12 and name it: make PYTHON=python3.11"
SHARED_MEMORY = Path("/dev/shm")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the control group
LOOPBACK = "127.0.0.1"
YEARS = (2025, 2100)
MAX_DRIFT_S = 0.05
MB, GB = 2**20, 2**30


@dataclass(frozen=True)
class Finding:
    status: str  # `ok`; `warning`: jobs run, but slower or not all of them; `missing`: they do not
    subject: str  # the thing
    text: str  # what is there
    remedy: str = ""  # what to do; empty where nothing has to be done

    def line(self) -> str:
        text = " ".join(f"{self.text}. {self.remedy}".split()) if self.remedy else self.text
        return f"{self.status:<9}{self.subject:<20}{text}"


def graded(
    subject: str, text: str, value: float, low: float, enough: float, remedy: str
) -> Finding:
    """Missing below `low`, a warning below `enough`, else ok."""
    if value >= enough:
        return Finding(OK, subject, text)
    return Finding(MISSING if value < low else WARNING, subject, text, remedy)


def summary(findings: Sequence[Finding]) -> str:
    missing, warned = (
        ", ".join(finding.subject for finding in findings if finding.status == status)
        for status in (MISSING, WARNING)
    )
    if missing:
        return f"Jobs cannot run here: see {missing}."
    return "All jobs can run here" + (f" (warnings: {warned})." if warned else ".")


# --- packages ------------------------------------------------------------------------------------


def find_packages() -> Iterator[Finding]:
    """Python and packages, in the order in which they depend on each other."""
    yield python(sys.version_info[:3])
    yield libpython()
    yield c_library(platform.system(), platform.machine(), platform.libc_ver())
    wrong = unsupported()
    for package in IMPORTED:
        yield imported(package, wrong)
    yield from others(wrong)
    torch = sys.modules.get("torch")
    gpus = gpu_names(torch) if torch is not None else []
    yield cuda(torch, gpus)
    yield transformer_engine(bool(gpus))
    yield apex()


def python(version: tuple[int, ...]) -> Finding:
    """Whether packages exist for this Python."""
    text = f"{'.'.join(map(str, version))} ({sys.executable})"
    if PYTHONS[0] <= version < PYTHONS[1]:
        return Finding(OK, "Python", text)
    return Finding(MISSING, "Python", f"{text}; 3.10 to 3.12 are needed", MAKE)


def libpython() -> Finding:
    """Whether Triton's process for a model can load this Python."""
    try:
        return Finding(OK, "libpython", check_libpython())
    except UserError as error:
        text, _, remedy = str(error).partition(". ")
        return Finding(MISSING, "libpython", text, remedy)


def c_library(system: str, machine: str, libc: tuple[str, str]) -> Finding:
    """Whether PyTriton has a wheel for this system and C library (empty: not known)."""
    text = f"{system} {machine}, {libc[0] or 'C library'} {libc[1] or 'not known'}"
    needed = f"PyTriton has wheels for Linux with glibc {GLIBC[0]}.{GLIBC[1]} or later"
    numbers = tuple(int(number) for number in re.findall(r"\d+", libc[1])[:2])
    if system == "Linux" and libc[0] == "glibc" and numbers >= GLIBC:
        return Finding(OK, "system", text)
    remedy = "Use Ubuntu 22.04, Debian 12 or newer, or a container (Dockerfile)"
    return Finding(MISSING, "system", f"{text}; {needed}", remedy)


def unsupported() -> dict[str, str]:
    """By package: "numpy" -> "numpy<3 (installed: 3.1)"; without `packaging` that one alone."""
    try:
        found = start_up.unsupported()
    except ImportError:
        return {"packaging": "packaging (not installed)"}
    return {
        re.match(r"[\w.-]+", wanted).group(): f"{wanted} ({there})"  # type: ignore[union-attr]
        for wanted, there in found.items()
    }


def imported(package: str, wrong: dict[str, str]) -> Finding:
    """Whether a package is there, can be imported and has the right version."""
    wanted = wrong.get(package, package).split(" (")[0]
    version = start_up.installed_version(package)
    try:
        # What libraries say at their import, as of a missing CUDA, has a finding of its own here.
        logging.disable(logging.WARNING)
        importlib.import_module(IMPORTED[package])
    except Exception as error:  # whatever a package that is broken raises
        there = f"{version} does not import ({_first_line(error)})" if version else "not installed"
        if isinstance(error, OSError) and "transformer_engine" in str(error):
            return Finding(MISSING, package, there, BROKEN_ENGINE)
        again = "--force-reinstall " * bool(version)
        return Finding(MISSING, package, there, f"pip install {again}'{wanted}'")
    finally:
        logging.disable(logging.NOTSET)
    if package in wrong:
        text = f"{version}; the tests ran with {wanted}"
        return Finding(WARNING, package, text, f"pip install '{wanted}'")
    return Finding(OK, package, version or "without a version")


def others(wrong: dict[str, str]) -> Iterator[Finding]:
    """The other requirements of `setup.py`: what is missing or has another version."""
    rest = {name: text for name, text in wrong.items() if name not in IMPORTED}
    for name, text in rest.items():
        wanted, _, there = text.removesuffix(")").partition(" (")
        status = MISSING if there == "not installed" else WARNING
        yield Finding(status, name, there, f"pip install '{wanted}'")
    if not rest and start_up.installed_version(start_up.DISTRIBUTION) is None:
        text = f"{start_up.DISTRIBUTION} is not installed, so its requirements are not known"
        yield Finding(WARNING, "other packages", text, "pip install . in the repository")
    elif not rest:
        yield Finding(OK, "other packages", "as setup.py asks")


def gpu_names(torch: ModuleType) -> list[str]:
    with contextlib.suppress(Exception):  # of a driver that does not fit
        if torch.cuda.is_available():
            return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return []


def cuda(torch: ModuleType | None, gpus: list[str]) -> Finding:
    """Whether torch can use the GPUs of this machine."""
    if torch is not None and gpus:
        return Finding(OK, "CUDA", f"{torch.version.cuda}, {len(gpus)} x {gpus[0]}")
    if not (os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi")):
        return Finding(OK, "CUDA", "no NVIDIA GPU: jobs run on the CPU")
    build = torch.version.cuda if torch is not None else None
    remedy = "Install a build of torch with CUDA"
    if build is not None:
        remedy = f"See that nvidia-smi lists it and that its driver is new enough for CUDA {build}"
    text = "torch cannot use this machine's GPU: jobs run on the CPU"
    return Finding(WARNING, "CUDA", text, remedy)


BROKEN_ENGINE = (
    "Install the release of Transformer Engine that fits this torch (docs/jobs.md), or remove "
    "it: pip uninstall transformer-engine"
)


def transformer_engine(gpu: bool) -> Finding:
    subject, remedy = "Transformer Engine", "pip install --no-build-isolation '.[gpu]'"
    if not gpu:
        return Finding(OK, subject, "not needed without a GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        text = "not installed: jobs use PyTorch's layers, as on a CPU"
        return Finding(WARNING, subject, text, remedy)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A job takes it where it is installed.
        return Finding(MISSING, subject, f"does not import ({_first_line(error)})", BROKEN_ENGINE)
    return Finding(OK, subject, start_up.installed_version("transformer-engine") or "there")


def apex() -> Finding:
    """Whether the one kernel of it that jobs can use is there."""
    there = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    text = "only model.gradient_accumulation_fusion uses it"
    return Finding(OK, "apex", f"{'installed' if there else 'not installed'}; {text}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- machine -------------------------------------------------------------------------------------


def find_machine(folder: Path) -> Iterator[Finding]:
    """The machine; `folder` is where runs will be written."""
    yield ports()
    yield name_of_this_machine()
    # Triton and its processes take some at the start.
    remedy = "In a container: docker run --shm-size=1g; else mount it anew"
    yield disk(str(SHARED_MEMORY), SHARED_MEMORY, remedy, 32 * MB, 256 * MB)
    place = next(each for each in (folder / "x").absolute().parents if each.exists())
    remedy = "Name another one in exp_manager.explicit_log_dir, or free some"
    yield disk("folder of the runs", place, remedy)
    yield from temporary_folders()
    yield clock(*measure_clocks())
    yield memory(available_memory())
    yield cores(start_up.available_cores())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE))


def ports() -> Finding:
    """Whether a server can listen on a free port, and be reached on it."""
    try:
        port = find_free_port(LOOPBACK)
        with socket.create_server((LOOPBACK, port)) as server:
            server.settimeout(5)
            with socket.create_connection((LOOPBACK, port), timeout=5):
                server.accept()[0].close()
    except OSError as error:
        remedy = "Bring the interface lo up, and let processes talk on it (firewall, container)"
        return Finding(MISSING, "ports", f"no connection on {LOOPBACK} ({error})", remedy)
    return Finding(OK, "ports", f"{LOOPBACK}:{port} is free and can be reached")


def name_of_this_machine() -> Finding:
    """Whether `localhost` leads to loopback, as it does in the documented commands."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo("localhost", None)}
    except OSError as error:
        addresses = {str(error)}
    shown = ", ".join(sorted(map(str, addresses)))
    if addresses <= {LOOPBACK, "::1"}:
        return Finding(OK, "localhost", shown)
    remedy = f"Write {LOOPBACK} in place of localhost, or mend /etc/hosts"
    return Finding(WARNING, "localhost", f"leads to {shown}", remedy)


def disk(
    subject: str, folder: Path, remedy: str, low: float = 0.1 * GB, enough: float = 5 * GB
) -> Finding:
    """Whether a folder can be written and has space."""
    try:
        found = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        return Finding(MISSING, subject, text, remedy)
    text = f"{folder}, {found.free / GB:,.2f} of {found.total / GB:,.2f} GiB are free"
    return graded(subject, text, found.free, low, enough, remedy)


def temporary_folders() -> Iterator[Finding]:
    """Whether archives can be unpacked and Triton's programs run where they will be put."""
    subject, remedy = "temporary folder", "Name another one in TMPDIR, of 30 characters at most"
    try:
        unpacked = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield Finding(MISSING, subject, str(error.strerror), remedy)
        return
    programs = folder_of_workspaces()
    for folder in dict.fromkeys([unpacked, programs]):
        yield disk(subject, Path(folder), remedy)
    if os.statvfs(programs).f_flag & os.ST_NOEXEC:
        text = f"{programs} is mounted with noexec, so Triton cannot run there"
        yield Finding(MISSING, subject, text, remedy)


def measure_clocks() -> tuple[int, float]:
    """The year, and by how many seconds the wall clock has left the monotonic one in 0.2 s."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(0.2)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    return time.gmtime().tm_year, drift


def clock(year: int, drift: float) -> Finding:
    """Whether the wall clock can be right, and whether it runs evenly."""
    if YEARS[0] <= year < YEARS[1] and abs(drift) <= MAX_DRIFT_S:
        return Finding(OK, "clock", f"year {year}, runs evenly")
    text = (
        f"year {year}, moved by {drift:.2f} s in 0.2 s: the times in logs and of files are wrong"
    )
    remedy = "Set it, for example with chrony or systemd-timesyncd"
    return Finding(WARNING, "clock", text, remedy)


def available_memory() -> int:
    """Bytes that processes can take, by the system and the control group's limit; 0: unknown."""
    available = 0
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        used = int(MEMORY_LIMIT.with_name("memory.current").read_text())
        available = min(available, int(MEMORY_LIMIT.read_text()) - used)
    return available


def memory(available: int) -> Finding:
    """Whether the quickstart fits: its processes take 1.6 GiB together."""
    if available <= 0:
        return Finding(WARNING, "memory", "not known", "See what is free: free -g")
    text = f"{available / GB:.1f} GiB available"
    remedy = "End other processes; what a job needs: nemo-aligner plan"
    return graded("memory", text, available, 1 * GB, 4 * GB, remedy)


def cores(count: int) -> Finding:
    """Whether an actor and a server can compute at the same time."""
    remedy = "Give the container or the job more (docker --cpus, srun --cpus-per-task)"
    return graded("cores", f"{count} usable", count, 1, 2, remedy)


def open_files(limits: tuple[int, int]) -> Finding:
    """Whether connections, processes and files stay below the soft and the hard limit."""
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in limits)
    enough = min(4096, hard) if hard >= 1024 else 1024
    text = f"{soft:g}, up to {hard:g}"
    return graded("open files", text, soft, 256, min(1024, enough), f"ulimit -n {enough:g}")


# --- command -------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="nemo-aligner doctor",
        description="Say whether jobs can run on this machine, and what to do where they cannot. "
        "The exit code is 0 if all of them can.",
        epilog="See docs/jobs.md.",
    )
    result.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("."),
        metavar="FOLDER",
        help="in which runs will be written (default: the current one)",
    )
    return result


def main(argv: list[str] | None = None) -> None:
    """Look at everything and print each finding as it comes."""
    args = parser().parse_args(argv)
    warnings.simplefilter("ignore")  # of packages that are imported
    findings = []
    with start_up.long_imports():
        for finding in chain(find_packages(), find_machine(args.folder)):
            print(finding.line(), flush=True)
            findings.append(finding)
    print(f"\n{summary(findings)}")
    sys.exit(any(finding.status == MISSING for finding in findings))


if __name__ == "__main__":
    main()
