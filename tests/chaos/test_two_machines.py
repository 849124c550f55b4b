# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs with a rank on each of two machines: the numbers are those of one machine; and whatever
happens to a machine or to the link, each rank that lives ends within the time, with the same code
and message, and the same commands finish the run with the numbers of an undisturbed one.
"""

import contextlib
import functools
import json
import os
import signal
import time

import pytest

from nemo_aligner.checkpoint.folders import complete_checkpoints
from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.chaos.pair import outcome
from tests.chaos.test_fault_matrix import Cell
from tests.chaos.two_machines import Job, Machines, unavailable
from tests.functional import test_ppo_job
from tests.functional.jobs import ScriptJob
from tests.functional.test_sft_rm_scripts import data, sft  # noqa: F401
from tests.patience import patience, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]
HANG_TIMEOUT_S = 20.0
END_S = 120.0
STEPS = 6


class Run:
    """The jobs of one kind ("sft" or "ppo"), on two machines, or with two ranks on one."""

    def __init__(self, kind, folder, sources, machines=None):
        self.kind, self.folder, self.machines = kind, folder, machines
        self.sources, self.port = sources, find_free_port()
        folder.mkdir(exist_ok=True)
        self.sides = ("sft",) if kind == "sft" else ("critic", "actor")

    def start(self, side) -> Job | ScriptJob:
        if self.machines is None:
            return self.make(side, self.folder, None, ranks=2)
        scripts = {"sft": "train_gpt_sft", "actor": "train_gpt_ppo_actor"}
        script = scripts.get(side, "serve_ppo_critic") + ".py"
        make = functools.partial(self.make, side)
        return Job(self.machines, self.folder, script, make)

    def make(self, side, here, script, *more, ranks=1):
        limit = f"trainer.hang_timeout_s={min(patience(HANG_TIMEOUT_S), 40):.0f}"
        more = [*more, f"exp_manager.explicit_log_dir={self.folder}/{side}", limit]
        named = {} if script is None else {"script": script}
        if side == "sft":
            own = [f"trainer.sft.max_steps={STEPS}", "trainer.sft.val_check_interval=2"]
            files, tokenizer = self.sources
            return sft(files, tokenizer, here / side, *own, *more, ranks=ranks, **named)
        address = self.machines.addresses[0] if self.machines else "127.0.0.1"
        if side == "critic":
            more += [f"trainer.ppo.host={address}", "server.frontend=asgi"]
            make = test_ppo_job.critic
        else:
            limits = {"max_steps": STEPS, "val_check_interval": 2}
            more += [f"trainer.ppo.{key}={value}" for key, value in limits.items()]
            more += [f"remote_critic_rm.critic.ip={address}"]
            make = test_ppo_job.actor
        more.append(test_ppo_job.CONSTANT_RATE)
        return make(self.sources, here, self.port, *more, ranks=ranks, **named)

    def has_saved(self, side) -> bool:
        return bool(complete_checkpoints(self.folder / side / "checkpoints"))

    def ending(self, side) -> dict:
        return json.loads((self.folder / side / "ending.json").read_text())

    def finish(self) -> None:
        """Run to the end of training, from where the last run has come to."""
        with contextlib.ExitStack() as stack:
            jobs = {side: stack.enter_context(self.start(side)) for side in self.sides}
            codes = jobs[self.sides[-1]].wait(2 * END_S)
            log = jobs[self.sides[-1]].log[-4000:]
            assert codes in (0, [0, 0]), log
            if self.kind == "ppo":
                critic = jobs["critic"]
                critic.signal(signal.SIGTERM) if self.machines else critic.stop()
                assert critic.wait(END_S) in (0, [0, 0]), critic.log[-4000:]

    def outcome(self) -> dict:
        return outcome(self.folder, self.sides, lambda name: "loss" in name)


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory):
    """A token for both jobs, and one folder for what is temporary on both machines."""
    if reason := unavailable():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NEMO_ALIGNER_TOKEN", "of-two-machines-of-one")
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        yield


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory, tiny_tokenizer_dir):
    """`undisturbed(kind)`: a run on one machine, and what its jobs are made of."""
    runs = {}

    def run(kind):
        if kind not in runs:
            sources = request.getfixturevalue("inputs" if kind == "ppo" else "data")
            sources = sources if kind == "ppo" else (sources, tiny_tokenizer_dir)
            made = Run(kind, tmp_path_factory.mktemp(kind), sources)
            made.finish()
            runs[kind] = made
        return runs[kind]

    return run


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_two_machines_give_the_numbers_of_one(kind, undisturbed, tmp_path):
    one = undisturbed(kind)
    with Machines() as machines:
        two = Run(kind, tmp_path / "run", one.sources, machines)
        two.finish()
    assert two.outcome() == one.outcome()
    assert not list(os.scandir(os.environ["TMPDIR"]))


FAULTS = [("machine of rank 0", "lost"), ("other machine", "lost"), ("link", "cut")]
FAULTS += [("link", "cut for 8 s"), ("link", "cut, then SIGTERM")]
CELLS = [Cell(k, role, "after a save", fault) for k in ("sft", "ppo") for role, fault in FAULTS]


def end_in_time(cell, run, jobs):
    """The rest of the fault, and what comes of it."""
    lost = {"machine of rank 0": 0, "other machine": 1}.get(cell.role)
    for job in jobs.values() if lost is not None else ():
        job.kill(lost)
    code = ExitCode.LOST_PEER
    if "SIGTERM" in cell.fault:
        code = ExitCode.PRE_EMPTED
        for _ in range(2):  # the first one waits for the end of the step
            for job in jobs.values():
                job.signal(signal.SIGTERM)
            time.sleep(2)
    for side, job in jobs.items():
        codes, log = job.wait(HANG_TIMEOUT_S + 60), f"{side}:\n{job.log[-6000:]}"
        allowed = {code}
        if "SIGTERM" in cell.fault and side == "critic":  # a save of it cannot end either
            allowed = {ExitCode.FINISHED, ExitCode.LOST_PEER}
        living = [c for n, c in enumerate(codes) if n != lost]
        assert set(living) <= allowed, log
        assert run.ending(side)["code"] in living, log


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in CELLS])
def test_every_rank_that_lives_ends_in_time(cell, undisturbed, tmp_path):
    one, start = undisturbed(cell.kind), time.monotonic()
    with Machines() as machines, contextlib.ExitStack() as stack:
        run = Run(cell.kind, tmp_path / "run", one.sources, machines)
        jobs = {side: stack.enter_context(run.start(side)) for side in run.sides}
        first = run.sides[-1]
        wait_until(lambda: run.has_saved(first), 2 * END_S, lambda: jobs[first].log[-4000:])
        machines.cut()
        if cell.fault == "cut for 8 s":
            time.sleep(8)
            machines.join()
            assert jobs[first].wait(2 * END_S) == [0, 0], jobs[first].log[-4000:]
            jobs[run.sides[0]].signal(signal.SIGTERM)  # the critic would go on
            assert jobs[run.sides[0]].wait(END_S) == [0, 0], jobs[run.sides[0]].log[-4000:]
        else:
            end_in_time(cell, run, jobs)
            stack.close()
            machines.join()
            run.finish()
    assert run.outcome() == one.outcome()
    if report := os.environ.get("CHAOS_REPORT"):
        with open(report, "a") as file:
            line = cell._asdict() | {"seconds": round(time.monotonic() - start, 1)}
            file.write(json.dumps(line) + "\n")
