# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a rank (launch/watchdog.py) at work in real processes: what hangs ends, with the
culprit named, and what is slow does not.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.cases import some_of
from tests.patience import patience, wait_until
from tests.processes import is_alive
from tests.warm_start import start_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 4.0
MOST_S = 10.0  # on a busy machine
JOB = """
import datetime, sys, threading, time
from pathlib import Path
import torch.distributed as dist
from nemo_aligner.core.endings import keep_ending_in
from nemo_aligner.core.endings import progress
from nemo_aligner.launch import watchdog
from nemo_aligner.launch.watchdog import Watchdog, watch

WHAT, TIMEOUT_S, RANK, SIZE = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:5])
if SIZE > 1:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[6]}", rank=RANK, world_size=SIZE)
keep_ending_in(Path(sys.argv[5]), RANK == 0)
if RANK == 0:
    find = Watchdog._what_hangs
    Watchdog._what_hangs = lambda *args: (time.sleep(2), find(*args))[1]  # others are faster
if WHAT == "rank 1 works":  # less than the time in which it does
    watchdog.REPLY_S = 0.5
watch(TIMEOUT_S, RANK, SIZE)

def never_ends():
    while True:
        time.sleep(0.1)

with progress.expected():
    with progress.in_phase("train"):
        print("ready", flush=True)
        if WHAT == "slow":  # units of work that take a third of the time
            for _ in range(5):
                time.sleep(TIMEOUT_S / 3)
                progress.made()
        elif WHAT == "long":  # a unit of work of which nothing is known
            with progress.expected(False):
                time.sleep(1.5 * TIMEOUT_S)
        elif WHAT == "rank 1 works" and RANK == 1:  # and rank 0 waits for it
            for _ in range(6):
                time.sleep(TIMEOUT_S / 3)
                progress.made()
        elif WHAT == "hangs" and RANK == SIZE - 1:
            never_ends()
        elif WHAT == "waits":
            threading.Event().wait()
        if SIZE > 1:
            dist.barrier()
"""


class Job:
    """A process at its work, and what it says."""

    def __init__(self, process, log):
        self.process, self.log_path, self.pid = process, log, process.pid

    @property
    def log(self):
        return self.log_path.read_text()

    def ended(self):
        """(exit code, output) once it has ended."""
        try:
            return self.process.wait(min(patience(60), 180)), self.log
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self.log}")


@pytest.fixture
def start(tmp_path):
    """`start(what, rank, size) -> Job`, which is at its work."""
    port, jobs = find_free_port(), []
    script = tmp_path / "job.py"
    script.write_text(JOB)

    def start(what, rank=0, size=1):
        timeout_s = min(patience(TIMEOUT_S), MOST_S)
        words = map(str, [what, timeout_s, rank, size, tmp_path, port])
        log = tmp_path / f"{rank}.log"
        command = [str(script), *words]
        jobs.append(Job(start_python(command, {**os.environ}, tmp_path, log), log))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.wait(10)


def watches(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none either
        return is_alive(process) and "watchdog_process.py" in " ".join(process.cmdline())
    return False


def beside(job):
    """The processes that watch the job, once there is one."""
    found = []

    def is_there():
        found[:] = [p for p in psutil.Process(job.pid).children() if watches(p)]
        return found

    wait_until(is_there, 20, lambda: "a process beside the rank")
    return found


def ending(folder):
    return json.loads((folder / "ending.json").read_text())


@some_of("what", ["slow", "long"])
def test_slow_work_goes_on(start, what):
    job = start(what)
    watcher = beside(job)
    code, said = job.ended()
    assert (code, said) == (0, "ready\n")
    wait_until(lambda: not any(map(is_alive, watcher)), 10, lambda: "its end")


@pytest.mark.parametrize("what", ["hangs", pytest.param("waits", marks=pytest.mark.full)])
def test_a_main_thread_that_hangs_ends_the_job(start, what, tmp_path):
    code, err = start(what).ended()
    assert code == ExitCode.LOST_PEER, err
    assert re.search(
        r"\nERROR: no rank has made progress for \d+ s \(trainer.hang_timeout_s\): rank 0 stands "
        r"in phase 'train' at .+:\d+ \(.+\)\. The same command continues\.\n",
        err,
    ), err
    assert "Rank 0 stands here:" in err and "in <module>" in err
    assert ending(tmp_path)["code"] == 77 and "phase 'train'" in ending(tmp_path)["reason"]


@pytest.mark.full
def test_the_rank_that_hangs_is_named_by_the_one_that_waits(start, tmp_path):
    jobs = [start("hangs", rank, 2) for rank in (0, 1)]
    code, err = jobs[0].ended()
    assert code == ExitCode.LOST_PEER, err
    assert "hang_timeout_s): rank 1 stands in phase 'train' at" in err
    assert "Rank 1 stands here:" in err and "in never_ends" in err
    code, other = jobs[1].ended()
    assert code == ExitCode.LOST_PEER and "ERROR" not in other
    assert "rank 1 stands" in ending(tmp_path)["reason"]


def test_a_rank_ends_when_the_machine_of_rank_0_is_lost(start, tmp_path):
    """Where nothing runs any more, and no connection breaks: the store does not reply. (That of
    real jobs is tests/chaos/test_two_machines.py.)
    """
    jobs = [start("waits", rank, 2) for rank in (0, 1)]
    for job in jobs:
        wait_until(lambda job=job: "ready" in job.log, 60, lambda job=job: job.log)
    (watcher,) = beside(jobs[0])
    try:
        for process in (watcher, jobs[0].process):
            process.send_signal(signal.SIGSTOP)
        code, err = jobs[1].ended()
    finally:
        watcher.kill()
    assert code == ExitCode.LOST_PEER, err
    assert "hang_timeout_s): rank 0 does not reply; rank 1 stands in phase 'train' at" in err
    assert ending(tmp_path)["code"] == 77 and "rank 0 does not" in ending(tmp_path)["reason"]


@pytest.mark.full
def test_a_rank_may_wait_for_a_slow_one(start):
    jobs = [start("rank 1 works", rank, 2) for rank in (0, 1)]
    for job in jobs:
        code, err = job.ended()
        assert code == 0, err


def test_a_process_that_is_stopped_for_good_is_killed(start, tmp_path):
    job = start("waits")
    (watcher,) = beside(job)
    wait_until(lambda: "ready" in job.log, 60, lambda: job.log)
    time.sleep(2)  # until the phase has been said
    job.process.send_signal(signal.SIGSTOP)
    code, err = job.ended()
    assert code == -signal.SIGKILL
    assert re.search(
        r"HUNG: rank 0 of 1 has not run for \d+ s in phase 'train' \(it was stopped, as by ", err
    ), err
    assert ending(tmp_path)["name"] == "SIGKILL"
    wait_until(lambda: not is_alive(watcher), 10, lambda: "its end")


def test_a_process_that_is_stopped_for_a_while_goes_on(start):
    job = start("slow")
    beside(job)
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    job.process.send_signal(signal.SIGCONT)
    code, err = job.ended()
    assert code == 0, err
