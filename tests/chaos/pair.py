# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""An actor and its server, real processes, that are started again with the same commands whenever
one has ended, as a scheduler does.
"""

import contextlib
import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nemo_aligner.checkpoint.checksums import MANIFEST, parse_manifest
from nemo_aligner.checkpoint.folders import complete_checkpoints
from nemo_aligner.servers.ports import find_free_port
from tests.chaos import phases
from tests.functional import test_ppo_job, test_rs_job
from tests.functional.jobs import ScriptJob, metric_names, read_metrics, reward_server
from tests.patience import Deadline
from tests.processes import family

MAX_STARTS = 4  # of the actor: after the fault, and after the ends that follow from it
END_S = 120.0  # a run of three steps takes 15 s; a lost peer is noticed within 60 s
LEFT_S = 60.0  # Triton's processes notice by themselves that their job has been killed
STEPS = 3

# The reward of rejection sampling; its worker says that it is at work, and waits, when told to.
REWARD_FUNCTION = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests.chaos.phases import pause
    FOLDER = Path({folder!r})

    def score(prompts, responses, lengths):
        if (FOLDER / "worker").exists() and not (FOLDER / "reached").exists():
            pause(FOLDER)
        return [p.count("a") + 0.5 * len(r) for p, r in zip(prompts, responses)]
"""


@dataclass
class Ending:
    """How a job of the pair ended."""

    side: str
    code: int
    log: str


