# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO as users start it: the actor script and a reward server, and no critic anywhere; killed and
resumed; and with rewards of steps.
"""

import importlib.util
import json
import signal
import textwrap

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import (
    assert_ended_well,
    read_metrics,
    reward_server,
    wait_until_serving,
)
from tests.functional.test_code_reward import code_reward_server
from tests.functional.test_ppo_job import actor, inputs  # noqa: F401  (a fixture)
from tests.patience import wait_until

# Four starts of a process, ten seconds each.
pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

STEPS, RESPONSES = 6, 4
COMPARED = [
    "train_rollouts/rewards",
    "train_rollouts/advantages_std",
    "train_rollouts/init_policy_kl_per_sample",
    "train_rollouts/kl_penalty",
    "train_rollouts/fraction_of_prompts_without_signal",
    "train_optim/loss",
    "train_optim/grad_norm",
    "train_optim/kl_loss",
    "train_optim/lr",
    "val_rollouts/rewards",
]


def grpo(inputs, folder, reward_port, *extra):  # noqa: F811
    """At the critic's port nobody listens."""
    folder.mkdir(exist_ok=True)
    return actor(
        inputs,
        folder,
        find_free_port(),
        1,
        "python",
        "trainer.ppo.advantage_estimator=grpo",
        f"trainer.ppo.max_steps={STEPS}",
        "trainer.ppo.val_check_interval=1",
        "trainer.ppo.adaptive_kl={enable: True, target: 0.01, horizon: 100}",
        "trainer.ppo.kl_estimator=k3",
        "remote_critic_rm.combine_rm_and_critic_server=False",
        "remote_critic_rm.reward_model.ip=127.0.0.1",
        f"remote_critic_rm.reward_model.port={reward_port}",
        "model.ppo.num_rollout_samples=4",
        f"model.ppo.num_rollouts_per_prompt={RESPONSES}",
        "model.ppo.kl_loss_coef=0.1",
        *extra,
    )


def kill_after_checkpoint(job, folder, step: int) -> None:
    """SIGKILL as soon as the checkpoint of `step` is seen to be complete: in the middle of a later
    step.
    """
    checkpoints = folder / "actor" / "checkpoints"

    def is_complete() -> bool:
        assert job.process.poll() is None, job.log[-3000:]
        return any(checkpoints.glob(f"megatron_gpt-step={step}-*"))

    wait_until(is_complete, 150, lambda: f"step {step} of\n{job.log[-3000:]}")
    job.process.send_signal(signal.SIGKILL)
    assert job.wait(10) == -signal.SIGKILL


def test_grpo_against_a_code_reward_resumes_after_a_kill_as_if_nothing_had_been(tmp_path, inputs):  # noqa: F811
    port, whole, parts = find_free_port(), tmp_path / "whole", tmp_path / "parts"
    with code_reward_server(
        tmp_path / "s", port, None, "reward.py:texts_only", inputs / "policy.nemo"
    ) as reward:
        wait_until_serving(reward)
        with grpo(inputs, whole, port) as job:
            assert_ended_well(job, job.wait(240))
        with grpo(inputs, parts, port) as job:
            kill_after_checkpoint(job, parts, step=2)
        with grpo(inputs, parts, port) as job:
            assert_ended_well(job, job.wait(240))
            assert "resumed from" in job.log
        assert_ended_well(reward, reward.stop())
    for key in COMPARED:
        expected = read_metrics(whole / "actor", key)
        assert len(expected) >= STEPS and read_metrics(parts / "actor", key) == expected, (
            key
        )  # to the bit

    assert read_metrics(whole / "actor", "train_rollouts/rollout_size") == [4 * RESPONSES] * STEPS
    assert read_metrics(whole / "actor", "train_rollouts/consumed_samples") == [
        4 * step for step in range(1, STEPS + 1)
    ]
    assert (
        len(read_metrics(whole / "actor", "train_optim/loss")) == STEPS * RESPONSES
    )  # global batches of 4 samples
    kl = read_metrics(whole / "actor", "train_rollouts/init_policy_kl_per_sample")
    assert kl[0] == 0.0 and kl[1] > 0.0
    assert len(set(read_metrics(whole / "actor", "train_rollouts/kl_penalty"))) > 1
    metrics = (whole / "actor" / "metrics.jsonl").read_text()
    assert "critic_loss" not in metrics and "values_mean" not in metrics

    spec = importlib.util.spec_from_file_location(
        "reward_of_the_test", tmp_path / "s" / "reward.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    samples = [
        json.loads(line)
        for line in (whole / "actor" / "val_samples.jsonl").read_text().splitlines()
    ]
    assert [sample["reward"] for sample in samples] == [
        module.score_of(sample["prompt"], sample["response"]) for sample in samples
    ]


WORDS = """
    def lengths_of_words(prompts, responses, lengths):
        ends = [response.count(" ") for response in responses]
        words = [response.split(" ") for response in responses]
        blank = [not each[-1].strip() for each in words]
        return [
            [float(len(word)) for word in each][: max(count + (not b), 1)]
            for each, count, b in zip(words, ends, blank)
        ]
"""
STEPWISE = ["inference.rewards_per=step", "inference.step_end=' '"]
ESTIMATORS = {
    "grpo of each step": ["trainer.ppo.process_rewards=steps"],
    "rloo": ["trainer.ppo.advantage_estimator=rloo"],
}


@pytest.mark.parametrize("source", ["function", "model"])
def test_each_step_of_a_response_has_a_reward(source, tmp_path, inputs):  # noqa: F811
    """The words of a response are its steps. Their rewards add up to those of the responses, and
    what the policy learns from them depends on the estimator.
    """
    port, server = find_free_port(), tmp_path / "server"
    server.mkdir()
    (server / "words.py").write_text(textwrap.dedent(WORDS))
    file = inputs / "policy.nemo"
    extra = ["inference.reward_fn=words.py:lengths_of_words"]
    if source == "model":
        file, extra = inputs / "rm.nemo", []
    runs = {}
    with reward_server(file, server, port, 1, "python", *extra, *STEPWISE) as reward:
        wait_until_serving(reward)
        for name, options in ESTIMATORS.items():
            runs[name] = tmp_path / name.replace(" ", "_")
            options = [*options, "trainer.ppo.max_steps=2", "model.ppo.train_on_truncated=True"]
            with grpo(inputs, runs[name], port, *options) as job:
                assert_ended_well(job, job.wait(240))
        assert_ended_well(reward, reward.stop())
    first = {}
    for name, folder in runs.items():
        counts = read_metrics(folder / "actor", "train_rollouts/rewards_per_response")
        assert len(counts) == 2 and all(count > 0 for count in counts)
        assert read_metrics(folder / "actor", "train_rollouts/init_policy_kl")[0] == 0
        norms = read_metrics(folder / "actor", "train_optim/grad_norm")
        assert len(norms) == 2 * RESPONSES and any(norms)
        rewards = read_metrics(folder / "actor", "train_rollouts/rewards")[0]
        first[name] = rewards, norms[0]
    (grpo_reward, grpo_norm), (rloo_reward, rloo_norm) = first.values()
    assert grpo_reward == rloo_reward and grpo_norm != rloo_norm
    if source == "function":
        samples = [
            json.loads(line) for line in (runs["rloo"] / "actor" / "val_samples.jsonl").open()
        ]
        for sample in samples:
            letters = len(sample["response"].replace(" ", ""))
            assert sample["reward"] == pytest.approx(letters), sample
