# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The walk-throughs' parts: what the narrator says, how jobs are started and followed, and what
counts as learned.

Whole walk-throughs are in `test_walkthroughs.py`.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import commands
import jobs
import outcome
import psutil
import pytest
import reviews
from narrator import Narrator, Phase
from rich.console import Console

from tests.patience import patience

# --------------------------------------------------------------------------------------- narrator


def ppo_phase():
    return Phase("PPO", 10, 100.0, "train/reward", {"train/reward": "reward", "train/kl": "KL"})


def test_time_left_comes_from_the_plan_first_and_from_the_speed_then():
    phase = ppo_phase()
    assert phase.seconds_left(now=0.0) == 100.0
    phase.started = 0.0
    assert phase.seconds_left(now=30.0) == 70.0
    phase.add([{"step": 0, "train/reward": 1.0}], now=40.0)
    assert phase.seconds_left(now=40.0) == 60.0  # one step tells no speed yet
    phase.add([{"step": 1, "train/reward": 1.0}, {"step": 2, "train/kl": 0.1}], now=45.0)
    assert phase.seconds_left(now=45.0) == 5.0 * 8
    phase.add([{"step": 1, "train/reward": 2.0}], now=46.0)  # after a resume: not a new step
    assert len(phase.steps) == 2 and phase.values == {"train/reward": 2.0, "train/kl": 0.1}


def test_plain_lines_without_a_terminal():
    times, text = [0.0], io.StringIO()
    phases = [Phase("Data", 1, 5.0), ppo_phase()]
    console = Console(file=text, width=200)
    narrator = Narrator(phases, console=console, lines_per_phase=2, clock=lambda: times[-1])
    with narrator:
        narrator.start(phases[0])
        times.append(5.0)
        narrator.finish(phases[0], "[b]6000[/b] reviews")
        narrator.start(phases[1], "starting")
        for step in range(10):
            times.append(times[-1] + 2.0)
            narrator.update(phases[1], [{"step": step, "train/reward": step / 2}])
            narrator.update(phases[1], [])
        narrator.finish(phases[1])
    assert text.getvalue().splitlines() == [
        "[1/2] Data (about 1:45 until the end of the run)",
        "[1/2] Data: done in 0:05; [b]6000[/b] reviews",
        "[2/2] PPO: starting (about 1:40 until the end of the run)",
        "[2/2] PPO: 5/10, reward 2, 0:10 left, run 0:10",
        "[2/2] PPO: done in 0:20; reward 4.5",
    ]


def test_metrics_tail_waits_for_whole_lines(tmp_path):
    tail = jobs.MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.poll() == []
    first, second = [{"step": 1}], [{"step": 2}]
    with (tmp_path / "metrics.jsonl").open("wb", buffering=0) as file:
        for piece, expected in (
            (b'{"step": 1}\n{"st', first), (b'ep": 2}', []), (b"\n", second), (b"", [])
        ):  # fmt: skip
            file.write(piece)
            assert tail.poll() == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "True"),
        (5e-4, "0.0005"),
        ("a b,c=[d]", "'a b,c=[d]'"),
        ("it's", "'it\\'s'"),
        ({"train": ["/a b/c.jsonl"]}, "{train:['/a b/c.jsonl']}"),
    ],
)
def test_hydra_reads_back_what_is_written(value, text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert commands.hydra_value(value) == text
    assert OverridesParser.create().parse_override(f"key={text}").value() == value


# --------------------------------------------------------------------------------------- outcome

GOOD, BAD = "The plot is superb.", "The plot is dull."


def write_samples(folder, before, after):
    """`before` and `after`: (review, reward) for prompts 0, 1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "prompt": f"film {n}:", "response": text, "reward": reward, "is_end": True}
        for step, samples in ((0, before), (8, after))
        for n, (text, reward) in enumerate(samples)
    ]
    (folder / "val_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_numbers_of_the_outcome_by_hand(tmp_path):
    write_samples(tmp_path, [(GOOD, 1.0), (BAD, -1.0)] * 50, [(GOOD, 2.0), (GOOD, 4.0)] * 50)
    kls, key = {0: 0.0, 1: 0.2, 7: 0.5}, "train_rollouts/init_policy_kl"
    metrics = [{"step": step, key: kl} for step, kl in kls.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    result = outcome.read_outcome(tmp_path, reviews.SCORES)
    reward, gold = result.rises["reward"], result.rises["gold"]
    assert (reward.before, reward.after, gold.before, gold.after) == (0.0, 3.0, 0.0, 1.0)
    variance = 100 / 99  # of -1 and 1 and of 2 and 4, fifty times each
    assert reward.standard_error == pytest.approx((2 * variance / 100) ** 0.5)
    least = max(0.5 * variance**0.5, 4 * (2 * variance / 100) ** 0.5)
    assert reward.needed == pytest.approx(least)
    assert (result.kl_first, result.kl_last, result.ended_before) == (0.0, 0.5, None)
    found = result.first_step, result.last_step, result.num_samples
    assert result.learned and found == (0, 8, 100)
    assert result.pairs[1]["before"] == BAD and result.pairs[1]["after"] == GOOD


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([(GOOD, 3.0), (BAD, 2.0)] * 50, "the reward model was fooled: gold stood still"),
        ([(GOOD, 0.0), (GOOD, 0.1)] * 50, "gold rose, the reward did not"),
        ([(GOOD, 1.0), (BAD, -1.0)] * 40 + [(GOOD, 1.0)] * 20, "a little of both"),
    ],
)
def test_what_is_not_a_clear_rise(tmp_path, after, why):
    write_samples(tmp_path, [(GOOD, 1.0), (BAD, -1.0)] * 50, after)
    assert not outcome.read_outcome(tmp_path, reviews.SCORES).learned, why


def test_too_little_to_judge(tmp_path):
    with pytest.raises(outcome.NoOutcome, match="missing"):
        outcome.read_outcome(tmp_path, reviews.SCORES)
    write_samples(tmp_path, [(GOOD, 1.0)], [])
    with pytest.raises(outcome.NoOutcome, match="before and one after"):
        outcome.read_outcome(tmp_path, reviews.SCORES)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_killed_run_takes_its_children_along(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(Path(jobs.__file__).parent)!r}); "
    code += "import jobs, pathlib, time; "
    code += "command = [sys.executable, '-c', 'import time; time.sleep(300)']; "
    code += "job = jobs.Job('sleeper', command, pathlib.Path(sys.argv[1])); "
    code += "job.start(); print(job.process.pid, flush=True); time.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "job")], stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    child.wait(timeout=patience(10))
