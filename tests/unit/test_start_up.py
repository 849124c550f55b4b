# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a script starts (launch/command_line.py) and ends (launch/endings.py)."""

import contextlib
import gc
import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.core.errors import (
    AlarmError,
    LostPeerError,
    ServerJobError,
    ServerRequestError,
    UserError,
)
from nemo_aligner.launch import endings, start_up
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.training.stop_requests import stop_requests
from tests.cases import some_of
from tests.patience import wait_until

pytestmark = pytest.mark.slow

SCRIPTS = sorted((Path(__file__).parents[2] / "examples/nlp/gpt").glob("*.py"))
HEAVY = ("torch", "nemo", "lightning", "megatron", "transformers", "pandas")

# Runs a script and prints which heavy packages it has imported when it ends.
RUN = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported:", *(name for name in {HEAVY!r} if name in sys.modules))
"""


def run(command, *arguments, **options):
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, **options
    )


def run_script(script, *arguments):
    return run(["-c", RUN, str(script)], *arguments)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copied") / "gpt"
    shutil.copytree(SCRIPTS[0].parent, folder, symlinks=True)
    assert not (folder / "conf").exists()  # a link to nothing
    return folder


@some_of("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_the_configuration_and_imports_nothing_heavy(script, copied):
    """Also of a script that was copied elsewhere, without what its links point to."""
    ended = run_script(copied / script.name, "--help")
    assert ended.returncode == 0, ended.stderr
    assert "Powered by Hydra" in ended.stdout and "  accelerator: auto" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize(
    "argument, text",
    [
        ("~trainer.devises", "HYDRA_FULL_ERROR"),
        ("trainer.devices=[", "put its value in quotes"),
        ("--config-name=x", "HYDRA_FULL_ERROR"),
    ],
)
def test_what_hydra_refuses_is_an_error_of_the_user(argument, text):
    """A launcher would start a job that has failed again."""
    ended = run_script(SCRIPTS[0], argument)
    assert ended.returncode == ExitCode.USER_ERROR, ended.stderr
    assert text in ended.stderr


@some_of(  # the scripts are alike
    "script, form",
    [(path, "+" * (n % 3)) for n, path in enumerate(SCRIPTS)],
    ids=lambda path: getattr(path, "stem", None),
)
def test_an_unknown_key_is_one_message_and_imports_nothing_heavy(script, form):
    ended = run_script(script, f"{form}trainer.devises=2")
    assert ended.returncode == ExitCode.USER_ERROR
    assert "ERROR: Unknown configuration key" in ended.stderr
    assert "trainer.devises (did you mean trainer.devices, " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.splitlines()[-1] == "imported:"


JOB = """
from nemo_aligner.launch.command_line import hydra_runner

@hydra_runner(config_path="conf", config_name="one")
def main(cfg):
    print("name:", cfg.name, "size:", cfg.get("size"))

