# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults at a named place of a job, inside its processes.

The environment variable CHAOS_FAULT holds JSON: `side` ("actor" or "server"), `rank`, `phase` (a
key of `PLACES`), `fault` and `folder`. The process of that rank meets the fault when it first
reaches that place, in the second step of the run: by then there is something to lose.
"""

import errno
import functools
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nemo_aligner.checkpoint.forms import RNG_FOLDER

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples/nlp/gpt"
PAUSE_LIMIT_S = 300.0


class Place(NamedTuple):
    """A function of the package, and in which call of it the fault is met."""

    owner: str  # module, or module:class
    function: str
    is_it: Callable[[int, tuple], bool]  # of (number of the call from 1, arguments)


def call(number: int) -> Callable[[int, tuple], bool]:
    return lambda count, _arguments: count == number


def at_step(step: int, method: str | None = None) -> Callable[[int, tuple], bool]:
    """Of methods whose object counts steps, or of what such a `method` calls; not in a validation
    between two of them.
    """

    def is_it(_count: int, arguments: tuple) -> bool:
        callers = {}
        frame = sys._getframe()
        while frame := frame.f_back:
            callers[frame.f_code.co_name] = frame
        counting = arguments[0] if method is None else callers[method].f_locals["self"]
        return counting.step == step and "run_validation" not in callers

    return is_it


def save(number: int) -> Callable[[int, tuple], bool]:
    """Of `write_durably`: when a rank writes its random states in its save of that number; it has
    written its weights.
    """
    saves = itertools.count(1)
    is_rng = lambda arguments: arguments[0].parent.name == RNG_FOLDER
    return lambda _count, arguments: is_rng(arguments) and next(saves) == number


TRAINER = "nemo_aligner.algorithms.rollout_trainer:RolloutTrainer"
PPO = "nemo_aligner.algorithms.ppo:PPOTrainer"
CRITIC = "nemo_aligner.algorithms.critic_server_trainer:CriticServerTrainer"
REWARD = "nemo_aligner.algorithms.reward_server:RewardModelServer"
CHECKPOINTS = "nemo_aligner.checkpoint.checkpointing"
WRITING = "nemo_aligner.checkpoint.checksums"
# Of the job and phase. An actor makes two updates per step, a critic counts updates.
PLACES = {
    ("actor", "start"): Place(TRAINER, "__init__", call(1)),
    ("actor", "generate"): Place(
        "nemo_aligner.algorithms.rollouts", "with_prompt_columns", at_step(1, "collect")
    ),  # one micro-batch has ended, others are still generated
    ("actor", "score"): Place(TRAINER, "wait_for_scores", at_step(1)),
    ("actor", "log-probs"): Place(PPO, "_with_logprobs", at_step(1)),
    ("actor", "train"): Place(
        "nemo_aligner.algorithms.rollout_trainer", "train_on_batch", call(4)
    ),
    ("actor", "critic train"): Place(PPO, "_finish_critic_update", at_step(1)),
    ("actor", "save"): Place(WRITING, "write_durably", save(2)),
    ("actor", "resume"): Place(f"{CHECKPOINTS}:CheckpointCallback", "_load", call(1)),
    ("critic", "start"): Place(CRITIC, "run_server", call(1)),
    ("critic", "score"): Place(CRITIC, "_score_rows", at_step(2)),
    ("critic", "train"): Place(CRITIC, "_train_step", at_step(3)),
    ("critic", "save"): Place(WRITING, "write_durably", save(3)),  # first: before step 1
    ("critic", "resume"): Place(f"{CHECKPOINTS}:CheckpointCallback", "_load", call(1)),
    ("reward server", "start"): Place(REWARD, "run_server", call(1)),
    ("reward server", "score"): Place(REWARD, "_score_rows", call(3)),
}


def write_scripts(folder: Path) -> None:
    """Scripts that run those of the project of the same name, with faults."""
    for script in SCRIPTS.glob("*.py"):
        lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})"]
        lines += ["from tests.chaos.phases import run"]
        lines += ['if __name__ == "__main__":', f"    run({str(script)!r})"]
        (folder / script.name).write_text("\n".join(lines))


def run(script: str) -> None:
    if "CHAOS_FAULT" in os.environ:
        fault = json.loads(os.environ["CHAOS_FAULT"])
        is_actor = "train" in Path(script).name
        if (fault["side"] == "actor") == is_actor:
            meet(fault)
    # Not by runpy, which would put `script` into sys.argv: other ranks would start that one.
    code = compile(Path(script).read_text(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script, "__spec__": None})


def owner_of(place: Place) -> Any:
    module, _, name = place.owner.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def meet(fault: dict[str, Any]) -> None:
    """Have this process meet the fault if it is the process of the fault's rank."""
    place = PLACES[fault["side"], fault["phase"]]
    owner = owner_of(place)
    original = getattr(owner, place.function)
    calls, met = [], []

    @functools.wraps(original)
    def met_by(*arguments, **named):
        calls.append(None)
        if not met and rank() == fault["rank"] and place.is_it(len(calls), arguments):
            met.append(None)
            act(fault)
        return original(*arguments, **named)

    setattr(owner, place.function, met_by)


def rank() -> int:
    """Of this process, on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def act(fault: dict[str, Any]) -> None:
    """Let the fault happen here, or wait until the test has made it happen."""
    folder = Path(fault["folder"])
    pause(folder, fault["fault"].startswith("SIG") or fault["fault"] == "stopped for good")
    while fault["fault"] == "hung":
        time.sleep(1)
    if fault["fault"] == "exception":
        raise RuntimeError(f"a fault of the test in {fault['phase']}")
    if fault["fault"] == "full disk":
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    if fault["fault"] == "clock jump":
        real = time.time
        time.time = lambda: real() + fault["seconds"]


def pause(folder: Path, wait: bool = True) -> None:
    """Say that the place is reached, and wait until the test says to go on."""
    written = folder / f"reached.{os.getpid()}"
    written.write_text(str(os.getpid()))
    written.rename(folder / "reached")
    deadline = time.monotonic() + PAUSE_LIMIT_S
    while wait and not (folder / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the test did not say within {PAUSE_LIMIT_S:.0f} s to go on")
        time.sleep(0.02)
