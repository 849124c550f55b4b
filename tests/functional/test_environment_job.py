# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of several turns from end to end: the real actor scripts with a user's environment; at
several splits; resumed; with and without a critic.
"""

import textwrap

import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.functional import test_rs_job
from tests.functional.jobs import (
    assert_same_metrics,
    must_end_well,
    read_metrics,
    texts_of,
)
from tests.functional.test_ppo_job import run_pair, without_critic

pytestmark = pytest.mark.timeout(600)  # several processes; their own limits are shorter

TURNS = 3
ENVIRONMENT = """
    import random

    class Talk:
        def reset(self, prompt):
            return [prompt]

        def step(self, state, response):
            state.append(response)
            if random.random() < FAILS:
                raise OSError("the tool is broken")
            hint = " ".join(random.choice("abcdefg") for _ in range(1 + len(response) % 4))
            return f" {hint} {len(state)}", len(response) / 10 + random.random(), len(hint) == 5
"""
COMPARED = ["train_rollouts/rewards", "train_rollouts/turns", "train_rollouts/generation_length"]
COMPARED += ["train_rollouts/response_lengths", "train_rollouts/advantages_std"]
COMPARED += ["train_rollouts/init_policy_kl", "train_optim/loss", "train_optim/grad_norm"]
COMPARED += ["val_rollouts/rewards", "val_rollouts/turns"]


def settings(folder, kind, fails="-1"):
    """Overrides of `model.<kind>.environment`.

    Args:
        fails: share of the responses to which it fails to reply; below 0 none.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "talk.py"
    path.write_text(textwrap.dedent(ENVIRONMENT).replace("FAILS", fails))
    given = {"path": f"{path}:Talk", "max_turns": TURNS, "workers": 1}
    own = [f"model.{kind}.environment.{key}={value}" for key, value in given.items()]
    return [*own, f"model.{kind}.length_params.max_length=10"]


def grpo(inputs, folder, steps, ranks=1, *extra, fails="-1"):
    wanted = [*settings(folder, "ppo", fails), f"trainer.ppo.max_steps={steps}"]
    wanted += ["trainer.ppo.val_check_interval=2", "trainer.ppo.process_rewards=steps"]
    wanted += ["model.ppo.train_on_truncated=True"]
    wanted += ["remote_critic_rm.combine_rm_and_critic_server=False"]
    wanted += ["model.optim.sched.name=constant", *extra]
    return without_critic(inputs, folder, *wanted, ranks=ranks)


def assert_same_run(folder, expected):
    assert_same_metrics(folder / "actor", expected / "actor", COMPARED, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def whole(inputs):
    """Folder of four steps of GRPO with one rank."""
    folder = inputs / "environment-whole"
    must_end_well(grpo(inputs, folder, 4))
    return folder


def test_a_run_without_any_server_learns_from_its_environment(whole):
    metrics = whole / "actor"
    turns = read_metrics(metrics, "train_rollouts/turns")
    assert len(turns) == 4 and all(1 < mean < TURNS for mean in turns)
    names = "response_lengths", "prompt_lengths", "generation_length"
    names = [f"train_rollouts/{name}" for name in names]
    lengths, prompts, generated = (read_metrics(metrics, name) for name in names)
    # Observations are neither prompt nor generated.
    assert all(r > p + g for r, p, g in zip(lengths, prompts, generated, strict=True))
    kl = read_metrics(metrics, "train_rollouts/init_policy_kl")
    assert kl[0] == 0 and all(kl[1:])
    assert read_metrics(metrics, "train_rollouts/policy_reference_difference") == [0]
    assert max(read_metrics(metrics, "train_rollouts/sampling_ratio_mean_error")) < 1e-5
    assert all(norm > 0 for norm in read_metrics(metrics, "train_optim/grad_norm"))
    assert "waiting for server" not in (whole / "actor.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "ranks, extra",
    [
        (2, ["++model.tensor_model_parallel_size=2"]),
        (2, ["++model.pipeline_model_parallel_size=2", "model.ppo.generation.reshard=auto"]),
        (1, ["model.ppo.rollout_logprobs=sampler"]),
    ],
    ids=["tp2", "pp2-resharded", "sampler"],
)
def test_any_split_gives_the_same_numbers(inputs, whole, tmp_path, ranks, extra):
    must_end_well(grpo(inputs, tmp_path, 4, ranks, *extra))
    assert_same_run(tmp_path, whole)
    assert texts_of(tmp_path / "actor") == texts_of(whole / "actor")


@pytest.mark.full
def test_a_critic_gives_values_and_the_environment_rewards(inputs, tmp_path):
    apart = ["trainer.ppo.combine_rm_and_critic_server=False"]
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        own = [*settings(folder, "ppo"), "remote_critic_rm.combine_rm_and_critic_server=False"]
        run_pair(inputs, folder, apart, own, ranks=ranks)
        assert len(read_metrics(folder / "actor", "train_optim/critic_loss")) == 3
    assert_same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rs", "reinforce"])
def test_other_actors_take_the_same_environment(inputs, tmp_path, kind):
    steps = [f"trainer.{kind}.max_steps=2"] if kind == "reinforce" else []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        extra = [*steps, *settings(folder, kind), "model.optim.sched.name=constant"]
        port = find_free_port()
        must_end_well(test_rs_job.actor(inputs, folder, port, *extra, kind=kind, ranks=ranks))
    one, two = (tmp_path / name / "actor" for name in "12")
    names = ("train_rollouts/turns", "train_optim/loss", "train_optim/grad_norm")
    assert_same_metrics(two, one, names, rel=1e-4)
    assert texts_of(one) == texts_of(two)


@pytest.mark.full
def test_an_environment_that_fails_ends_the_job_with_one_line(inputs, tmp_path):
    """Of two ranks, of which one may wait for the other."""
    with grpo(inputs, tmp_path, 2, 2, fails="0.5") as job:
        assert job.wait(120) == ExitCode.USER_ERROR, job.log[-4000:]
        assert not job.leftovers()
    assert job.log.count("ERROR: ") == 1
    message = job.log.split("ERROR: ")[-1]
    said = "talk.py:Talk failed on response", "OSError: the tool is broken"
    for words in (*said, "model.ppo.environment.fallback"):
        assert words in message and "Traceback" not in message
    assert 'raise OSError("the tool is broken")' in job.log  # in the user's traceback


@pytest.mark.full
def test_a_fallback_keeps_the_job_going(inputs, tmp_path):
    extra = "model.ppo.environment.fallback=-1"
    with grpo(inputs, tmp_path, 2, 2, extra, fails="0.5") as job:
        must_end_well(job)
    assert "ends with model.ppo.environment.fallback" in job.log
