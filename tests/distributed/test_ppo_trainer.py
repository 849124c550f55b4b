# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The PPO trainer on two data-parallel ranks does what it does on one: same global batches,
metrics and weights.
"""

import numpy as np
import pytest
import torch

from tests.distributed.launcher import run_ranks

SETTINGS = dict(
    ppo_epochs=2, critic_warmup_steps=1, val_check_interval=1, save_interval=1, whiten_rewards=True
)
# A prompt's responses are dealt to both ranks; the ranks find out together that the policy has
# gone too far.
WITHOUT_CRITIC = dict(ppo_epochs=2, val_check_interval=1, num_rollouts_per_prompt=2)
GRPO = WITHOUT_CRITIC | dict(advantage_estimator="grpo", target_kl=1e-5)
PLUS_PLUS = WITHOUT_CRITIC | dict(
    advantage_estimator="reinforce_plus_plus",
    normalize_rewards=True,
    reward_clip=1.2,
    overlong_buffer_len=3,
    advantage_clip=1.5,
    kl_estimator="k3",
    adaptive_kl={"enable": True, "target": 1e-9, "horizon": 40},
)
TEACHER = WITHOUT_CRITIC | dict(
    advantage_estimator="reinforce_plus_plus", teacher_kl_coef=0.5, teacher_kl_discount=0.9
)


DECOUPLED = WITHOUT_CRITIC | dict(
    advantage_estimator="gdpo", reward_weights=(0.7, 0.3), initial_policy_kl_penalty=0.0
)
CORRECTED = WITHOUT_CRITIC | dict(
    advantage_estimator="grpo",
    sampler_correction={"weights": "token", "cap": 1.04, "reject": "geometric", "high": 1.05},
    covariance={"rule": "clip", "fraction": 0.1, "low": 0.05},
)


def run_trainer(batch_iterator_cls=None, settings=SETTINGS):
    from nemo_aligner.servers.critic_client import training_payload
    from tests import ppo_fakes

    trainer = ppo_fakes.make_trainer(**settings)
    if "sampler_correction" in settings:
        trainer.model.sampler_offset = 0.1
    if batch_iterator_cls is not None:
        trainer.batch_iterator_cls = batch_iterator_cls
    sent = trainer.rm_critic.train_batches
    return run(trainer) | {
        "sent_to_critic": [training_payload(batch) for batch in sent if "values" in batch]
    }


def run_reinforce():
    from tests.reinforce_fakes import make_reinforce_trainer

    return run(make_reinforce_trainer(val_check_interval=1))


def run_dynamic_sampling():
    from tests.unit.test_dynamic_sampling import make

    return run(make(4, max_steps=2, initial_policy_kl_penalty=0.01))


def run(trainer):
    """What a trainer among fakes has done when it has ended."""
    trainer.fit()
    return {
        "batches": trainer.model.batches,
        "sent_to_critic": [],
        "weight": trainer.model.weight,
        "metrics": [
            entry
            for entry in trainer.logger.metrics
            if not entry[0].startswith(("timers/", "speed/"))
        ],
        "tables": trainer.logger.tables,
        "state": trainer.state_dict(),
    }


def rank_0_draws_everything(sampler_iter, num_microbatches, dataset, collate_fn):
    """A work queue that rank 0 has emptied before the other rank came."""
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, list(sampler_iter)[:num_microbatches])
    if torch.distributed.get_rank() == 0:
        for micro_batch in sum(everyones, []):
            yield collate_fn([dataset[i] for i in micro_batch])


def run_on_this_rank():
    """All experiments in one start of the interpreters."""
    from nemo_aligner.parallel import parallel_state
    from tests import ppo_fakes

    parallel_state.initialize()
    results = {"default": run_trainer(), "queue": run_trainer(rank_0_draws_everything)}
    results |= {"grpo": run_trainer(settings=GRPO), "plus_plus": run_trainer(settings=PLUS_PLUS)}
    results["corrected"] = run_trainer(settings=CORRECTED)
    results["decoupled"] = run_trainer(settings=DECOUPLED)
    results["reinforce"] = run_reinforce()
    results["dynamic_sampling"] = run_dynamic_sampling()
    results["teacher"] = run_trainer(settings=TEACHER)

    return results | refusals(ppo_fakes.make_trainer, "ppo")


def refusals(make, name):
    """Of states that differ between the ranks, and of steps of another size."""
    from nemo_aligner.core.errors import UserError

    found, state = {}, {"consumed_samples": 0, f"{name}_optimization_step": 0}
    for key, changes, kind in (
        ("unequal_states", {"step": torch.distributed.get_rank()}, RuntimeError),
        (
            "other_steps",
            {"step": 1, "consumed_samples": 6, "num_rollout_samples": 6},
            UserError,
        ),
    ):
        try:
            make().load_state_dict(state | changes)
        except kind as error:
            found[key] = str(error)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(run_on_this_rank, 2, 120)


@pytest.mark.parametrize("iterator", ["default", "queue"])
def test_two_ranks_equal_one(two_ranks, iterator):
    one, two = run_trainer(), [results[iterator] for results in two_ranks]
    assert len(one["batches"]) == 12 and len(one["sent_to_critic"]) == 4
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_groups_of_responses_and_an_early_stop(two_ranks):
    one, two = run_trainer(settings=GRPO), [results["grpo"] for results in two_ranks]
    assert 3 < len(one["batches"]) < 24  # of 8 updates in each of 3 steps some were skipped
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_global_statistics(two_ranks):
    one, two = run_trainer(settings=PLUS_PLUS), [results["plus_plus"] for results in two_ranks]
    assert one["state"]["kl_coef"] > 0.01 and len(one["batches"]) == 24
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_a_teacher(two_ranks):
    one, two = run_trainer(settings=TEACHER), [results["teacher"] for results in two_ranks]
    others = run_trainer(settings=TEACHER | {"teacher_kl_coef": 0.0})
    kl = [entry[2] for entry in one["metrics"] if entry[0] == "train_rollouts/teacher_kl"]
    assert len(kl) == 3 and all(kl) and one["weight"] != others["weight"]
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_the_baseline_of_reinforce(two_ranks):
    one, two = run_reinforce(), [results["reinforce"] for results in two_ranks]
    assert len(one["batches"]) == 18 and one["weight"]
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_corrected_advantages(two_ranks):
    one, two = run_trainer(settings=CORRECTED), [results["corrected"] for results in two_ranks]
    metrics = {name.removeprefix("train_rollouts/"): value for name, _, value in one["metrics"]}
    for name in ("sampler_capped", "sampler_rejected", "fraction_of_covariant_tokens"):
        assert 0 < metrics[name] < 1, name
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_rewards_compared_apart(two_ranks):
    one, two = run_trainer(settings=DECOUPLED), [results["decoupled"] for results in two_ranks]
    assert one["weight"]
    assert_equal_runs(one, two)


def test_two_ranks_equal_one_with_dynamic_sampling(two_ranks):
    one, two = run_dynamic_sampling(), [results["dynamic_sampling"] for results in two_ranks]
    assert one["state"]["consumed_samples"] > 16 and len(one["batches"]) == 12
    assert_equal_runs(one, two)


def assert_equal_runs(one: dict, two: list[dict], rtol: float = 1e-5) -> None:
    """The run of one rank, and what both of two ranks saw of theirs."""
    assert one["state"] == two[0]["state"] == two[1]["state"]
    for k, whole in enumerate(one["batches"]):
        for key, value in whole.items():
            shares = torch.cat([result["batches"][k][key] for result in two])
            torch.testing.assert_close(shares, value, rtol=rtol, atol=rtol)
    for sent, expected in zip(two[0]["sent_to_critic"], one["sent_to_critic"], strict=True):
        assert sent.keys() == expected.keys() == {"tokens", "returns", "prev_values", "mask"}
        for key, value in expected.items():
            np.testing.assert_allclose(sent[key], value, rtol=1e-5, atol=1e-5)
    for result in two:
        assert result["tables"] == one["tables"]
        assert [entry[:2] for entry in result["metrics"]] == [
            entry[:2] for entry in one["metrics"]
        ]
        for (name, _, value), (_, _, expected) in zip(
            result["metrics"], one["metrics"], strict=True
        ):
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        assert result["weight"] == pytest.approx(one["weight"], rel=1e-5)


def test_ranks_that_resume_from_different_checkpoints_are_refused(two_ranks):
    for results in two_ranks:
        assert "rank 1 resumes from {'step': 1" in results["unequal_states"]
        assert "a job with 6" in results["other_steps"]
