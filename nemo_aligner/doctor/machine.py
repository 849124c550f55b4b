# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The machine: ports, shared memory, disks, clock, memory, cores, limits of the user."""

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nemo_aligner.doctor import MISSING, OK, WARNING, Finding, graded
from nemo_aligner.launch.start_up import available_cores
from nemo_aligner.servers.ports import find_free_port, folder_of_workspaces

SHARED_MEMORY = Path("/dev/shm")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the control group
LOOPBACK = "127.0.0.1"
YEARS = (2025, 2100)
MAX_DRIFT_S = 0.05
MB, GB = 2**20, 2**30


def find(folder: Path) -> Iterator[Finding]:
    """All findings; `folder` is where runs will be written."""
    yield ports()
    yield name_of_this_machine()
    yield shared_memory(SHARED_MEMORY)
    yield disk("folder of the runs", folder, "Name another one in exp_manager.explicit_log_dir")
    yield from temporary_folders()
    yield clock(*measure_clocks())
    yield memory(available_memory())
    yield cores(available_cores())
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
    if addresses <= {LOOPBACK, "::1"}:
        return Finding(OK, "localhost", ", ".join(sorted(map(str, addresses))))
    text = f"leads to {', '.join(sorted(map(str, addresses)))}"
    remedy = f"Write {LOOPBACK} in place of localhost, or mend /etc/hosts"
    return Finding(WARNING, "localhost", text, remedy)


def shared_memory(path: Path) -> Finding:
    """Whether Triton and its processes get the shared memory that each takes at the start."""
    subject, remedy = str(path), "In a container: docker run --shm-size=1g; else mount it anew"
    try:
        size, free = space(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding(MISSING, subject, f"cannot be written ({error.strerror})", remedy)
    text = f"{size / GB:.2f} GiB, {free / GB:.2f} GiB free"
    return graded(subject, text, free, 32 * MB, 256 * MB, remedy)


def disk(subject: str, folder: Path, remedy: str) -> Finding:
    """Whether a folder, which may not exist yet, can be written and has space."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        free = space(place)[1]
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        return Finding(MISSING, subject, text, remedy)
    text = f"{place}, {free / GB:,.1f} GiB free"
    return graded(subject, text, free, 0.1 * GB, 5 * GB, f"{remedy}, or free some")


def space(path: Path) -> tuple[int, int]:
    """Bytes of the file system, and those that this user can still write."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


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
    remedy = "Set it, for example with chrony or systemd-timesyncd"
    if not YEARS[0] <= year < YEARS[1]:
        text = f"the year is {year}: the times in logs and of files are wrong"
        return Finding(WARNING, "clock", text, remedy)
    if abs(drift) > MAX_DRIFT_S:
        text = f"it was moved by {drift:.2f} s in 0.2 s: the times in logs are wrong"
        return Finding(WARNING, "clock", text, remedy)
    return Finding(OK, "clock", f"year {year}, runs evenly")


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
