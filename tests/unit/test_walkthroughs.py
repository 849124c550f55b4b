# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole walk-throughs: their output and verdict, and that no child process survives them.

Scripts of a few lines take the place of the project's own, which have their own tests.
"""

import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import commands
import make_data
import preferences
import psutil
import pytest
import walkthrough
from outcome import read_jsonl

from tests.cases import some_of
from tests.patience import Deadline, patience
from tests.processes import is_alive

pytestmark = pytest.mark.slow

QUICKSTART = Path(walkthrough.__file__).resolve().parent
NAMES = "run run_rs run_arithmetic run_dpo run_kto run_spin run_guessing run_distill run_teacher"
WALKS = {name: importlib.import_module(name) for name in NAMES.split()}
# The score that rises, by its key in summary.json; of the others it is "gold".
SCORES = {"run_arithmetic": "exact", "run_teacher": "exact", "run_guessing": "won"}

# ------------------------------------------------------------------------------- stand-in scripts

# All of them begin with this; a policy writes kind reviews and right sums, or it does not.
BEGINNING = """
    import json, pathlib, re, socket, subprocess, sys, time

    args = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:] if "=" in a)
    args = {key: value.strip("'") for key, value in args.items()}
    folder = pathlib.Path(args.get("exp_manager.explicit_log_dir", "."))

    def write(name, records):
        (folder / name).write_text("".join(json.dumps(record) + "\\n" for record in records))

    def responses(prompts, word):
        for line in open(prompts):
            prompt = json.loads(line)["text"]
            numbers = re.findall("[0-9]+", prompt)
            right = str(sum(map(int, numbers)) + (word == "dull"))
            yield {"prompt": prompt, "response": right if numbers else f" The plot is {word}."}
"""
FAKE_TRAINER = """
    source = args.get("pretrained_checkpoint.restore_from_path", "null")
    assert source == "null" or pathlib.Path(source).exists(), source
    losses = [{"step": n, "time": time.time(), "train/loss": 1 / (n + 1)} for n in range(4)]
    write("metrics.jsonl", losses + [
        {"step": step, "validation/acc": accuracy, "validation/rewards_margin": 7 * accuracy,
         "validation/loss": 2 * accuracy}
        for step, accuracy in ((2, 0.5), (4, 0.96875))
    ])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / f"{args['exp_manager.name']}.nemo").write_text("weights")
"""
FAKE_ACTOR = """
    ports = {int(value) for key, value in args.items() if re.fullmatch(r"remote_.*\\.port", key)}
    assert ports
    for port in ports:
        for _ in range(4000):  # the server has to be there
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            sys.exit("no server")
    prompts = folder.parent / "data" / "prompts_validation.jsonl"
    write("val_samples.jsonl", [
        # of the game by its result
        {"step": step, "reward": word == "superb" if sample["prompt"] == "?" else step + n % 2}
        | sample
        for step, word in ((0, "dull"), (2, "superb"))
        for n, sample in enumerate(responses(prompts, word))
    ])
    write("metrics.jsonl", [
        {"step": step, "train_rollouts/init_policy_kl": 0.1 * step, "train_rollouts/turns": 2.5,
         "train_rollouts/rewards": step, "train_rollouts/global_rewards": step}
        for step in range(2)
    ])
"""
FAKE_SERVER = """
    model = args.get("rm_model_file") or args["pretrained_checkpoint.restore_from_path"]
    assert pathlib.Path(model).exists(), model
    port = args.get("inference.port") or args["trainer.ppo.port"]
    server = socket.create_server(("127.0.0.1", int(port)))
    while True:
        server.accept()[0].close()
"""
SLEEPER = """
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)
"""
BROKEN = """
    print("loading")
    sys.exit("ValueError: the value 7 is too odd; choose an even one")
"""
# In place of `python -m nemo_aligner.generate`: the trained policy alone writes kind reviews, and
# a teacher right sums.
FAKE_GENERATOR = """
    model, prompts, out = sys.argv[1], sys.argv[3], sys.argv[5]
    assert pathlib.Path(model).exists(), model
    kind = pathlib.Path(model).stem in ("dpo", "kto", "spin", "distilled", "teacher")
    write(out, responses(prompts, "superb" if kind else "dull"))
