# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO as users start it: the actor script with a reward function in its own job, a web server or
a reward server, and no critic anywhere; at several splits; killed and resumed; with rewards of
steps.
"""

import contextlib
import functools
import inspect
import json
import textwrap

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import (
    assert_ended_well,
    assert_same_metrics,
    kill_and_resume,
    must_end_well,
    must_fail_with,
    read_metrics,
    reward_server,
    samples_of,
    wait_until_serving,
)
from tests.functional.test_ppo_job import run_pair, without_critic
from tests.json_server import JsonServer

pytestmark = pytest.mark.timeout(400)  # four starts of a process, ten seconds each

STEPS, RESPONSES = 6, 4
COMPARED = ["train_rollouts/rewards", "train_rollouts/advantages_std"]
COMPARED += ["train_rollouts/init_policy_kl_per_sample", "train_rollouts/kl_penalty"]
COMPARED += ["train_rollouts/fraction_of_prompts_without_signal", "train_optim/loss"]
COMPARED += ["train_optim/grad_norm", "train_optim/kl_loss", "train_optim/lr"]
COMPARED += ["val_rollouts/rewards"]


TOKEN = "token-of-the-reward-server"
REWARD = """
    def by_answer(prompts, responses, lengths, answer):
        return [score_of(*sample) for sample in zip(responses, lengths, answer)]

    def lengths_of_words(prompts, responses, lengths):
        words = [response.split(" ") for response in responses]
        steps = [each if each[-1].strip() else each[:-1] or each for each in words]
        return [[float(len(word)) for word in each] for each in steps]