@dataclass
class Pair:
    """A job of `kind` ("ppo" or "rs") in `folder`, and how its processes ended."""

    kind: str
    inputs: Path
    folder: Path
    tokenizer: str  # its folder
    ranks: int = 1  # of each job; a reward server has one
    steps: int = STEPS
    interval: int = 1  # of validations and checkpoints
    network_port: int | None = None  # of a relay that the actor goes through
    hang_timeout_s: float = 600  # of both jobs
    port: int = field(default_factory=find_free_port)
    endings: list[Ending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        phases.write_scripts(self.folder)
        self.actor: ScriptJob | None = None
        self.server: ScriptJob | None = None

    @property
    def server_side(self) -> str:
        return "critic" if self.kind == "ppo" else "reward server"

    def start_server(self) -> ScriptJob:
        if self.kind == "ppo":
            script = str(self.folder / "serve_ppo_critic.py")
            own = [test_ppo_job.TRITON, test_ppo_job.CONSTANT_RATE]
            own.append(f"trainer.hang_timeout_s={self.hang_timeout_s}")
            options = {"ranks": self.ranks, "script": script}
            return test_ppo_job.critic(self.inputs, self.folder, self.port, *own, **options)
        code = REWARD_FUNCTION.format(root=str(phases.ROOT), folder=str(self.folder))
        (self.folder / "reward.py").write_text(textwrap.dedent(code))
        extra = ["inference.reward_fn=reward.py:score", "model.tokenizer.library=huggingface"]
        extra.append(f"model.tokenizer.type={self.tokenizer}")
        script = str(self.folder / "serve_reward_model.py")
        return reward_server("null", self.folder, self.port, *extra, script=script)

    def start_actor(self) -> ScriptJob:
        section = "ppo" if self.kind == "ppo" else "rs"
        job = test_ppo_job if self.kind == "ppo" else test_rs_job
        extra = [
            f"trainer.{section}.max_steps={self.steps}",
            f"trainer.{section}.max_epochs={self.steps}",  # an epoch has a few steps
            f"trainer.{section}.val_check_interval={self.interval}",
            f"trainer.{section}.save_interval={self.interval}",
            f"model.{section}.rollout_micro_batch_size=2",
            test_ppo_job.CONSTANT_RATE,
            f"trainer.hang_timeout_s={self.hang_timeout_s}",
        ]
        port, script = (
            self.network_port or self.port,
            self.folder / f"train_gpt_{section}_actor.py",
        )
        own = {"ranks": self.ranks, "script": str(script)}
        return job.actor(self.inputs, self.folder, port, *extra, **own)

    def run(self, happen: Callable[["Pair"], None] | None = None) -> None:
        """Run to the end of training, and let the fault `happen` in the first start. Whatever ends
        before is started again; nothing is left.

        Raises:
            AssertionError: no end within `END_S` after the fault or a start, or too many starts.
        """
        with contextlib.ExitStack() as jobs:
            self.server = jobs.enter_context(self.start_server())
            self.actor = jobs.enter_context(self.start_actor())
            if happen is not None:
                happen(self)
            os.environ.pop("CHAOS_FAULT", None)  # what is started from here on meets nothing
            starts, deadline = 1, Deadline(END_S)
            while (code := self.actor.process.poll()) != 0:
                assert not deadline.passed(), self.story("no end in time")
                if code is not None:
                    self.note_end("actor", self.actor)
                    assert starts < MAX_STARTS, self.story("too many starts")
                    self.actor = jobs.enter_context(self.start_actor())
                    starts, deadline = starts + 1, Deadline(END_S)
                if self.server.process.poll() is not None:
                    self.note_end(self.server_side, self.server)
                    self.server = jobs.enter_context(self.start_server())
                self.actor.note_processes()
                self.server.note_processes()
                time.sleep(0.2)
            left = self.actor.leftovers(LEFT_S)
            assert not left, self.story(f"the actor left processes: {left}")
            self.server.stop()
            left = self.server.leftovers(LEFT_S)
            assert not left, self.story(f"the server left processes: {left}")

    def note_end(self, side: str, job: ScriptJob) -> None:
        self.endings.append(Ending(side, job.process.returncode, job.log))
        left = job.leftovers(LEFT_S)
        assert not left, self.story(f"{side}: processes are left: {left}")
        job.__exit__()

    def story(self, what: str) -> str:
        """`what`, with the ends of all logs."""
        logs = [f"--- {e.side} ended with {e.code}:\n{e.log[-3000:]}" for e in self.endings]
        jobs = [job for job in (self.server, self.actor) if job is not None]
        logs += [f"--- {job.log_path.name} now:\n{job.log[-3000:]}" for job in jobs]
        return "\n".join([what, *logs])

    # ---- where and whom a fault meets ----

    def wait_until_reached(self) -> int:
        """Process id of whoever reached the place of the fault."""
        deadline = Deadline(END_S)
        while not (self.folder / "reached").exists():
            assert not deadline.passed(), self.story("the place of the fault is not reached")
            assert self.actor.process.poll() is None, self.story("the actor ended before")
            self.actor.note_processes()
            self.server.note_processes()
            time.sleep(0.05)
        return int((self.folder / "reached").read_text())

    def send(self, process: psutil.Process, number: int, stopped_s: float | None = 3.0) -> None:
        """Send a signal; what was stopped goes on after `stopped_s`, with None never."""
        for job in (self.actor, self.server):
            job.note_processes(0.0)
        process.send_signal(number)
        (self.folder / "go").touch()
        if number == signal.SIGSTOP and stopped_s is not None:
            time.sleep(stopped_s)
            process.send_signal(signal.SIGCONT)

    def of_triton(self, word: str) -> psutil.Process:
        """The process of Triton's, of the server, with `word` in its command."""
        children = family(self.server.process.pid)[1:]
        triton = [process for process in children if "triton" in process.name()]
        found = [process for process in triton if word in " ".join(process.cmdline()[:2])]
        assert found, self.story(f"no process with {word}")
        return found[0]

    # ---- what came of it ----

    def outcome(self) -> dict[str, Any]:
        """All metrics of both jobs that are not times, and checksums of weights and optimizer
        states in their last checkpoints.
        """
        sides = ("actor", "critic") if self.kind == "ppo" else ("actor",)
        return outcome(self.folder, sides, lambda name: not name.endswith("_time"))


def outcome(
    folder: Path, sides: tuple[str, ...], compared: Callable[[str], bool]
) -> dict[str, Any]:
    """Metrics of jobs with the names that are to be compared, and checksums as of `Pair`."""
    found: dict[str, Any] = {}
    for side in sides:
        names = filter(compared, metric_names(folder / side))
        found |= {f"{side} {name}": read_metrics(folder / side, name) for name in names}
        last, _state = complete_checkpoints(folder / side / "checkpoints")[-1]
        entries = parse_manifest((last / MANIFEST).read_bytes(), last).items()
        sums = {f"{side} {name}": x for name, x in entries if name.endswith(".distcp")}
        assert sums, f"{last} has no weights"
        found |= sums
    return found


@contextlib.contextmanager
def chaos(pair: Pair, side: str, rank: int, phase: str, fault: str, **more) -> Iterator[None]:
    """Inside, processes that are started meet the fault (tests/chaos/phases.py)."""
    settings = {"side": side, "rank": rank, "phase": phase, "fault": fault}
    os.environ["CHAOS_FAULT"] = json.dumps({**settings, "folder": str(pair.folder), **more})
    try:
        yield
    finally:
        os.environ.pop("CHAOS_FAULT", None)
