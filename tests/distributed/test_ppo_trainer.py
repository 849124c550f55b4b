# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainers of PPO, REINFORCE and rejection sampling on two data-parallel ranks do what they do
on one: same global batches, metrics and weights.
"""

from functools import partial

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers.critic_client import training_payload
from tests import ppo_fakes, rs_fakes
from tests.distributed.launcher import run_ranks
from tests.rs_fakes import make_reinforce_trainer, make_rs_trainer
from tests.unit import test_dynamic_sampling

SETTINGS = dict(
    ppo_epochs=2, critic_warmup_steps=1, val_check_interval=1, save_interval=1, whiten_rewards=True
)
# A prompt's responses are dealt to both ranks; the ranks find out together that the policy has
# gone too far.
WITHOUT_CRITIC = dict(ppo_epochs=2, val_check_interval=1, num_rollouts_per_prompt=2)
GRPO = WITHOUT_CRITIC | dict(advantage_estimator="grpo", target_kl=1e-5)
ADAPTIVE = {"enable": True, "target": 1e-9, "horizon": 40}
PLUS_PLUS = WITHOUT_CRITIC | dict(advantage_estimator="reinforce_plus_plus", reward_clip=1.2)
PLUS_PLUS |= dict(
    normalize_rewards=True, overlong_buffer_len=3, advantage_clip=1.5, kl_estimator="k3"
)
PLUS_PLUS["adaptive_kl"] = ADAPTIVE
TEACHER = WITHOUT_CRITIC | dict(
    advantage_estimator="reinforce_plus_plus", teacher_kl_coef=0.5, teacher_kl_discount=0.9
)


DECOUPLED = WITHOUT_CRITIC | dict(
    advantage_estimator="gdpo", reward_weights=(0.7, 0.3), initial_policy_kl_penalty=0.0
)
CAPPED = {"weights": "token", "cap": 1.04, "reject": "geometric", "high": 1.05}
CLIPPED = {"rule": "clip", "fraction": 0.1, "low": 0.05}
CORRECTED = WITHOUT_CRITIC | dict(advantage_estimator="grpo", covariance=CLIPPED)
CORRECTED["sampler_correction"] = CAPPED


def run_trainer(batch_iterator_cls=None, settings=SETTINGS):
    trainer = ppo_fakes.make_trainer(**settings)
    if "sampler_correction" in settings:
        trainer.model.sampler_offset = 0.1
    if batch_iterator_cls is not None:
        trainer.iterator = batch_iterator_cls
    done, sent = run(trainer), trainer.rm_critic.train_batches
    return done | {"sent_to_critic": [training_payload(b) for b in sent if "values" in b]}


def run_reinforce():
    return run(make_reinforce_trainer(val_check_interval=1))


def run_dynamic_sampling():
    return run(test_dynamic_sampling.make(4, max_steps=2, initial_policy_kl_penalty=0.01))


def coarse(rollout):
    """Rewards with many ties: which of equal ones are kept must not depend on the ranks either."""
    return (rollout["response_lengths"] - rollout["prompt_lengths"]).float() // 2


def run_rs(micro_batch_size=2):
    settings = {"val_check_interval": 1, "save_interval": 1, "max_epochs": 2}
    return run(make_rs_trainer(score=coarse, micro_batch_size=micro_batch_size, **settings))


# What to run, and how many batches one rank has trained on.
RUNS = {
    "default": (run_trainer, range(12, 13)),
    # Of 8 updates in each of 3 steps some are skipped.
    "grpo": (partial(run_trainer, settings=GRPO), range(4, 24)),
    "plus_plus": (partial(run_trainer, settings=PLUS_PLUS), range(24, 25)),
    "corrected": (partial(run_trainer, settings=CORRECTED), range(24, 25)),
    "decoupled": (partial(run_trainer, settings=DECOUPLED), range(24, 25)),
    "teacher": (partial(run_trainer, settings=TEACHER), range(24, 25)),
    "reinforce": (run_reinforce, range(18, 19)),
    "rs": (run_rs, range(24, 25)),
    "dynamic_sampling": (run_dynamic_sampling, range(12, 13)),
}


def untimed(metrics):
    return [entry for entry in metrics if not entry[0].startswith(("timers/", "speed/"))]


def run(trainer):
    """What a trainer among fakes has done when it has ended."""
    trainer.fit()
    return {
        "batches": trainer.model.batches,
        "sent_to_critic": [],
        "weight": trainer.model.weight,
        "metrics": untimed(trainer.logger.metrics),
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
    parallel_state.initialize()
    results = {name: function() for name, (function, _) in RUNS.items()}
    results["queue"] = run_trainer(rank_0_draws_everything)
    results["ones"] = run_rs(micro_batch_size=1)
    for name, make in (("ppo", ppo_fakes.make_trainer), ("rs", rs_fakes.make_rs_trainer)):
        results[f"refused {name}"] = refusals(make, name)
    return results


def refusals(make, name):
    """Of states that differ between the ranks, and of steps of another size."""
    found, state = {}, {"consumed_samples": 0, f"{name}_optimization_step": 0}
    for key, changes, kind in (
        ("unequal_states", {"step": torch.distributed.get_rank()}, RuntimeError),
        ("other_steps", {"step": 1, "consumed_samples": 6, "num_rollout_samples": 6}, UserError),
    ):
        try:
            make().load_state_dict(state | changes)
        except kind as error:
            found[key] = str(error)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(run_on_this_rank, 2, 120)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_equal_one(two_ranks, name):
    function, batches = RUNS[name]
    one = function()
    assert len(one["batches"]) in batches and one["weight"]
    metrics = {key.removeprefix("train_rollouts/"): value for key, _, value in one["metrics"]}
    if name == "default":
        assert len(one["sent_to_critic"]) == 4
        assert_equal_runs(one, [results["queue"] for results in two_ranks])
    elif name == "rs":
        assert_equal_runs(one, [results["ones"] for results in two_ranks], rtol=0)
    elif name == "plus_plus":
        assert one["state"]["kl_coef"] > 0.01
    elif name == "teacher":
        assert metrics["teacher_kl"] != 0
    elif name == "corrected":
        for part in ("sampler_capped", "sampler_rejected", "fraction_of_covariant_tokens"):
            assert 0 < metrics[part] < 1, part
    elif name == "dynamic_sampling":
        assert one["state"]["consumed_samples"] > 16
    of_ranks = [results[name] for results in two_ranks]
    assert_equal_runs(one, of_ranks, rtol=0 if name == "rs" else 1e-5)


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
        pairs = zip(result["metrics"], one["metrics"], strict=True)
        for (name, _, value), (_, _, expected) in pairs:
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        assert result["weight"] == pytest.approx(one["weight"], rel=1e-5)


@pytest.mark.parametrize("name", ["ppo", "rs"])
def test_ranks_that_resume_from_different_checkpoints_are_refused(two_ranks, name):
    for results in two_ranks:
        assert "rank 1 resumes from {'step': 1" in results[f"refused {name}"]["unequal_states"]
        assert "a job with 6" in results[f"refused {name}"]["other_steps"]
