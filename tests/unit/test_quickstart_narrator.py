# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's shell: what the narrator says, what counts as learned, and that no child survives.

The whole of `run.py` runs here with scripts of a few lines in place of the project's own, which have their own tests.
"""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import jobs  # noqa: E402
import outcome  # noqa: E402
import run  # noqa: E402
from narrator import Narrator, Phase, clock_text  # noqa: E402

# ------------------------------------------------------------------------------------------------------------ narrator


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


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
    phase.add([{"step": 1, "train/reward": 2.0}], now=46.0)  # repeated after a resume: not a new step
    assert len(phase.steps) == 2 and phase.values == {"train/reward": 2.0, "train/kl": 0.1}


def test_plain_lines_without_a_terminal():
    clock, text = Clock(), io.StringIO()
    phases = [Phase("Data", 1, 5.0), ppo_phase()]
    narrator = Narrator(phases, console=Console(file=text, width=200), lines_per_phase=2, clock=clock)
    with narrator:
        narrator.start(phases[0])
        clock.now = 5.0
        narrator.finish(phases[0], "[b]6000[/b] reviews")
        narrator.start(phases[1], "starting")
        for step in range(10):
            clock.now += 2.0
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


def test_bars_on_a_terminal():
    text = io.StringIO()
    phases = [Phase("Data", 1, 5.0), ppo_phase()]
    narrator = Narrator(phases, console=Console(file=text, width=160, force_terminal=True))
    with narrator:
        narrator.start(phases[1])
        narrator.update(phases[1], [{"step": 0, "train/reward": 0.25}])
        narrator.finish(phases[1])
    assert "PPO" in text.getvalue() and "reward 0.25" in text.getvalue() and "10/10" in text.getvalue()


def test_clock_text():
    assert [clock_text(seconds) for seconds in (0, 59.6, 75, 3600)] == ["0:00", "1:00", "1:15", "60:00"]


def test_metrics_tail_waits_for_whole_lines(tmp_path):
    tail = jobs.MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.poll() == []
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for piece, expected in (
            ('{"step": 1}\n{"st', [{"step": 1}]),
            ('ep": 2}', []),
            ("\n", [{"step": 2}]),
            ("", []),
        ):
            file.write(piece)
            file.flush()
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

    assert run.hydra_value(value) == text
    assert OverridesParser.create().parse_override(f"key={text}").value() == value


# ------------------------------------------------------------------------------------------------------------- outcome

GOOD, BAD = "The plot is superb.", "The plot is dull."


def write_samples(folder, before, after):
    """`before` and `after`: (review, reward) for prompts 0, 1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "prompt": f"film {index}:", "response": review, "reward": reward, "is_end": True}
        for step, samples in ((0, before), (8, after))
        for index, (review, reward) in enumerate(samples)
    ]
    (folder / "val_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_numbers_of_the_outcome_by_hand(tmp_path):
    write_samples(tmp_path, [(GOOD, 1.0), (BAD, -1.0)] * 50, [(GOOD, 2.0), (GOOD, 4.0)] * 50)
    metrics = [{"step": s, "train_rollouts/init_policy_kl": kl} for s, kl in ((0, 0.0), (1, 0.2), (7, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    result = outcome.read_outcome(tmp_path)
    assert (result.reward.before, result.reward.after, result.gold.before, result.gold.after) == (0.0, 3.0, 0.0, 1.0)
    variance = 100 / 99  # of -1 and 1 and of 2 and 4, fifty times each
    assert result.reward.standard_error == pytest.approx((2 * variance / 100) ** 0.5)
    assert result.reward.needed == pytest.approx(max(0.5 * variance**0.5, 4 * (2 * variance / 100) ** 0.5))
    assert (result.kl_first, result.kl_last, result.ended_before) == (0.0, 0.5, None)
    assert result.learned and (result.first_step, result.last_step, result.num_samples) == (0, 8, 100)
    assert result.pairs[1]["before"] == BAD and result.pairs[1]["after"] == GOOD


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([(GOOD, 1.0), (BAD, -1.0)] * 50, "nothing changed"),
        ([(GOOD, 3.0), (BAD, 2.0)] * 50, "the reward model was fooled: gold stood still"),
        ([(GOOD, 0.0), (GOOD, 0.1)] * 50, "gold rose, the reward did not"),
        ([(GOOD, 1.0), (BAD, -1.0)] * 40 + [(GOOD, 1.0)] * 20, "a little of both"),
        ([(BAD, -1.0)] * 100, "both fell"),
    ],
)
def test_what_is_not_a_clear_rise(tmp_path, after, why):
    write_samples(tmp_path, [(GOOD, 1.0), (BAD, -1.0)] * 50, after)
    assert not outcome.read_outcome(tmp_path).learned, why


def test_a_big_rise_of_very_few_samples_is_not_clear(tmp_path):
    write_samples(tmp_path, [(GOOD, 1.0), (BAD, -1.0)], [(GOOD, 2.0), (GOOD, 1.5)])
    assert not outcome.read_outcome(tmp_path).learned


def test_too_little_to_judge(tmp_path):
    with pytest.raises(outcome.NoOutcome, match="missing"):
        outcome.read_outcome(tmp_path)
    write_samples(tmp_path, [(GOOD, 1.0)], [])
    with pytest.raises(outcome.NoOutcome, match="before and one after"):
        outcome.read_outcome(tmp_path)


# ------------------------------------------------------------------------------------------------- the run, with fakes

FAKE_TRAINER = """
    import json, pathlib, sys, time
    args = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:])
    folder = pathlib.Path(args["exp_manager.explicit_log_dir"].strip("'"))
    name = args["exp_manager.name"].strip("'")
    source = args.get("pretrained_checkpoint.restore_from_path", "null").strip("'")
    assert source == "null" or pathlib.Path(source).exists(), source
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(4):
            metrics.write(json.dumps({"step": step, "time": time.time(), "train/loss": 1.0 / (step + 1)}) + "\\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / f"{name}.nemo").write_text("weights")
"""
FAKE_ACTOR = """
    import json, pathlib, socket, sys, time
    args = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:])
    folder = pathlib.Path(args["exp_manager.explicit_log_dir"].strip("'"))
    port = int(args["remote_critic_rm.critic.port"])
    for _ in range(200):  # the server has to be there
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    else:
        sys.exit("no server")
    prompts = [json.loads(line)["text"] for line in (folder.parent / "data" / "prompts_validation.jsonl").open()]
    with (folder / "val_samples.jsonl").open("w") as samples:
        for step, word in ((0, "dull"), (2, "superb")):
            for index, prompt in enumerate(prompts):
                reward = step + index % 2
                row = {"step": step, "prompt": prompt, "response": f" The plot is {word}.", "reward": reward}
                samples.write(json.dumps(row) + "\\n")
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(2):
            row = {"step": step, "train_rollouts/rewards": step, "train_rollouts/init_policy_kl": 0.1 * step}
            metrics.write(json.dumps(row) + "\\n")
"""
FAKE_SERVER = """
    import socket, sys, time
    args = dict(a.split("=", 1) for a in sys.argv[1:])
    server = socket.create_server(("127.0.0.1", int(args["trainer.ppo.port"])))
    while True:
        server.accept()[0].close()
"""
SLEEPER = """
    import subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)
"""
BROKEN = """
    import sys
    print("loading")
    sys.exit("ValueError: the value 7 is too odd; choose an even one")
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Folder of stand-ins for the project's scripts; returns a function that replaces one of them."""
    folder = tmp_path / "scripts"
    folder.mkdir()

    def replace(name: str, code: str) -> None:
        (folder / name).write_text(textwrap.dedent(code))

    replace("train_gpt_sft.py", FAKE_TRAINER)
    replace("train_reward_model.py", FAKE_TRAINER)
    replace("serve_ppo_critic.py", FAKE_SERVER)
    replace("train_gpt_ppo_actor.py", FAKE_ACTOR)
    replace.folder = folder
    monkeypatch.setattr(run, "SCRIPTS", folder)
    return replace


def children() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.status() != "zombie"]


def test_run_tells_the_story_and_leaves_nothing_behind(tmp_path, scripts, capsys):
    before = children()
    assert run.main(["--run-dir", str(tmp_path / "a run"), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    for text in (
        "[2/4] Supervised fine-tuning: done",
        "loss 0.25",
        "KL 0.1",
        "gold score",
        "gold -1.00",
        "gold +1.00",
    ):
        assert text in said
    assert "Report: " in said and "GiB of memory" in said and (tmp_path / "a run" / "report.html").exists()
    summary = json.loads((tmp_path / "a run" / "summary.json").read_text())
    assert summary["learned"] and summary["gold"]["after"] == 1.0 and summary["peak_memory_bytes"] > 1e6
    assert children() == before


def test_run_that_does_not_learn_exits_with_one(tmp_path, scripts, capsys):
    scripts("train_gpt_ppo_actor.py", FAKE_ACTOR.replace('"superb"', '"dull"'))
    assert run.main(["--run-dir", str(tmp_path / "run"), "--steps", "2"]) == 1
    assert "Not learned: the gold score rose by 0.000, clear is 0.300" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["train_gpt_sft.py", "serve_ppo_critic.py", "train_gpt_ppo_actor.py"])
def test_failing_job_shows_its_last_lines(tmp_path, scripts, capsys, script):
    before = children()
    if script == "serve_ppo_critic.py":  # the actor waits for a server that has died
        scripts("train_gpt_ppo_actor.py", SLEEPER)
    scripts(script, BROKEN)
    assert run.main(["--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().out
    assert "the value 7 is too odd" in said and "exit code 1" in said and "failed" in said
    assert children() == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_every_child(tmp_path, scripts, signum):
    scripts("train_gpt_sft.py", SLEEPER)
    code = f"import sys; sys.path.insert(0, {str(QUICKSTART)!r}); import run, pathlib; "
    code += f"run.SCRIPTS = pathlib.Path({str(scripts.folder)!r}); sys.exit(run.main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(QUICKSTART.parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--run-dir", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        deadline = time.monotonic() + 30
        while len(found := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signum)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert f"stopped by {signal.Signals(signum).name}" in said
    gone, alive = psutil.wait_procs(found, timeout=5)
    assert not alive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_killed_run_takes_its_children_along(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(QUICKSTART)!r}); import jobs, pathlib, time; "
    code += "command = [sys.executable, '-c', 'import time; time.sleep(300)']; "
    code += "job = jobs.Job('sleeper', command, pathlib.Path(sys.argv[1])); "
    code += "job.start(); print(job.process.pid, flush=True); time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "job")], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    child.wait(timeout=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--rm-steps", "-3"], "--rm-steps is -3"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
def test_senseless_arguments(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        run.parse_args([*arguments, "--run-dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_folder_of_an_old_run_is_refused(tmp_path, capsys):
    (tmp_path / "old").write_text("")
    with pytest.raises(SystemExit):
        run.parse_args(["--run-dir", str(tmp_path)])
    assert f"{tmp_path} is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 50, 200])
@pytest.mark.parametrize(
    ("make_job", "config_name"),
    [
        (run.sft_job, "gpt_sft"),
        (run.reward_model_job, "training_rm"),
        (run.critic_job, "gpt_ppo_critic"),
        (run.actor_job, "gpt_ppo_actor"),
    ],
)
def test_overrides_are_keys_of_the_configurations_and_have_an_effect(tmp_path, make_job, config_name, steps):
    from hydra import compose, initialize_config_dir

    from nemo_aligner.utils.config_utils import check_config

    for name in ("sft", "rm"):  # the jobs before
        checkpoint = tmp_path / "it's a run" / name / "checkpoints" / f"{name}.nemo"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_text("weights")
    port = [5556] if make_job in (run.critic_job, run.actor_job) else []
    job = make_job(tmp_path / "it's a run", 0, steps, *port)
    with initialize_config_dir(str(QUICKSTART.parents[1] / "conf"), version_base=None):
        cfg = compose(config_name, overrides=job.command[2:])
    assert check_config(cfg, config_name, visible_devices=0, env={}) == []  # no notes about keys without effect
    assert cfg.exp_manager.explicit_log_dir == str(job.folder)
