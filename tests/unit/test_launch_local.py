# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""scripts/launch_local.sh with jobs that end as they are told: which of them it starts again."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.cases import some_of
from tests.patience import patience, wait_until

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts/launch_local.sh"
# Each start adds a line to a file; none ends before the server has started. The arguments are the
# exit codes of the starts, one after the other; with "stay" the job runs until SIGTERM, and ends
# with 0 then, with "save" with 76.
JOB = """
    import os, pathlib, signal, sys, time
    log = pathlib.Path(__file__).with_suffix(".log")
    with log.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    number = len(log.read_text().splitlines())
    end = sys.argv[min(number, len(sys.argv) - 1)]
    if end in ("stay", "save"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(76 if end == "save" else 0))
        time.sleep(600)
    while not pathlib.Path(__file__).with_name("server.log").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(end))
"""


@pytest.fixture
def launch(tmp_path):
    """`launch(server_ends, actor_ends, **environment) -> process`; nothing of it is left."""
    for name in ("server", "actor"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(JOB))
    started = []

    def start(server, actor, **environment) -> subprocess.Popen:
        words = [tmp_path / "server.py", *server, "--", tmp_path / "actor.py", *actor]
        command = ["bash", SCRIPT, *map(str, words)]
        environment = {**os.environ, "PYTHON": sys.executable, **environment}
        options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen(command, env=environment, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.wait(patience(10))
        assert not [
            other for other in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(other.info)
        ]


def starts(tmp_path, name):
    log = tmp_path / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def end(process):
    _out, said = process.communicate(timeout=patience(60))
    return process.returncode, said


@some_of(
    "actor, code, count",
    [
        (["0"], 0, 1),
        (["1", "killed", "77", "0"], 0, 4),
        (["2"], 2, 1),  # a user's error would come again
        (["75"], 75, 1),
        (["1", "76"], 76, 2),
    ],
    keep=2,
)
def test_an_actor_that_is_lost_starts_again(launch, tmp_path, actor, code, count):
    found, said = end(launch(["stay"], actor))
    assert (found, len(starts(tmp_path, "actor"))) == (code, count), said
    assert len(starts(tmp_path, "server")) == 1
    assert said.count("restart ") == count - 1


def test_a_server_that_is_lost_starts_again(launch, tmp_path):
    process = launch(["1", "killed", "stay"], ["save"])
    wait_until(lambda: len(starts(tmp_path, "server")) == 3, 60)
    assert len(starts(tmp_path, "actor")) == 1
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 76


def test_restarts_have_a_limit(launch, tmp_path):
    code, said = end(launch(["stay"], ["1"], MAX_RESTARTS="2"))
    assert (code, len(starts(tmp_path, "actor"))) == (1, 3)
    assert "the actor ended with exit code 1, after 2 restarts (MAX_RESTARTS)" in said


def test_a_users_error_of_the_server_ends_both(launch, tmp_path):
    code, said = end(launch(["2"], ["stay"]))
    assert (code, len(starts(tmp_path, "server"))) == (2, 1), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_actor_saves_when_the_script_is_asked_to_end(launch, tmp_path, number):
    process = launch(["stay"], ["save"])
    wait_until(lambda: starts(tmp_path, "actor") and starts(tmp_path, "server"), 60)
    process.send_signal(number)
    assert end(process)[0] == 76


@pytest.mark.full
def test_a_signal_while_the_jobs_start_leaves_none_of_them(launch):
    """One that comes as soon as the script has a child; it may not have started the actor yet."""
    for _ in range(5):
        process = launch(["stay"], ["save"])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] in (76, 128 + signal.SIGTERM)


def test_without_two_commands_it_says_how_to_call_it():
    process = subprocess.run(["bash", SCRIPT, "one.py"], capture_output=True, text=True)
    assert process.returncode == 2
    assert "SERVER_SCRIPT KEY=VALUE ... -- ACTOR_SCRIPT KEY=VALUE ..." in process.stderr
