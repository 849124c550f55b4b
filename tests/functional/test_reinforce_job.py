# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE from end to end: the real actor script against a real reward-model server, in their
own processes; at several splits; resumed.
"""

import pytest

from tests.functional.jobs import (
    ScriptJob,
    assert_ended_well,
    read_metrics,
    rollout_options,
)
from tests.functional.test_ppo_job import inputs  # noqa: F401  (a fixture)
from tests.functional.test_rs_job import server_port, validation_samples  # noqa: F401  (a fixture)

pytestmark = pytest.mark.timeout(600)  # several processes; their own limits are shorter

COMPARED = [
    "train_rollouts/rewards",
    "train_rollouts/rewards_with_kl",
    "train_rollouts/init_policy_kl",
    "train_rollouts/fraction_of_prompts_without_signal",
    "train_rollouts/response_lengths",
    "train_optim/loss",
    "train_optim/grad_norm",
    "val_rollouts/rewards",
]


def actor(inputs, folder, port, steps, ranks=1, launcher="python", *extra):  # noqa: F811
    folder.mkdir(exist_ok=True)
    return ScriptJob(
        "train_gpt_reinforce_actor.py",
        folder / "actor.log",
        [
            *rollout_options(inputs, folder, "reinforce", port),
            f"trainer.reinforce.max_steps={steps}",
            "trainer.reinforce.val_check_interval=2",
            "trainer.reinforce.num_rollouts_per_prompt=3",
            "trainer.reinforce.initial_policy_kl_penalty=0.1",
            "model.global_batch_size=12",
            "model.optim.sched.name=constant",
            *extra,
        ],
        ranks,
        launcher,
    )


@pytest.fixture(scope="module")
def whole(inputs, server_port):  # noqa: F811
    """Folder of four steps with one rank."""
    folder = inputs / "reinforce-whole"
    with actor(inputs, folder, server_port, 4) as job:
        assert_ended_well(job, job.wait())
    return folder


@pytest.mark.full
def test_a_run_starts_at_kl_zero_learns_and_saves(whole):
    metrics = whole / "actor"
    kl = read_metrics(metrics, "train_rollouts/init_policy_kl")
    assert len(kl) == 4 and kl[0] == 0 and all(kl[1:])
    assert read_metrics(metrics, "train_rollouts/policy_reference_difference") == [0]
    assert read_metrics(metrics, "train_rollouts/rollout_size") == [12] * 4
    assert read_metrics(metrics, "train_rollouts/consumed_samples") == [4, 8, 12, 16]
    assert all(norm > 0 for norm in read_metrics(metrics, "train_optim/grad_norm"))
    names = sorted(path.name for path in (metrics / "checkpoints").iterdir())
    first = "megatron_gpt-step=4-consumed_samples=16-reinforce_optimization_step=4-epoch=0-val_rew"
    assert any(name.startswith(first) for name in names), names
    assert "megatron_gpt_reinforce_actor.nemo" in names


@pytest.mark.full
def test_the_same_command_resumes(inputs, server_port, whole, tmp_path):  # noqa: F811
    """Two steps, then the same command with four: as four uninterrupted ones, to the bit."""
    for steps in (2, 4):
        with actor(inputs, tmp_path, server_port, steps) as job:
            assert_ended_well(job, job.wait())
    for key in COMPARED:
        expected = read_metrics(whole / "actor", key)
        assert len(expected) >= 2 and read_metrics(tmp_path / "actor", key) == expected, key
    assert validation_samples(tmp_path)[-4:] == validation_samples(whole)[-4:]


@pytest.mark.full
def test_adapters_have_their_base_as_the_reference(inputs, server_port, tmp_path):  # noqa: F811
    """And resume to the bit."""
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
    for folder, ends in ((tmp_path / "whole", [4]), (tmp_path / "parts", [2, 4])):
        for steps in ends:
            with actor(inputs, folder, server_port, steps, 1, "python", *lora) as job:
                assert_ended_well(job, job.wait())
    whole, parts = tmp_path / "whole/actor", tmp_path / "parts/actor"
    kl = read_metrics(whole, "train_rollouts/init_policy_kl")
    assert kl[0] == 0 and all(kl[1:])
    for key in COMPARED:
        assert read_metrics(parts, key) == read_metrics(whole, key), key
