# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of several turns from end to end: the real actor scripts with a user's environment; at
several splits; resumed; with and without a critic.
"""

import json
import textwrap

import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.functional import test_reinforce_job, test_rs_job
from tests.functional.jobs import assert_ended_well, must_fail_with, read_metrics
from tests.functional.test_ppo_job import actor, critic, inputs  # noqa: F401  (a fixture)

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
COMPARED = [
    "train_rollouts/rewards",
    "train_rollouts/turns",
    "train_rollouts/generation_length",
    "train_rollouts/response_lengths",
    "train_rollouts/advantages_std",
    "train_rollouts/init_policy_kl",
    "train_optim/loss",
    "train_optim/grad_norm",
    "val_rollouts/rewards",
    "val_rollouts/turns",
]


def settings(folder, kind, fails="-1"):
    """Overrides of `model.<kind>.environment`.

    Args:
        fails: share of the responses to which it fails to reply; below 0 none.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "talk.py"
    path.write_text(textwrap.dedent(ENVIRONMENT).replace("FAILS", fails))
    given = {"path": f"{path}:Talk", "max_turns": TURNS, "workers": 1}
    return [
        *(f"model.{kind}.environment.{key}={value}" for key, value in given.items()),
        f"model.{kind}.length_params.max_length=10",
    ]


def grpo(inputs, folder, steps, ranks=1, launcher="python", *extra, fails="-1"):  # noqa: F811
    """At the critic's and the reward model's port nobody listens."""
    return actor(
        inputs,
        folder,
        find_free_port(),
        ranks,
        launcher,
        *settings(folder, "ppo", fails),
        "trainer.ppo.advantage_estimator=grpo",
        f"trainer.ppo.max_steps={steps}",
        "trainer.ppo.val_check_interval=2",
        "trainer.ppo.process_rewards=steps",
        "model.ppo.train_on_truncated=True",
        "remote_critic_rm.combine_rm_and_critic_server=False",
        "model.optim.sched.name=constant",
        "model.ppo.num_rollout_samples=4",
        "model.ppo.num_rollouts_per_prompt=4",
        "model.ppo.rollout_micro_batch_size=2",
        *extra,
    )


def validation_samples(folder):
    lines = (folder / "actor/val_samples.jsonl").open()
    return [(row["prompt"], row["response"], row["is_end"]) for row in map(json.loads, lines)]


def assert_same_run(folder, expected_folder, exact=False):
    for key in COMPARED:
        expected = read_metrics(expected_folder / "actor", key)
        values = read_metrics(folder / "actor", key)
        assert expected, key
        assert values == (expected if exact else pytest.approx(expected, rel=1e-4, abs=1e-5)), key


@pytest.fixture(scope="module")
def whole(inputs):  # noqa: F811
    """Folder of four steps of GRPO with one rank."""
    folder = inputs / "environment-whole"
    with grpo(inputs, folder, 4) as job:
        assert_ended_well(job, job.wait())
    return folder


def test_a_run_without_any_server_learns_from_its_environment(whole):
    metrics = whole / "actor"
    turns = read_metrics(metrics, "train_rollouts/turns")
    assert len(turns) == 4 and all(1 < mean < TURNS for mean in turns)
    lengths, prompts, generated = (
        read_metrics(metrics, f"train_rollouts/{name}")
        for name in ("response_lengths", "prompt_lengths", "generation_length")
    )
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
    "ranks, launcher, extra",
    [
        (2, "torchrun", []),  # DP2
        (2, "python", ["++model.tensor_model_parallel_size=2"]),
        (
            2,
            "python",
            ["++model.pipeline_model_parallel_size=2", "model.ppo.generation.reshard=auto"],
        ),
        (1, "python", ["model.ppo.rollout_micro_batch_size=1"]),
        (1, "python", ["model.ppo.rollout_logprobs=sampler"]),
    ],
    ids=["dp2", "tp2", "pp2-resharded", "one-slot", "sampler"],
)
def test_any_split_gives_the_same_numbers(
    inputs,  # noqa: F811
    whole,
    tmp_path,
    ranks,
    launcher,
    extra,
):
    with grpo(inputs, tmp_path, 4, ranks, launcher, *extra) as job:
        assert_ended_well(job, job.wait(240))
    assert_same_run(tmp_path, whole)
    assert validation_samples(tmp_path) == validation_samples(whole)


