# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Two machines of one, by network namespaces, with a link that can be cut; and a job with a rank
on each of them. They share all files, the folder of temporary ones too.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from nemo_aligner.servers.ports import find_free_port
from tests.chaos.phases import ROOT, SCRIPTS
from tests.functional.jobs import ScriptJob
from tests.patience import Deadline

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
NETWORK, LINK = "10.77.38", "wire"


def unavailable() -> str | None:
    """Why this process cannot make network namespaces; None: it can."""
    if not shutil.which("ip"):
        return "there is no `ip`"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else None


def enter(namespace: str, hostname: str) -> None:
    """Put this process, which has one thread, on a machine; called by the scripts of a job."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        for failed in (libc.setns(file.fileno(), CLONE_NEWNET), libc.unshare(CLONE_NEWUTS)):
            assert not failed, os.strerror(ctypes.get_errno())
    assert not libc.sethostname(hostname.encode(), len(hostname))


class Machines:
    """Machines 0 and 1; leaving the `with` block removes them."""

    def __init__(self) -> None:
        self.names = [f"na{os.getpid()}-{number}" for number in (0, 1)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in (0, 1)]

    def __enter__(self) -> "Machines":
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        ends = (LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
        _ip("link", "add", *ends)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            _ip("-n", name, "link", "set", "lo", "up")
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _ip("netns", "del", name)

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", LINK, "down")

    def join(self) -> None:
        for name in self.names:
            _ip("-n", name, "link", "set", LINK, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Job:
    """A job with one rank on each machine, started by plain `python`; `ranks` are its processes.

    Args:
        make: makes the `ScriptJob` of a rank from the folder of its log, a script and more
            overrides.
    """

    def __init__(self, machines: Machines, folder: Path, script: str, make):
        self.ranks: list[ScriptJob] = []
        port = find_free_port()
        for number, name in enumerate(machines.names):
            here = folder / f"machine{number}"
            here.mkdir(exist_ok=True)
            (here / script).write_text(
                f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                "from tests.chaos import phases, two_machines\n"
                f"two_machines.enter({name!r}, 'machine{number}')\n"
                f"phases.run({str(SCRIPTS / script)!r})\n"
            )
            settings = {"NODE_RANK": str(number), "MASTER_ADDR": machines.addresses[0]}
            settings |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": LINK}
            os.environ.update(settings)
            try:
                job = make(here, str(here / script), "trainer.num_nodes=2")
            finally:
                for key in settings:
                    del os.environ[key]
            self.ranks.append(job)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.__exit__()

    def kill(self, machine: int) -> None:
        """What a loss of power does to the processes of this job."""
        self.ranks[machine].__exit__()

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes of the ranks, once all have ended or after this time."""
        deadline = Deadline(seconds)
        while not deadline.passed() and None in (r.process.poll() for r in self.ranks):
            for rank in self.ranks:
                rank.note_processes()
            time.sleep(0.2)
        return [rank.process.poll() for rank in self.ranks]

    @property
    def log(self) -> str:
        return "\n".join(f"--- rank {n}:\n{rank.log}" for n, rank in enumerate(self.ranks))
