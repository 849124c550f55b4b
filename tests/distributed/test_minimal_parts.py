# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainers run with parts that have NeMo-Aligner's interface and no more, on one rank and two."""

from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.algorithms import training_loop
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from tests import minimal_parts
from tests.distributed.launcher import run_ranks

SECTIONS = ("ppo", "rs", "reinforce", "sft")


def run_all():
    parallel_state.initialize()
    results = {section: minimal_parts.run(section) for section in SECTIONS}
    results["time"] = minimal_parts.run("ppo", steps=1)
    failing = {
        "client": {"client": minimal_parts.CriticClient(fails_at=3)},
        "save": {"checkpoints": minimal_parts.Checkpoints(fails=True)},
    }
    for name, arguments in failing.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            minimal_parts.run("ppo", **arguments)
        results[name] = f"{caught.typename}: {caught.value}"
    return results


@pytest.fixture(scope="module")
def runs():
    return [run_ranks(run_all, 1), run_ranks(run_all, 2)]


@pytest.mark.parametrize("section", SECTIONS)
def test_trainers_run_with_the_parts_of_nemo_aligner(runs, section):
    ((one,), two) = ([results[section] for results in ranks] for ranks in runs)
    assert one["weight"] != 0.5 and one["ending"] == "finished" and one["step"] == 3
    # After step 2 and at the end, with the counters that NeMo-Aligner's file names need.
    assert [(end, numbers["step"]) for end, numbers in one["saves"]] == [(False, 2), (True, 3)]
    assert {"consumed_samples", "epoch"} <= one["saves"][1][1].keys()
    assert "finalized" in one["logged"]
    if section == "ppo":
        assert one["waited"] == ["train", "train", "save", "train", "save"]
        assert "train_optim/critic_loss" in one["logged"]
    for rank in two:
        assert rank["weight"] == pytest.approx(one["weight"], rel=1e-5)
        assert [end for end, _ in rank["saves"]] == [False, True]
        for key in ("logged", "ending", "step"):
            assert rank[key] == one[key]


def test_ranks_agree_on_the_end_of_the_time(runs):
    for results in (*runs[0], *runs[1]):
        assert results["time"]["ending"] == "time limit (max_time_per_run)"
        assert results["time"]["step"] == 2 and len(results["time"]["saves"]) == 1


def test_errors_of_one_rank_reach_all(runs):
    for results in (*runs[0], *runs[1]):
        assert results["client"].startswith("ServerRequestError: ZeroDivisionError")
        assert results["save"].startswith("SaveError: Checkpoints.custom_save: OSError: no space")


def test_scores_are_on_the_device_and_as_wide_as_the_batch():
    given = torch.tensor([[1.0], [2.0]]), torch.ones(2, 2)
    future = SimpleNamespace(result=lambda: given)
    rollout = {"response_tokens": torch.zeros(2, 5)}
    scores = training_loop.scores_of(lambda _: future)(rollout).scores()
    assert scores.values.tolist() == [[1, 1, 0, 0]] * 2 and scores.rewards.tolist() == [1, 2]
    assert {scores.values.device.type, scores.rewards.device.type} == {get_device().type}


def test_a_function_of_any_arguments_is_given_all():
    given = training_loop.log_probs(lambda *_, **others: others, torch.zeros(1), torch.ones(1))
    assert given["response_lengths"] == 1
