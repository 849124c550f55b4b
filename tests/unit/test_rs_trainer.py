# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rejection-sampling trainer with a fake policy and a fake reward model: order of calls,
selection against a brute-force loop, the mask, resume, epochs, bad values. test_ppo_trainer.py has
what all trainers with rollouts share.
"""

import pytest
import torch

from nemo_aligner.core.tensors import sample_seeds
from tests.ppo_fakes import EOS, NUM_PROMPTS, FakeFuture, Prompts, collate, make_trainer
from tests.rs_fakes import FakeRSPolicy, make_rs_trainer

SEED = 1234  # of the fake policy


def trained_rows(batches):
    """Every row that updates saw, as (tokens that the mask trains on, all tokens), sorted."""
    rows = []
    for batch in batches:
        pairs = zip(batch["response_tokens"].tolist(), batch["mask"].tolist(), strict=True)
        for tokens, mask in pairs:
            response = tuple(t for t, m in zip(tokens[1:], mask, strict=True) if m)
            rows.append((response, tuple(tokens)))
    return sorted(rows)


# ----------------------------------------------------------------------------------- a whole run


def test_calls_of_a_step_come_in_order_and_scoring_is_awaited_after_generation():
    trainer = make_rs_trainer(max_steps=1)
    trainer.fit()
    update = ["prepare_for_training_step", "update", "finish_training_step", "optimizer_step"]
    assert trainer.events == [
        "prepare_for_inference",
        *["infer", "rm_infer"] * 12,  # four micro-batches of prompts, three responses to each
        *["rm_result"] * 12,
        "finish_inference",
        "prepare_for_training",
        *update * 4,  # 8 prompts x 2 kept responses in global batches of 4
        "finish_training",
    ]


def test_metrics_are_means_over_all_rollouts_and_over_the_selected_ones():
    trainer = make_rs_trainer(max_steps=1)
    trainer.fit()
    metrics = {name: value for name, _, value in trainer.logger.metrics}
    metrics = {name.removeprefix("train_rollouts/"): value for name, value in metrics.items()}
    rewards = dict(trainer.rm.scored)
    assert len(rewards) == 24
    assert metrics["global_rewards"] == pytest.approx(sum(rewards.values()) / 24)
    assert metrics["rewards_kind"] == pytest.approx(metrics["global_rewards"])
    assert metrics["rewards_terse"] == pytest.approx(-sum(map(len, rewards)) / 24)
    assert metrics["response_lengths"] == pytest.approx(sum(map(len, rewards)) / 24)
    wanted = pytest.approx(metrics["response_lengths"] - metrics["global_prompt_lengths"])
    assert metrics["global_response_lengths_mean"] == wanted
    rows = trained_rows(trainer.model.batches)
    kept = [tuple(t for t in tokens if t != EOS) for _, tokens in rows]
    mean = sum(rewards[tokens] for tokens in kept) / 16
    assert metrics["selected_rewards"] == pytest.approx(mean)
    assert metrics["selected_rewards"] > metrics["global_rewards"]


@pytest.mark.parametrize("make", [make_rs_trainer, make_trainer])
def test_without_validation_data_nothing_is_validated(make):
    settings = {"val_check_interval": 1, "save_interval": 1, "run_init_validation": True}
    trainer = make(has_validation=False, **settings)
    trainer.fit()
    assert trainer.step == 3 and not trainer.logger.series("timers/validation_time")
    assert [state["step"] for _, _, state in trainer.ckpt_callback.saved] == [1, 2, 3]


def test_failed_scoring_ends_the_run_before_an_update():
    trainer = make_rs_trainer()
    lost = FakeFuture(trainer.events, "rm_result", RuntimeError("remote traceback: model lost"))
    trainer.score = lambda _rollout: trainer.events.append("rm_infer") or lost
    with pytest.raises(RuntimeError, match="remote traceback: model lost"):
        trainer.fit()
    assert trainer.events.count("rm_infer") == 12 and "update" not in trainer.events


# ------------------------------------------------------------------------------------- selection


class TwinPrompts(Prompts):
    """Prompts 2k and 2k+1 are the same text."""

    def __getitem__(self, i):
        return super().__getitem__(i // 2) | {"idx": i}


def coarse(rollout):
    """Rewards with many ties: the response's length, halved."""
    return (rollout["response_lengths"] - rollout["prompt_lengths"]).float() // 2


def brute_force(dataset, indices, step, responses, top_n, score):
    """The rows to train on, one prompt and one response at a time: (response, prompt + response),
    sorted.
    """
    rows = []
    for index in indices:
        candidates = []
        for response in range(responses):
            batch = collate([dataset[index]])
            first = sample_seeds(SEED, step, torch.tensor([index]))
            batch["sample_seeds"] = first if response == 0 else sample_seeds(SEED, response, first)
            rollout = FakeRSPolicy([]).infer(batch)
            length = int(rollout["response_lengths"])
            tokens = rollout["response_tokens"][0, :length].tolist()
            reward, prompt = float(score(rollout)), int(rollout["prompt_lengths"])
            candidates.append((reward, response, tokens, prompt))
        # Of equal rewards the later response is kept.
        candidates.sort(key=lambda candidate: candidate[:2])
        best = candidates[-top_n:]
        rows += [(tuple(tokens[prompt:]), tuple(tokens)) for _, _, tokens, prompt in best]
    return sorted(rows)


