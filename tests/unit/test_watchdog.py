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
        self.process, self.log = process, log

    def is_at_work(self):
        wait_until(lambda: "ready" in self.log.read_text(), 60, self.log.read_text)

    def ended(self, code=0):
        """What it has said once it has ended, with this exit code."""
        try:
            found = self.process.wait(min(patience(60), 180))
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self.log.read_text()}")
        assert found == code, self.log.read_text()
        return self.log.read_text()

    def watcher(self):
        """The process that watches the job, once there is one."""
        found = []

        def is_there():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none either
                beside = filter(is_alive, psutil.Process(self.process.pid).children())
                found[:] = [p for p in beside if "watchdog_process.py" in " ".join(p.cmdline())]
            return found

        wait_until(is_there, 20, lambda: "a process beside the rank")
        (watcher,) = found
        return watcher


@pytest.fixture
def start(tmp_path):
    """`start(what, rank, size) -> Job`."""
    port, jobs = find_free_port(), []
    script = tmp_path / "job.py"
    script.write_text(JOB)

    def start(what, rank=0, size=1):
        words = [script, what, min(patience(TIMEOUT_S), MOST_S), rank, size, tmp_path, port]
        log = tmp_path / f"{rank}.log"
        jobs.append(Job(start_python([*map(str, words)], {**os.environ}, tmp_path, log), log))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.wait(10)


def assert_ending(folder, reason, **expected):
    found = json.loads((folder / "ending.json").read_text())
    assert expected.items() <= found.items() and reason in found["reason"]


@some_of("what", ["slow", "long"])
def test_slow_work_goes_on(start, what):
    job = start(what)
    watcher = job.watcher()
    assert job.ended() == "ready\n"
    wait_until(lambda: not is_alive(watcher), 10, lambda: "its end")


@pytest.mark.parametrize("what", ["hangs", pytest.param("waits", marks=pytest.mark.full)])
def test_a_main_thread_that_hangs_ends_the_job(start, what, tmp_path):
    said = start(what).ended(ExitCode.LOST_PEER)
    assert re.search(
        r"\nERROR: no rank has made progress for \d+ s \(trainer.hang_timeout_s\): rank 0 stands "
        r"in phase 'train' at .+:\d+ \(.+\)\. The same command continues\.\n",
        said,
    ), said
    assert "Rank 0 stands here:" in said and "in <module>" in said
    assert_ending(tmp_path, "phase 'train'", code=77)


@pytest.mark.full
def test_the_rank_that_hangs_is_named_by_the_one_that_waits(start, tmp_path):
    said, other = (
        job.ended(ExitCode.LOST_PEER) for job in [start("hangs", rank, 2) for rank in (0, 1)]
    )
    assert "hang_timeout_s): rank 1 stands in phase 'train' at" in said
    assert "Rank 1 stands here:" in said and "in never_ends" in said
    assert "ERROR" not in other
    assert_ending(tmp_path, "rank 1 stands")


def test_a_rank_ends_when_the_machine_of_rank_0_is_lost(start, tmp_path):
    """Where nothing runs any more, and no connection breaks: the store does not reply. (That of
    real jobs is tests/chaos/test_two_machines.py.)
    """
    jobs = [start("waits", rank, 2) for rank in (0, 1)]
    for job in jobs:
        job.is_at_work()
    watcher = jobs[0].watcher()
    try:
        for process in (watcher, jobs[0].process):
            process.send_signal(signal.SIGSTOP)
        said = jobs[1].ended(ExitCode.LOST_PEER)
    finally:
        watcher.kill()
    assert "hang_timeout_s): rank 0 does not reply; rank 1 stands in phase 'train' at" in said
    assert_ending(tmp_path, "rank 0 does not", code=77)


@pytest.mark.full
def test_a_rank_may_wait_for_a_slow_one(start):
    for job in [start("rank 1 works", rank, 2) for rank in (0, 1)]:
        job.ended()


def test_a_process_that_is_stopped_for_good_is_killed(start, tmp_path):
    job = start("waits")
    watcher = job.watcher()
    job.is_at_work()
    time.sleep(2)  # until the phase has been said
    job.process.send_signal(signal.SIGSTOP)
    said = job.ended(-signal.SIGKILL)
    stopped = r"HUNG: rank 0 of 1 has not run for \d+ s in phase 'train' \(it was stopped, as by "
    assert re.search(stopped, said), said
    assert_ending(tmp_path, "", name="SIGKILL")
    wait_until(lambda: not is_alive(watcher), 10, lambda: "its end")


def test_a_process_that_is_stopped_for_a_while_goes_on(start):
    job = start("slow")
    job.watcher()
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    job.process.send_signal(signal.SIGCONT)
    job.ended()