main()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "name: one size: 1"),
        (["--config-name", "two", "size=4"], "name: two size: 4"),
        (["+name=six"], "name: six size: 1"),
        (["--config-path", "other", "--config-name=three"], "name: three size: None"),
        (["--config-dir", "other", "--config-name=three", "+size=5"], "name: three size: 5"),
        (["~size"], "name: one size: None"),
        (["--cfg", "job", "name=four"], "name: four\nsize: 1"),
    ],
)
def test_the_command_line_is_that_of_hydra(arguments, printed, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    for file, more in (("conf/one", "size: 1"), ("conf/two", ""), ("other/three", "")):
        (path := tmp_path / f"{file}.yaml").parent.mkdir(exist_ok=True)
        path.write_text(f"name: {path.stem}\n{more}\n")
    before = set(tmp_path.rglob("*"))
    ended = run(["job.py"], *arguments, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout
    assert set(tmp_path.rglob("*")) == before  # no log, no .hydra, no outputs/


@pytest.mark.parametrize(
    ("error", "stop", "code"),
    [
        (UserError, None, ExitCode.USER_ERROR),
        (ServerRequestError, None, ExitCode.FAILED),
        (ServerJobError, None, ExitCode.FAILED),
        (AlarmError, None, ExitCode.FAILED),
        (LostPeerError, None, ExitCode.LOST_PEER),
        (LostPeerError, signal.SIGTERM, ExitCode.PRE_EMPTED),  # the peer was asked to end too
    ],
)
def test_an_error_with_a_remedy_is_one_message(error, stop, code, capsys):
    @user_errors_end_the_job
    def main():
        stop_requests.received = stop
        raise error("give b")

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    assert capsys.readouterr().err == "\nERROR: give b\n"


@pytest.mark.parametrize("code", [0, 3])
def test_the_started_processes_decide_too(code, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    monkeypatch.setattr(endings, "started_processes", [process])
    main = user_errors_end_the_job(lambda: "done")
    with pytest.raises(SystemExit) if code else contextlib.nullcontext():
        assert main() == "done"


def test_lightning_no_longer_watches_what_a_job_ends_itself(monkeypatch):
    """It would kill this process as well, before the error is printed."""
    monkeypatch.setattr(endings, "started_processes", [])
    monkeypatch.setattr(endings, "_watched", [])
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watched = [process]
    endings.adopt(watched)
    assert not endings._end_started_processes(0.0)
    assert watched == [] and process.returncode == -signal.SIGKILL


# A job's process that another one starts; it says that it runs, and goes on for long.
STARTED = """
import sys, time
from nemo_aligner.launch.endings import user_errors_end_the_job

@user_errors_end_the_job
def main():
    print("runs", flush=True)
    time.sleep(60)

if "late" in sys.argv:
    sys.stdin.read()
main()
"""
STARTER = """
import os, subprocess, sys
from nemo_aligner.launch.endings import STARTED_BY

environment = {**os.environ, STARTED_BY: str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_no_process_outlives_the_one_that_has_started_it(when):
    """Killed before the other one's `main` begins ("late"), or after."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starter = subprocess.Popen([sys.executable, "-c", STARTER, STARTED, when], **pipes)
    child = psutil.Process(int(starter.stdout.readline()))
    try:
        if when == "early":
            assert starter.stdout.readline() == "runs\n"
        starter.kill()
        starter.wait()
        if when == "late":
            starter.stdin.close()  # it begins now
        wait_until(lambda: not child.is_running(), 20, "the end of the other process", 0.05)
        assert starter.stdout.read() == ""
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


# ---- imports and threads (launch/start_up.py) ----


def test_long_imports_keep_their_objects_out_of_later_collections():
    frozen = gc.get_freeze_count()
    try:
        with start_up.long_imports():
            assert not gc.isenabled()
            kept = [[] for _ in range(10_000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py does


@pytest.mark.parametrize(
    ("env", "devices", "jobs", "threads"),
    [
        ({}, 1, 1, 12),
        ({}, 1, 2, 6),  # an actor and its critic
        ({}, "2", 3, 2),
        ({}, "0,1", 1, 6),
        ({}, [0, 1, 2], 1, 4),
        ({}, "auto", 1, 12),
        ({}, 16, 2, 1),  # never none
        ({"LOCAL_WORLD_SIZE": "4"}, 1, 1, 3),  # torchrun's number counts
        ({"SLURM_CPUS_PER_TASK": "8"}, 4, 2, 8),  # of this rank alone
        ({"OMP_NUM_THREADS": "5"}, 4, 2, 5),  # the user's choice
    ],
)
def test_ranks_and_jobs_divide_the_cores(monkeypatch, env, devices, jobs, threads):
    monkeypatch.setattr(start_up, "available_cores", lambda: 12)
    start_up.share_cores(devices, jobs, env)
    assert env["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("300000 100000", 3), ("5 10", 1)]
)
def test_the_limit_of_a_container_counts(monkeypatch, limit, cores):
    monkeypatch.setattr(start_up.os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(limit))
    found = start_up.available_cores()
    monkeypatch.undo()
    assert found == cores