"""


def score_of(response, length, answer):
    return len(response) / 8 + length + (10 if answer == "even" else 0)


@pytest.fixture(scope="module")
def answers(inputs):
    """Override for prompts whose records have an answer, and the file of reward functions."""
    records = [json.loads(line) for line in (inputs / "prompts.jsonl").open()]
    with (inputs / "answers.jsonl").open("w") as file:
        for number, record in enumerate(records):
            answer = ["even", "odd"][number % 2]
            file.write(json.dumps({**record, "answer": answer}) + "\n")
    (inputs / "reward.py").write_text(inspect.getsource(score_of) + textwrap.dedent(REWARD))
    names = ("train", "validation", "test")
    return "model.data.data_prefix={" + ", ".join(f"{n}: [{file.name}]" for n in names) + "}"


def reward_fn(inputs, function):
    file = f"{inputs}/reward.py"
    return [f"trainer.ppo.reward_fn={file}:{function}", "trainer.ppo.reward_fn_workers=1"]


def grpo(inputs, folder, *extra, ranks=1):
    settings = [f"trainer.ppo.max_steps={STEPS}", "trainer.ppo.val_check_interval=1"]
    settings += ["trainer.ppo.adaptive_kl={enable: True, target: 0.01, horizon: 100}"]
    settings += ["trainer.ppo.kl_estimator=k3", "model.ppo.kl_loss_coef=0.1", *extra]
    return without_critic(inputs, folder, *settings, ranks=ranks)


def assert_right_rewards(folder):
    """Those of the validation samples are what the function gives to their records."""
    samples = samples_of(folder / "actor")
    assert samples
    for sample in samples:
        answer = ["even", "odd"][int(sample["prompt"].split()[-1]) % 2]
        lengths = {sample["reward"] - score_of(sample["response"], 0, answer)}
        assert lengths <= set(map(float, range(13))), sample


@pytest.mark.full
def test_a_function_and_a_web_server_give_the_same_run_at_another_split(tmp_path, inputs, answers):
    """The records' answers reach both. No secret is in the logs and the folder of the run."""
    function, served = tmp_path / "function", tmp_path / "served"
    few = [answers, "trainer.ppo.max_steps=3", "trainer.ppo.val_check_interval=3"]
    must_end_well(grpo(inputs, function, *few, *reward_fn(inputs, "by_answer")))
    assert_right_rewards(function)

    def reply(_path, fields):
        names = ("responses", "lengths", "answer")
        return {"rewards": [score_of(*s) for s in zip(*(fields[name] for name in names))]}

    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with JsonServer(reply) as server:
        addresses = [f'"{server.url}/{name}?key=hidden-key"' for name in "ab"]
        options = [f"reward_fn=[{','.join(addresses)}]", f"reward_token_file={tmp_path}/token"]
        given = [f"trainer.ppo.{option}" for option in options]
        must_end_well(grpo(inputs, served, *few, *given, ranks=2))
        assert {each["Authorization"] for each in server.headers} == {f"Bearer {TOKEN}"}
        asked = sum(len(each["prompts"]) for each in server.requests)
    assert asked == 3 * 4 * RESPONSES + 4  # once per sample, on one rank
    assert_same_metrics(served / "actor", function / "actor", COMPARED, rel=1e-4, abs=1e-5)
    assert samples_of(served / "actor") == samples_of(function / "actor")
    files = [path for path in served.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names > {"cmd-args.log", "run.json", "config.yaml", "report.html"}
    for path in files:
        content = path.read_bytes()
        assert TOKEN.encode() not in content and b"hidden-key" not in content, path


@pytest.mark.full
def test_a_judge_is_asked_once_at_any_split(tmp_path, inputs, answers):
    """The second job has its folder of answers, and no server."""

    def reply(_path, fields):
        answer, _, response = fields["messages"][0]["content"].partition(" ")
        score = json.dumps({"score": score_of(response, 0, answer)})
        return {"choices": [{"message": {"content": f"Well, {score}"}}]}

    (tmp_path / "rubric.txt").write_text("{answer} {response}")
    with JsonServer(reply) as server:
        judge = f"url: {server.url}, model: m, prompt: {tmp_path}/rubric.txt, score: score"
        judge += f", least: 0, most: 99, cache: {tmp_path}/kept, budget_requests: 999"
        few = [answers, "trainer.ppo.max_steps=2", f"trainer.ppo.judge={{{judge}}}"]
        must_end_well(grpo(inputs, tmp_path / "one", *few))
        asked = [json.dumps(each) for each in server.requests]
    assert len(asked) == len(set(asked)) == len([*tmp_path.glob("kept/*/*.json")]) > 0
    few.append("remote_critic_rm.init_timeout_s=1")
    must_end_well(grpo(inputs, tmp_path / "two", *few, ranks=2))
    assert_right_rewards(tmp_path / "one")
    two, one = (tmp_path / name / "actor" for name in ("two", "one"))
    assert samples_of(two) == samples_of(one)
    assert_same_metrics(two, one, COMPARED, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_grpo_with_a_function_resumes_after_a_kill_as_if_nothing_had_been(
    tmp_path, inputs, answers
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    extra = [answers, *reward_fn(inputs, "by_answer")]
    must_end_well(grpo(inputs, whole, *extra))
    kill_and_resume(functools.partial(grpo, inputs, parts, *extra), parts, step=2)
    assert_same_metrics(parts / "actor", whole / "actor", COMPARED)
    names = ("rollout_size", "consumed_samples", "init_policy_kl_per_sample", "kl_penalty")
    names = [f"train_rollouts/{name}" for name in names]
    sizes, consumed, kl, penalties = (read_metrics(whole / "actor", name) for name in names)
    assert sizes == [4 * RESPONSES] * STEPS and consumed == [*range(4, 4 * STEPS + 1, 4)]
    # Global batches of 4 samples.
    assert len(read_metrics(whole / "actor", "train_optim/loss")) == STEPS * RESPONSES
    assert kl[0] == 0.0 and kl[1] > 0.0 and len(set(penalties)) > 1
    metrics = (whole / "actor" / "metrics.jsonl").read_text()
    assert "critic_loss" not in metrics and "values_mean" not in metrics
    assert_right_rewards(whole)


STEPWISE = ["rewards_per=step", "step_end=' '"]
ESTIMATORS = {
    "grpo of each step": ["trainer.ppo.process_rewards=steps"],
    "rloo": ["trainer.ppo.advantage_estimator=rloo"],
}


@pytest.mark.full
@pytest.mark.parametrize("source", ["function", "model"])
def test_each_step_of_a_response_has_a_reward(source, tmp_path, inputs, answers):
    """The words of a response are its steps. Their rewards add up to those of the responses, and
    what the policy learns from them depends on the estimator.
    """
    port, runs = find_free_port(), {}
    with contextlib.ExitStack() as stack:
        given = [*reward_fn(inputs, "lengths_of_words"), *(f"trainer.ppo.{x}" for x in STEPWISE)]
        if source == "model":
            own = "ip=127.0.0.1", f"port={port}"
            given = [f"remote_critic_rm.reward_model.{x}" for x in own]
            (tmp_path / "server").mkdir()
            steps = [f"inference.{x}" for x in STEPWISE]
            reward = stack.enter_context(
                reward_server(inputs / "rm.nemo", tmp_path / "server", port, *steps)
            )
            wait_until_serving(reward)
        for name, options in ESTIMATORS.items():
            runs[name] = tmp_path / name.replace(" ", "_")
            options = [*options, "trainer.ppo.max_steps=2", "model.ppo.train_on_truncated=True"]
            must_end_well(grpo(inputs, runs[name], *given, *options))
        if source == "model":
            assert_ended_well(reward, reward.stop())
    first = []
    names = [f"train_rollouts/{name}" for name in ("rewards_per_response", "init_policy_kl")]
    names += ["train_optim/grad_norm", "train_rollouts/rewards"]
    for folder in runs.values():
        counts, kl, norms, rewards = (read_metrics(folder / "actor", name) for name in names)
        assert len(counts) == 2 and all(count > 0 for count in counts) and kl[0] == 0
        assert len(norms) == 2 * RESPONSES and any(norms)
        first.append((rewards[0], norms[0]))
    (grpo_reward, grpo_norm), (rloo_reward, rloo_norm) = first
    assert grpo_reward == rloo_reward and grpo_norm != rloo_norm
    if source == "function":
        for sample in samples_of(runs["rloo"] / "actor"):
            letters = len(sample["response"].replace(" ", ""))
            assert sample["reward"] == pytest.approx(letters), sample


@pytest.mark.full
def test_a_function_rewards_beside_a_critic(tmp_path, inputs, answers):
    """Of two tensor-parallel ranks as of one. (The golden numbers have it in the jobs of rejection
    sampling and REINFORCE.)
    """
    own = [answers, *reward_fn(inputs, "by_answer"), "model.optim.sched.name=constant"]
    apart, split = ["trainer.ppo.combine_rm_and_critic_server=False"], []
    for name in ("one", "two"):
        ranks = 1 + len(split)
        run_pair(inputs, tmp_path / name, [*apart, *split], [*own, *split], ranks=ranks)
        assert_right_rewards(tmp_path / name)
        split = ["++model.tensor_model_parallel_size=2"]
    names = "train_optim/loss", "train_optim/grad_norm"
    one, two = (tmp_path / name / "actor" for name in ("one", "two"))
    assert_same_metrics(two, one, names, rel=1e-4, abs=1e-6)


OWN = """
import torch

EPS = 0.2

def clipped(logprobs, prev_logprobs, advantages, mask):
    assert mask.shape == logprobs.shape and set(mask.unique().tolist()) <= {0.0, 1.0}
    ratio = (logprobs - prev_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - EPS, 1 + EPS))

def compared(rewards, mask, prompts, values):
    assert values is None
    scores = (rewards * mask).sum(1)
    result = torch.zeros_like(rewards)
    for prompt in prompts.unique():
        rows = prompts == prompt
        deviation = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
        result[rows] = deviation[:, None] * mask[rows]
    return result

def halved(logprobs, prev_logprobs, advantages, mask):
    return clipped(logprobs, prev_logprobs, advantages, mask) / 2
"""


@pytest.mark.full
def test_own_loss_and_advantages(tmp_path, inputs, answers):
    """The formulas of GRPO written by a user give its numbers, on one rank and on two."""
    (tmp_path / "own.py").write_text(OWN)
    few = [answers, "trainer.ppo.max_steps=2", *reward_fn(inputs, "by_answer")]
    own = {key: f"trainer.ppo.{key}={tmp_path}/own.py:" for key in ("loss", "advantages")}
    both = [own["loss"] + "clipped", own["advantages"] + "compared"]
    runs = {"theirs": [], "own": both, "halved": [own["loss"] + "halved"]}
    for name, given in runs.items():
        must_end_well(grpo(inputs, tmp_path / name, *few, *given, ranks=1 + (name == "own")))
    for key in ("train_optim/loss", "train_optim/grad_norm", "train_rollouts/advantages_std"):
        numbers = [read_metrics(tmp_path / name / "actor", key) for name in runs]
        theirs, own_numbers, halved = numbers
        assert theirs and own_numbers == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        if key == "train_optim/grad_norm":
            assert halved != pytest.approx(theirs, rel=1e-2)


def test_records_without_the_column_are_one_line(inputs, answers, tmp_path):
    job = grpo(inputs, tmp_path, *reward_fn(inputs, "by_answer"), ranks=2)
    must_fail_with(job, "prompts.jsonl, line 1 ", "no column 'answer'", "['text']")