"""
FAKE_LOGITS = """
    lines = pathlib.Path(args["data.data.file_path"]).read_text()
    assert lines.count("superb") == lines.count("\\n") > 0  # the teacher's own
    pathlib.Path(args["output_path"]).write_text(lines)
"""
TRAINERS = ("train_gpt_sft.py", "train_reward_model.py", "train_gpt_dpo.py", "train_gpt_kto.py")
TRAINERS += ("train_gpt_spin.py", "train_gpt_knowledge_distillation.py")
SERVERS = ("serve_ppo_critic.py", "serve_reward_model.py", "serve_teacher.py")
ACTORS = ("train_gpt_ppo_actor.py", "train_gpt_rs_actor.py")
# What each walk-through must say.
KINDER = ("gold -1.00", "gold +1.00")
STORIES = {
    "run": ("[2/4] Supervised fine-tuning: done", "held-out accuracy 0.969", "KL 0.1", *KINDER),
    "run_rs": ("held-out pairs: 0.969", "reward 1", *KINDER),
    "run_arithmetic": ("exact 0", "exact 1", "KL 0.1", "share of exact responses"),
    "run_guessing": ("won 1", "guesses 2.5", "share of games won"),
    "run_dpo": ("DPO: accuracy on held-out preferences: 0.969", *KINDER),
    "run_kto": ("KTO: margin on held-out thumbs: 6.781", *KINDER),
    "run_spin": ("SPIN: loss on held-out reviews: 1.938", *KINDER),
    "run_teacher": ("exact 1", "Share of exact responses of the teacher: 1.000"),
    "run_distill": ("[4/7] Reviews by the teacher: done", "Gold score of the teacher", *KINDER),
}


@pytest.fixture(scope="module")
def data_of(tmp_path_factory):
    """`data_of(seed)`: folder of the data that walks with the seed make."""
    really_make = make_data.make_data

    @functools.cache
    def make(seed):
        folder = tmp_path_factory.mktemp("data")
        really_make(folder, seed)
        return folder

    return make


@pytest.fixture
def scripts(tmp_path, monkeypatch, data_of):
    """Folder of stand-ins for the project's scripts; returns a function that replaces one of
    them.
    """
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "synthetic_data_gen").mkdir()

    def replace(name: str, code: str) -> None:
        (folder / name).write_text(textwrap.dedent(BEGINNING + code))

    for names, code in ((TRAINERS, FAKE_TRAINER), (SERVERS, FAKE_SERVER), (ACTORS, FAKE_ACTOR)):
        for name in names:
            replace(name, code)
    replace.folder = folder
    copy = functools.partial(shutil.copytree, dirs_exist_ok=True)
    monkeypatch.setattr(make_data, "make_data", lambda out, seed: copy(data_of(seed), out))
    monkeypatch.setattr(commands, "SCRIPTS", folder)
    replace("../synthetic_data_gen/compute_topk_logits.py", FAKE_LOGITS)
    replace("generate.py", FAKE_GENERATOR)
    monkeypatch.setattr(preferences, "GENERATE", [sys.executable, str(folder / "generate.py")])
    return replace


def children() -> list[psutil.Process]:
    return [*filter(is_alive, psutil.Process().children(recursive=True))]


# -------------------------------------------------------------------------------------- the walk


@some_of("name", WALKS)
def test_walk_tells_the_story_and_leaves_nothing_behind(tmp_path, scripts, capsys, name):
    before = children()
    assert WALKS[name].main(["--run-dir", str(tmp_path / "a run"), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    ends = "loss 0.25", "The policy has learned", "Report: ", "GiB of memory"
    for text in (*STORIES[name], *ends):
        assert text in said
    assert (tmp_path / "a run" / "report.html").exists()
    summary = json.loads((tmp_path / "a run" / "summary.json").read_text())
    score = summary[SCORES.get(name, "gold")]
    assert summary["learned"] and score["after"] == 1.0 and summary["peak_memory_bytes"] > 1e6
    with_reward_model = name in ("run", "run_rs")
    assert summary.get("reward_model_accuracy") == (0.96875 if with_reward_model else None)
    assert children() == before


@pytest.mark.parametrize(
    ("name", "actor", "message"),
    [
        ("run_dpo", "generate.py", "Not learned: the gold score rose by 0.000, clear is 0.300"),
        ("run_arithmetic", "train_gpt_ppo_actor.py", "share of exact responses rose by 0.000"),
    ],
)
def test_walk_that_does_not_learn_exits_with_one(tmp_path, scripts, capsys, name, actor, message):
    fake = FAKE_GENERATOR if actor == "generate.py" else FAKE_ACTOR
    scripts(actor, fake.replace('"superb"', '"dull"'))
    assert WALKS[name].main(["--run-dir", str(tmp_path / "run"), "--steps", "2"]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("run", "serve_ppo_critic.py"),
        ("run_dpo", "generate.py"),
        ("run_teacher", "train_gpt_ppo_actor.py"),
    ],
)
def test_failing_job_shows_its_last_lines(tmp_path, scripts, capsys, name, script):
    before = children()
    if script in SERVERS:  # the actor waits for a server that has died
        for actor in ACTORS:
            scripts(actor, SLEEPER)
    scripts(script, BROKEN)
    assert WALKS[name].main(["--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().out
    assert "the value 7 is too odd" in said and "exit code 1" in said and "failed" in said
    assert children() == before


def test_a_student_of_its_own_responses_has_the_served_teacher(tmp_path, scripts, capsys):
    scripts("../synthetic_data_gen/compute_topk_logits.py", BROKEN)
    arguments = ["--run-dir", str(tmp_path / "run"), "--steps", "2", "--on-policy"]
    assert WALKS["run_distill"].main(arguments) == 0
    said = capsys.readouterr().out
    assert "The policy has learned" in said and "starting the teacher's server on port" in said
    assert (tmp_path / "run" / "teacher_server.log").exists()


@pytest.mark.parametrize("name", ["run_arithmetic", "run_guessing"])
def test_without_a_critic_no_server_starts(tmp_path, scripts, capsys, name):
    scripts("train_gpt_ppo_actor.py", FAKE_ACTOR.replace("assert ports", "assert not ports"))
    arguments = ["--run-dir", str(tmp_path / "run"), "--steps", "2", "--estimator", "rloo"]
    assert WALKS[name].main(arguments) == 0
    assert "The policy has learned" in capsys.readouterr().out
    logs = sorted(path.name for path in (tmp_path / "run").glob("*.log"))
    assert logs == ["ppo_actor.log", "sft.log"]


def test_exact_responses_are_judged_by_the_data_not_by_the_reward(tmp_path):
    """A reward that is wrong shows up: the score asks the file of held-out sums."""
    (tmp_path / "sft_validation.jsonl").write_text('{"input": "12+34=", "output": "46"}\n')
    score = WALKS["run_arithmetic"].exact_responses(tmp_path).of
    for response in ("46", "47", "046", "46 ", "", "4"):
        expected = float(response == "46")
        sample = {"prompt": "12+34=", "response": response, "reward": 1.0 - expected}
        assert score(sample) == expected


# --------------------------------------------------------------------------------------- signals


@some_of(
    ("name", "script", "num_children", "signum"),
    [
        ("run", "train_gpt_sft.py", 2, signal.SIGINT),
        ("run", "train_gpt_sft.py", 2, signal.SIGTERM),
        ("run_rs", "train_gpt_rs_actor.py", 3, signal.SIGINT),  # with the reward server
        ("run_arithmetic", "train_gpt_ppo_actor.py", 3, signal.SIGINT),  # with the critic's server
    ],
)
def test_signal_stops_every_child(tmp_path, scripts, name, script, num_children, signum):
    scripts(script, SLEEPER)
    code = f"import sys; sys.path.insert(0, {str(QUICKSTART)!r}); "
    code += f"import commands, {name}, pathlib; "
    code += f"commands.SCRIPTS = pathlib.Path({str(scripts.folder)!r}); "
    code += f"sys.exit({name}.main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(QUICKSTART.parents[1])}
    command = [sys.executable, "-c", code, "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        deadline = Deadline(60)
        while len(found := psutil.Process(process.pid).children(recursive=True)) < num_children:
            assert not deadline.passed() and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signum)
        said, _ = process.communicate(timeout=patience(30))
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert f"stopped by {signal.Signals(signum).name}" in said
    gone, alive = psutil.wait_procs(found, timeout=patience(5))
    assert not alive


# -------------------------------------------------------------------------- arguments, overrides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--sft-steps", "-3"], "--sft-steps is -3"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
@pytest.mark.parametrize("name", ["run", "run_spin"])
def test_senseless_arguments(name, arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        WALKS[name].main([*arguments, "--run-dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_folder_of_an_old_run_is_refused(tmp_path, capsys):
    (tmp_path / "old").write_text("")
    with pytest.raises(SystemExit):
        WALKS["run"].main(["--run-dir", str(tmp_path)])
    assert f"{tmp_path} is not empty" in capsys.readouterr().err


def started_jobs(walk, arguments: list[str], monkeypatch) -> list[tuple]:
    """(job, name of its configuration) of all scripts that a walk-through starts; none runs."""
    jobs = []

    def follow(walk, _phase, job, servers=(), _detail="", beside=(), **_options):
        (prompt, *_) = read_jsonl(walk.run_dir / "data" / "prompts_validation.jsonl")
        sample = {"prompt": prompt["text"], "response": "", "step": 0, "reward": 0}
        for each in (*servers, job, *beside):
            (each.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            (each.folder / "checkpoints" / f"{each.folder.name}.nemo").touch()
            for name in ("responses", "val_samples"):
                make_data.write_jsonl(each.folder / f"{name}.jsonl", [sample])
            script = Path(each.command[1])
            if script.name != "generate.py":
                folder = "synthetic_data_gen" if "synthetic" in script.parts[-2] else "gpt"
                text = (QUICKSTART.parent / "nlp" / folder / script.name).read_text()
                jobs.append((each, re.search('config_name="(.*?)"', text)[1]))

    monkeypatch.setattr(walkthrough.Walk, "follow", follow)
    monkeypatch.setattr(walkthrough, "conclude", lambda *_outcome: 0)
    assert walk.main(arguments) == 0
    return jobs


@pytest.mark.parametrize("steps", [1, 200])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, ()) for name in WALKS),
        ("run", ("--lora",)),
        ("run_guessing", ("--estimator", "grpo")),
        ("run_distill", ("--on-policy",)),
        *(("run_arithmetic", ("--objective", x)) for x in WALKS["run_arithmetic"].OBJECTIVES),
    ],
)
def test_overrides_are_keys_of_the_configurations_and_have_an_effect(
    tmp_path, scripts, monkeypatch, name, more, steps
):
    from hydra import compose, initialize_config_dir

    from nemo_aligner.config.checks import check_config
    from nemo_aligner.launch.command_line import forced

    arguments = ["--run-dir", str(tmp_path / "it's a run"), *more]
    arguments += ["--steps", str(steps), "--sft-steps", str(steps)]
    jobs = started_jobs(WALKS[name], arguments, monkeypatch)
    with initialize_config_dir(str(QUICKSTART.parents[1] / "conf"), version_base=None):
        for job, config_name in jobs:
            cfg = compose(config_name, overrides=[*map(forced, job.command[2:])])
            # No notes about keys without effect.
            assert check_config(cfg, config_name, visible_devices=0, env={}) == []
            if "exp_manager" in cfg:  # a reward server writes no metrics
                assert cfg.exp_manager.explicit_log_dir == str(job.folder)


def test_a_student_must_go_most_of_the_way_to_its_teacher(tmp_path):
    """Gold scores of -1 before and 0.6 of the teacher: 80 % of 1.6 counts as clear."""
    texts = {"before": ["dull"] * 10, "teacher": ["superb"] * 8 + ["dull"] * 2}
    for phase, responses in texts.items():
        (tmp_path / phase).mkdir()
        lines = "".join(json.dumps({"response": each}) + "\n" for each in responses)
        (tmp_path / phase / "responses.jsonl").write_text(lines)
    ending = WALKS["run_distill"].ending(tmp_path)
    (gold,) = ending.scores
    assert gold.min_rise == pytest.approx(0.8 * 1.6)
    assert (ending.actor, gold.key) == ("distilled", "gold")
