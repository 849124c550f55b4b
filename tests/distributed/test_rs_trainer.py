# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rejection-sampling trainer on two data-parallel ranks does what it does on one: same
selection, global batches, metrics and weights."""

import pytest
import torch

from tests.distributed.launcher import run_ranks

SETTINGS = dict(val_check_interval=1, save_interval=1, max_epochs=2)


def coarse(rollout):
    """Rewards with many ties: which of equal ones are kept must not depend on the ranks either."""
    return (rollout["response_lengths"] - rollout["prompt_lengths"]).float() // 2


def run_trainer(micro_batch_size=2):
    from tests import rs_fakes

    trainer = rs_fakes.make_rs_trainer(score=coarse, micro_batch_size=micro_batch_size, **SETTINGS)
    trainer.fit()
    return {
        "batches": trainer.model.batches,
        "weight": trainer.model.weight,
        "metrics": [
            entry
            for entry in trainer.logger.metrics
            if not entry[0].startswith(("timers/", "speed/"))
        ],
        "tables": trainer.logger.tables,
        "state": trainer.state_dict(),
    }


def run_on_this_rank():
    """All experiments in one start of the interpreters."""
    from nemo_aligner.core.errors import UserError
    from nemo_aligner.parallel import parallel_state
    from tests import rs_fakes

    parallel_state.initialize()
    results = {"twos": run_trainer(2), "ones": run_trainer(1)}

    state = {
        "step": torch.distributed.get_rank(),
        "consumed_samples": 0,
        "rs_optimization_step": 0,
    }
    try:
        rs_fakes.make_rs_trainer().load_state_dict(state)
    except RuntimeError as error:
        results["unequal_states"] = str(error)
    state = {"step": 1, "consumed_samples": 6, "rs_optimization_step": 0, "num_rollout_samples": 6}
    try:
        rs_fakes.make_rs_trainer().load_state_dict(state)
    except UserError as error:
        results["other_steps"] = str(error)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(run_on_this_rank, 2, 120)


@pytest.mark.parametrize("micro_batches", ["twos", "ones"])
def test_two_ranks_equal_one(two_ranks, micro_batches):
    one, two = run_trainer(), [results[micro_batches] for results in two_ranks]
    assert one["state"] == two[0]["state"] == two[1]["state"]
    assert len(one["batches"]) == 24
    for k, whole in enumerate(one["batches"]):
        for key, value in whole.items():
            shares = torch.cat([result["batches"][k][key] for result in two])
            torch.testing.assert_close(shares, value, rtol=0, atol=0)
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
