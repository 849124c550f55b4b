# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to end a job (training/stop_requests.py), and what a script leaves behind
(core/endings.py).
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nemo_aligner.core.endings import ExitCode, JobStopped, keep_ending_in, note_ending
from nemo_aligner.training.stop_requests import SIGNALS, stop_requests
from tests.patience import patience, wait_until
from tests.ppo_fakes import FakeRunTimer

pytestmark = pytest.mark.slow


@pytest.fixture
def watching():
    """SIGTERM, SIGINT and SIGUSR1 to this process are requests."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_requests.watching(lambda code, number: os._exit(1)):
        yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    signal.signal(signal.SIGINT, handler)


def send(number):
    os.kill(os.getpid(), number)
    wait_until(lambda: stop_requests.received, 10, lambda: "the signal to be seen")


@pytest.mark.parametrize(
    "number, name, again",
    [
        (signal.SIGTERM, "SIGTERM", "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1", "SIGTERM"),
        (signal.SIGINT, "Ctrl-C", "Ctrl-C"),
    ],
)
def test_a_signal_in_a_step_ends_the_job_after_it(watching, number, name, again, capfd, tmp_path):
    keep_ending_in(tmp_path)
    with stop_requests.in_loop(4, 10, saves=True):
        assert stop_requests.after_step(5, FakeRunTimer()) is None
        send(number)
        stop = stop_requests.after_step(6, FakeRunTimer())
    with pytest.raises(JobStopped) as stopped:
        stop_requests.leave(stop)
    assert stopped.value.code == ExitCode.PRE_EMPTED == 76
    first, last = (line for line in capfd.readouterr().err.splitlines() if line)
    assert first.startswith(f"{name}: the job saves and ends after the running step.")
    assert f"A second {again} ends it at once" in first
    assert f"{name}: the job ends after step 6 of 10, with exit code 76" in last
    ending = json.loads((tmp_path / "ending.json").read_text())
    assert ending.pop("time")
    assert ending == {"code": 76, "name": "PRE_EMPTED", "reason": name, "step": 6}


def test_a_signal_in_a_save_needs_no_other_step(watching):
    with stop_requests.in_loop(4, 10, saves=True):
        assert stop_requests.after_step(5, FakeRunTimer()) is None
        assert stop_requests.signalled() is None
        send(signal.SIGTERM)
        assert stop_requests.signalled().code == ExitCode.PRE_EMPTED


def test_a_job_that_has_made_its_last_step_has_finished(watching, capfd):
    with stop_requests.in_loop(4, 5, saves=True):
        assert stop_requests.after_step(5, FakeRunTimer(limit=1)) is None
        send(signal.SIGTERM)
        assert stop_requests.signalled() is None
    assert "has made its last step and ends by itself" in capfd.readouterr().err


def test_a_job_without_checkpoints_says_so(watching, capfd):
    with stop_requests.in_loop(0, 10, saves=False):
        send(signal.SIGTERM)
    assert "does not save (save_interval) and ends" in capfd.readouterr().err


def test_the_time_limit_has_a_code_of_its_own(watching):
    with stop_requests.in_loop(4, 10, saves=True):
        stop = stop_requests.after_step(5, FakeRunTimer(limit=1))
    assert (stop.code, stop.code.name) == (75, "TIME") and "max_time_per_run" in stop.reason


def test_children_do_not_take_the_signals_of_the_job(watching):
    with stop_requests.in_loop(0, 10, saves=True):
        for number in range(21):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            if number == 0:  # the others end before their first instruction
                time.sleep(0.3)
                os.kill(child.pid, signal.SIGUSR1)
                os.kill(child.pid, signal.SIGINT)
                time.sleep(0.3)
                assert child.is_alive()
            child.terminate()
            child.join(patience(10))
            assert child.exitcode == -signal.SIGTERM
        time.sleep(0.5)
        assert stop_requests.received is None


# A job whose steps last; a process that it started lasts too.
JOB = """
import signal, subprocess, sys, time
from nemo_aligner.core.endings import keep_ending_in
from nemo_aligner.launch import endings
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.training.stop_requests import stop_requests
from pathlib import Path

signal.signal(signal.SIGINT, getattr(signal, sys.argv[3]))

def main():
    keep_ending_in(Path(sys.argv[2]))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    endings.started_processes.append(child)
    print("child", child.pid, flush=True)
    if sys.argv[1] == "loop":
        with stop_requests.in_loop(3, 10, True):
            print("in a step", flush=True)
            time.sleep(60)
    time.sleep(60)

user_errors_end_the_job(main, is_job=sys.argv[1] != "command")()
"""


@pytest.mark.parametrize(
    "phase, number, name, code",
    [
        ("start", signal.SIGTERM, "SIGTERM", ExitCode.PRE_EMPTED),
        ("loop", signal.SIGTERM, "SIGTERM", ExitCode.PRE_EMPTED),
        ("loop", signal.SIGINT, "Ctrl-C", ExitCode.PRE_EMPTED),
        ("command", signal.SIGINT, "Ctrl-C", ExitCode.INTERRUPTED),
    ],
)
def test_before_the_first_step_and_asked_twice_a_job_ends_at_once(
    phase, number, name, code, tmp_path
):
    job = started(phase, tmp_path, "default_int_handler")
    child = int(job.stdout.readline().split()[1])
    if phase == "loop":
        assert job.stdout.readline() == "in a step\n"
        for _ in range(2):  # the same request, to the process and to its group
            job.send_signal(number)
        time.sleep(1.5)
        assert job.poll() is None
    job.send_signal(number)
    _, said = job.communicate()
    assert job.returncode == code, said
    why = f"a second {name}" if phase == "loop" else f"{name} before the first step"
    if phase == "command":
        why = name
        assert said.strip() == "Ctrl-C: the command has ended."
    else:
        assert f"{why}: the job ends at once, without saving. The same command continues." in said
    ending = json.loads((tmp_path / "ending.json").read_text())
    assert (ending["code"], ending["reason"]) == (code, why)
    assert ending["step"] == (3 if phase == "loop" else None)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def started(phase, folder, interrupt_handler):
    """`JOB` in `phase`; it does not outlive the test."""
    command = [sys.executable, "-c", JOB, phase, str(folder), interrupt_handler]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, **pipes)
    guard = threading.Timer(patience(30), job.kill)
    guard.daemon = True
    guard.start()
    return job


def test_a_ctrl_c_that_a_shell_keeps_from_its_background_jobs_asks_nothing(tmp_path):
    job = started("loop", tmp_path, "SIG_IGN")
    job.stdout.readline()
    assert job.stdout.readline() == "in a step\n"
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        assert job.poll() is None
        job.send_signal(number)
        time.sleep(1.2)
    assert "Ctrl-C" not in job.communicate()[1]


def test_the_first_ending_counts_and_a_new_run_removes_it(tmp_path):
    keep_ending_in(tmp_path)
    note_ending(ExitCode.LOST_PEER, "the critic is gone", 3)
    note_ending(ExitCode.FAILED, "what follows from it")
    ending = json.loads((tmp_path / "ending.json").read_text())
    assert (ending["name"], ending["reason"]) == ("LOST_PEER", "the critic is gone")
    keep_ending_in(tmp_path)
    assert not (tmp_path / "ending.json").exists()
    note_ending(ExitCode.FINISHED, "finished")
    assert json.loads((tmp_path / "ending.json").read_text())["code"] == 0