@pytest.mark.full
def test_the_same_command_resumes(inputs, whole, tmp_path):  # noqa: F811
    """Two steps, then the same command with four: as four uninterrupted ones, to the bit."""
    for steps in (2, 4):
        with grpo(inputs, tmp_path, steps) as job:
            assert_ended_well(job, job.wait())
    assert_same_run(tmp_path, whole, exact=True)


@pytest.mark.full
def test_a_critic_gives_values_and_the_environment_rewards(inputs, tmp_path):  # noqa: F811
    runs = []
    for ranks in (1, 2):
        folder, port = tmp_path / str(ranks), find_free_port()
        folder.mkdir()
        apart = "trainer.ppo.combine_rm_and_critic_server=False"
        extra = [
            *settings(folder, "ppo"),
            "remote_critic_rm.combine_rm_and_critic_server=False",
        ]
        with (
            critic(inputs, folder, port, 1, "python", apart) as server,
            actor(inputs, folder, port, ranks, "python", *extra) as job,
        ):
            assert_ended_well(job, job.wait(240))
            assert_ended_well(server, server.stop())
        runs.append(folder)
        assert len(read_metrics(folder / "actor", "train_optim/critic_loss")) == 3
    assert_same_run(*runs)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rs", "reinforce"])
def test_other_actors_take_the_same_environment(inputs, tmp_path, kind):  # noqa: F811
    module = {"rs": test_rs_job, "reinforce": test_reinforce_job}[kind]
    steps = [2] if kind == "reinforce" else []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        extra = [*settings(folder, kind), "model.optim.sched.name=constant"]
        job = module.actor(inputs, folder, find_free_port(), *steps, ranks, "python", *extra)
        with job:
            assert_ended_well(job, job.wait(240))
    one, two = tmp_path / "1", tmp_path / "2"
    for key in ("train_rollouts/turns", "train_optim/loss", "train_optim/grad_norm"):
        expected = read_metrics(one / "actor", key)
        assert expected and read_metrics(two / "actor", key) == pytest.approx(expected, rel=1e-4)
    assert validation_samples(one) == validation_samples(two)


@pytest.mark.full
def test_an_environment_that_fails_ends_the_job_with_one_line(inputs, tmp_path):  # noqa: F811
    """Of two ranks, of which one may wait for the other."""
    with grpo(inputs, tmp_path, 2, 2, fails="0.5") as job:
        assert job.wait(120) == ExitCode.USER_ERROR, job.log[-4000:]
        assert not job.leftovers()
    assert job.log.count("ERROR: ") == 1
    message = job.log.split("ERROR: ")[-1]
    for words in (
        "talk.py:Talk failed on response",
        "OSError: the tool is broken",
        "model.ppo.environment.fallback",
    ):
        assert words in message and "Traceback" not in message
    assert 'raise OSError("the tool is broken")' in job.log  # in the user's traceback


@pytest.mark.full
def test_a_fallback_keeps_the_job_going(inputs, tmp_path):  # noqa: F811
    extra = "model.ppo.environment.fallback=-1"
    with grpo(inputs, tmp_path, 2, 2, "python", extra, fails="0.5") as job:
        assert_ended_well(job, job.wait())
    assert "ends with model.ppo.environment.fallback" in job.log


@pytest.mark.parametrize(
    "override, words",
    [
        (
            "model.ppo.environment.path=nothing.py:Talk",
            ["model.ppo.environment.path=nothing.py:Talk", "does not exist"],
        ),
        (
            "remote_critic_rm.combine_rm_and_critic_server=True",
            ["gives the rewards", "set that to False"],
        ),
        (
            "remote_critic_rm.reward_models={a: {ip: localhost, port: 1}}",
            ["remote_critic_rm.reward_models would not be asked"],
        ),
        (
            "trainer.ppo.overlong_buffer_len=2",
            ["trainer.ppo.overlong_buffer_len=2", "set it to 0"],
        ),
        ("model.ppo.environment.max_turns=0", ["model.ppo.environment.max_turns=0"]),
    ],
)
def test_values_that_cannot_work_are_one_line(inputs, tmp_path, override, words):  # noqa: F811
    extra = ["trainer.ppo.advantage_estimator=gae", override] if "True" in override else [override]
    extra = ["trainer.ppo.process_rewards=sum", *extra] if len(extra) > 1 else extra
    must_fail_with(grpo(inputs, tmp_path, 1, 1, "python", *extra), *words)