@pytest.mark.parametrize("dataset", [Prompts(), TwinPrompts()], ids=["distinct", "twins"])
@pytest.mark.parametrize("responses, top_n", [(3, 1), (4, 2), (2, 2), (1, 1)])
def test_selection_equals_a_brute_force_loop(dataset, responses, top_n):
    """Ties, equal texts at different places of the data, ragged lengths of prompts and
    responses.
    """
    trainer = make_rs_trainer(
        responses=responses, top_n=top_n, score=coarse, dataset=dataset, random=False
    )
    trainer.fit()
    updates = 8 * top_n // 4
    for step in range(3):
        batches = trainer.model.batches[step * updates : (step + 1) * updates]
        assert all(len(batch["mask"]) == 4 for batch in batches)
        rows = range(8 * step, 8 * step + 8)
        expected = brute_force(dataset, rows, step, responses, top_n, coarse)
        rows = trained_rows(batches)
        seen = [(response, tuple(t for t in row if t != EOS)) for response, row in rows]
        assert sorted(seen) == expected


# -------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("min_width", [None, 5, 20])
def test_mask_covers_the_responses_and_never_the_padding(min_width):
    trainer = make_rs_trainer(max_steps=1, rollout_batch_seq_length=min_width)
    trainer.fit()
    lengths = {tokens: len(tokens) for tokens, _ in trainer.rm.scored}
    prompts = {tuple(Prompts()[i]["tokens"].tolist()) for i in range(NUM_PROMPTS)}
    widths = set()
    for batch in trainer.model.batches:
        tokens, mask = batch["response_tokens"], batch["mask"]
        assert mask.shape == (4, tokens.size(1) - 1)
        widths.add(tokens.size(1))
        for row, row_mask in zip(tokens.tolist(), mask.tolist(), strict=True):
            length = lengths[tuple(t for t in row if t != EOS)]
            prompt = max(n for n in range(length) if tuple(row[:n]) in prompts)
            assert row_mask == [
                float(prompt - 1 <= column < length - 1) for column in range(len(row) - 1)
            ]
    longest = max(lengths.values())
    assert widths == {max(longest, min_width or 0)}


def test_end_token_is_trained_on_and_stand_ins_are_not():
    rollout = {
        "response_tokens": torch.tensor([[7, 8, 9, EOS, EOS, EOS], [7, 5, 6, 8, EOS, EOS]]),
        "prompt_lengths": torch.tensor([2, 1]),
        "response_lengths": torch.tensor([4, 4]),  # the first response is 9 and its end token
        "loss_multiplier": torch.tensor([1.0, 0.0]),
    }
    data = make_rs_trainer().generate_rs_data(rollout)
    assert data["mask"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert set(data) == {"response_tokens", "mask"}


# -------------------------------------------------------------- position in the data, and resume


def test_loader_that_runs_ahead_changes_nothing():
    """Worker processes draw indices before they are needed."""
    ahead, plain = (make_rs_trainer(max_epochs=2, num_workers=workers) for workers in (1, 0))
    for trainer in (ahead, plain):
        trainer.load_state_dict({"step": 1, "consumed_samples": 8, "rs_optimization_step": 4})
        trainer.fit()
    assert ahead.step == 6
    assert trained_rows(ahead.model.batches) == trained_rows(plain.model.batches)


def test_every_prompt_is_used_once_per_epoch_and_gets_another_response():
    trainer = make_rs_trainer(max_epochs=2, responses=1, top_n=1)
    trainer.fit()
    prompts = [tuple(Prompts()[i]["tokens"].tolist()) for i in range(NUM_PROMPTS)]
    epochs = trainer.rm.scored[:NUM_PROMPTS], trainer.rm.scored[NUM_PROMPTS:]
    for scored in epochs:
        used = [next(p for p in prompts if row[: len(p)] == p) for row, _ in scored]
        assert sorted(used) == sorted(prompts)
    assert epochs[0] != epochs[1] and trainer.state_dict()["consumed_samples"] == 48


def test_the_rest_of_an_epoch_is_left_out():
    # 24 prompts in rounds of 10: two steps per epoch.
    trainer = make_rs_trainer(rollout_size=10, max_epochs=3, model_gbs=5)
    trainer.fit()
    wanted = {"step": 6, "consumed_samples": 60, "epoch": 3, "rs_optimization_step": 24}
    assert trainer.state_dict() == {**wanted, "num_rollout_samples": 10}
    sizes = trainer.logger.series("train_rollouts/rollout_size")
    assert sizes == [(step, 30) for step in range(6)]
    epochs = trainer.logger.series("train_rollouts/epoch")
    assert epochs == [(step, step // 2 + 1) for step in range(6)]
