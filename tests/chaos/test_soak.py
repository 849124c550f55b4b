# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A long run: what the processes and folders of a pair hold does not grow with the steps."""

import os
import time

import pytest

from tests.chaos.pair import Pair
from tests.functional.jobs import read_metrics
from tests.patience import wait_until
from tests.processes import family

STEPS = int(os.environ.get("CHAOS_SOAK_STEPS", 2000))
GROWTH_MB = 40  # of one process, from a fifth of the steps to their end
FILES = 60  # in the folder of a job, whatever the steps


def memory_mb(pid: int) -> dict[str, float]:
    """By the place of a process in the job's tree, what it does not share."""
    used = lambda process: process.memory_full_info().uss / 2**20
    return {f"{n} {each.name()}": used(each) for n, each in enumerate(family(pid))}


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_run_holds_what_a_short_one_does(inputs, tiny_tokenizer_dir, tmp_path):
    pair = Pair("ppo", inputs, tmp_path, tiny_tokenizer_dir, steps=STEPS, interval=STEPS // 20)
    found: list[dict[str, float]] = []

    def watch(pair: Pair) -> None:
        for share in (0.2, 0.98):
            done = lambda share=share: steps_done(pair) >= share * STEPS
            story = lambda share=share: pair.story(f"{share} of {STEPS} steps")
            wait_until(done, 10.0 * STEPS, story, 1.0)
            jobs = {"actor": pair.actor, "critic": pair.server}
            uses = [(side, memory_mb(job.process.pid)) for side, job in jobs.items()]
            found.append(
                {f"{side} {name}": size for side, use in uses for name, size in use.items()}
            )

    began = time.monotonic()
    pair.run(watch)
    assert not pair.endings, pair.story("a job ended")
    early, late = found
    grown = {name: late[name] - early[name] for name in early if name in late}
    print(f"{STEPS} steps in {time.monotonic() - began:.0f} s; MB grown since a fifth: {grown}")
    assert grown and all(size < GROWTH_MB for size in grown.values()), grown
    assert len(read_metrics(tmp_path / "actor", "train_rollouts/rewards")) == STEPS
    for side in ("actor", "critic"):
        files = [path for path in (tmp_path / side).rglob("*") if path.is_file()]
        assert len(files) < FILES, files


def steps_done(pair: Pair) -> int:
    assert pair.actor.process.poll() is None, pair.story("the actor has ended")
    file = pair.folder / "actor" / "metrics.jsonl"
    return file.read_text().count('"train_rollouts/rewards"') if file.exists() else 0
