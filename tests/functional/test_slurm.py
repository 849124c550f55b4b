# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`scripts/slurm/pair.sbatch` under a real Slurm: pre-empted, killed, started again by Slurm, and
at its end with the numbers of an undisturbed run.

Slurm runs here as the packages `slurmctld slurmd slurm-client munge` of a distribution install it,
with a configuration of its own: two nodes, both of them this machine, by two addresses of
loopback. The test installs nothing, and starts no service of the machine.
"""

import contextlib
import json
import os
import pwd
import re
import secrets
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import ROOT, assert_ended_well, assert_same_metrics, count_of
from tests.functional.test_ppo_job import actor, critic
from tests.patience import patience, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo", "squeue", "scontrol", "scancel")
PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATHS) is None]

HINT = f"needs Slurm; {', '.join(MISSING)} not found (on Debian: slurmctld, slurmd, slurm-client, "
NO_SLURM = pytest.mark.skipif(bool(MISSING), reason=f"{HINT}munge)")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200), NO_SLURM]

NODES = ("127.0.0.1", "127.0.0.2")
# What stands for GPUs: Slurm wants devices of their own, and never opens them here.
DEVICES = [f"/dev/{n}" for n in "null zero full random urandom tty ptmx kmsg".split()]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{send_user_signal}
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=600
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
STEPS = 40


class Slurm:
    """A Slurm of its own in a folder; leaving its `with` block ends all of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {**os.environ, "PATH": PATHS, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o755)
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={d}\n" for d in DEVICES))
        host = socket.gethostname().partition(".")[0]
        node = "NodeName={0} NodeAddr={0} NodeHostname={1} Port={2} CPUs=8 RealMemory=1000"
        node += " Gres=gpu:8"
        nodes = "\n".join(node.format(address, host, find_free_port()) for address in NODES)
        names = {"host": host, "nodes": nodes, "user": pwd.getpwuid(os.getuid()).pw_name}
        names |= {"port": find_free_port(), "send_user_signal": self._send_user_signal()}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, **names))
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._daemons: list[subprocess.Popen[bytes]] = []

    def _send_user_signal(self) -> str:
        """How this release of Slurm is told to send the job's own signal at a pre-emption."""
        found = re.search(r"(\d+)\.(\d+)", self.ask("slurmctld", "-V"))
        assert found is not None
        new = (int(found[1]), int(found[2])) >= (23, 2)
        key = "PreemptParameters=" if new else "SlurmctldParameters=preempt_"
        return f"{key}send_user_signal"

    def __enter__(self) -> "Slurm":
        munge = self.folder / "munge"
        try:
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
            files = [
                f"--{key}={munge}/{name}" for key, name in (files | {"log-file": "log"}).items()
            ]
            self._start("munged", "--foreground", "--force", *files)
            wait_until((munge / "socket").exists, 20, self.logs)
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            wait_until(self._is_idle, 60, self.logs, 0.5)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self._daemons.append(subprocess.Popen(command, env=self.env, **streams))

    def __exit__(self, *_exc: object) -> None:
        # Where it did not come up, nobody answers.
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.ask("scancel", "--full", "--user", pwd.getpwuid(os.getuid()).pw_name)
            wait_until(lambda: not self.ask("squeue", "--noheader"), 30, self.logs, 0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(patience(20))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            process.kill()

    def _is_idle(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, self.logs()
        states = self.ask("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return states.split() == ["idle"] * 2 * len(NODES)

    def ask(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 or not check, (command, done.stderr, self.logs())
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: of its first part, if it has several."""
        first = self.ask("scontrol", "show", "job", number).split("\n\n")[0]
        return dict(re.findall(r"(\w+)=(\S+)", first))

    def release(self, number: str) -> None:
        """Let a job that was queued again start in seconds and not after two minutes; not at once,
        as slurmd refuses credentials of the second in which it has ended the job.
        """
        time.sleep(3)
        for part in ("+0", "+1"):
            self.ask("scontrol", "update", f"JobId={number}{part}", "StartTime=now")

    def processes(self) -> list[psutil.Process]:
        """Those of Slurm and of its jobs that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and (
                    str(self.folder) in words
                    or process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
                ):
                    found.append(process)
        return found

    def logs(self) -> str:
        """The ends of all logs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*/*.log")]
        ends = {file: file.read_text(errors="replace")[-3000:] for file in files}
        return "\n".join(f"--- {file}\n{end}" for file, end in ends.items())


@pytest.fixture
def slurm():
    if os.environ.get("SLURM_JOB_ID"):
        pytest.skip("runs inside a job of another Slurm")
    folder = tempfile.mkdtemp(prefix="slurm_", dir="/tmp")  # paths of sockets must be short
    try:
        with Slurm(Path(folder)) as running:
            yield running
        wait_until(lambda: not running.processes(), 30, lambda: str(running.processes()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def words_of(job) -> list[str]:
    """The overrides of a job of test_ppo_job.py, without those that the script sets itself."""
    own = ("host=", "port=", ".ip=", "explicit_log_dir=")
    return [word for word in job.overrides if not any(part in word for part in own)]


def test_ppo_is_queued_again_and_ends_with_the_same_numbers(inputs, slurm, tmp_path):
    letters = f"[{','.join(string.ascii_lowercase)}]"
    more = ["trainer.devices=1", "trainer.num_nodes=1"]
    more.append("exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False")
    limits = {"max_steps": STEPS, "max_epochs": 20, "val_check_interval": 0, "save_interval": 10}
    actor_more = [*more, *(f"trainer.ppo.{key}={value}" for key, value in limits.items())]
    actor_more.append(f"model.ppo.sampling_params.end_strings={letters}")
    critic_more = [*more, "trainer.ppo.max_steps=1000"]
    whole, port = tmp_path / "whole", find_free_port()
    with (
        critic(inputs, whole, port, *critic_more) as server,
        actor(inputs, whole, port, *actor_more) as job,
    ):
        assert_ended_well(job, job.wait(patience(150)))
        assert_ended_well(server, server.stop())
        actor_words, critic_words = words_of(job), words_of(server)

    results = tmp_path / "results"
    variables = {"REPO": str(ROOT), "PYTHON": sys.executable, "RESULTS": str(results)}
    variables |= {"PORT": str(find_free_port()), "MASTER_PORT": str(find_free_port())}
    variables |= {"DEVICES": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false"}
    slurm.env |= variables
    one = ["--nodes=1", "--ntasks-per-node=1"]
    script = str(ROOT / "scripts" / "slurm" / "pair.sbatch")
    jobs = ["critic", *critic_words, "--", "ppo", *actor_words]
    said = slurm.ask("sbatch", f"--output={results}.log", *one, ":", *one, script, *jobs)
    number = said.split()[-1]

    def output() -> str:
        files = [results.with_suffix(".log"), *results.glob("*/slurm_*.log")]
        texts = [file.read_text(errors="replace")[-2500:] for file in files if file.exists()]
        return "\n".join([*texts, slurm.logs()])

    def steps() -> int:
        return count_of(results / "actor", "train_rollouts/rewards")

    def wait_for(condition, limit_s: float, *states: str) -> None:
        """Until `condition(job)`, before which the job is in no other states."""

        def is_there() -> bool:
            job = slurm.job(number)
            assert job["JobState"] in ("PENDING", "RUNNING", *states), output()
            return condition(job)

        wait_until(is_there, limit_s, output, 0.5)

    def wait_for_step(count: int) -> None:
        wait_for(lambda _: steps() >= count, 150, "CONFIGURING")

    def wait_for_restart(times: int) -> None:
        queued = lambda job: job["JobState"] == "PENDING" and "Begin" in job["Reason"]
        wait_for(queued, 100, "COMPLETING", "REQUEUED")
        slurm.release(number)
        wait_until(lambda: slurm.job(number)["Restarts"] == str(times), 60, output, 0.5)

    # Slurm pre-empts the job: SIGUSR1, so it saves.
    wait_for_step(2)
    high = "--partition=high", "--nodes=2", "--exclusive", "--output=none", "--wrap=true"
    slurm.ask("sbatch", *high)
    wait_until((results / "actor" / "ending.json").exists, 100, output, 0.1)
    ending = json.loads((results / "actor" / "ending.json").read_text())
    assert (ending["code"], ending["reason"]) == (ExitCode.PRE_EMPTED, "SIGUSR1"), output()
    assert 2 <= ending["step"] < STEPS, "pre-empted too late"
    wait_for_restart(1)

    # The critic is killed, as the kernel does it when memory is short.
    wait_for_step(ending["step"] + 2)
    found = [p for p in slurm.processes() if "serve_ppo_critic.py" in " ".join(p.cmdline())]
    critics = [process for process in found if "python" in Path(process.exe()).name]
    assert critics and steps() < STEPS, output()
    min(critics, key=lambda process: process.create_time()).kill()
    wait_for_restart(2)

    wait_for(lambda job: job["JobState"] == "COMPLETED", 200, "COMPLETING", "COMPLETED")
    assert slurm.job(number)["ExitCode"] == "0:0"
    assert json.loads((results / "actor" / "ending.json").read_text())["step"] == STEPS
    for side in ("actor", "critic"):
        assert_same_metrics(results / side, whole / side)
