# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rejection-sampling trainer with a fake policy and a fake reward model: order of calls,
selection against a brute-force loop, the mask, resume, epochs, bad values. test_ppo_trainer.py has
what all trainers with rollouts share.
"""

import pytest
import torch

from nemo_aligner.core.advantages import select_topk
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.tensors import sample_seeds
from tests.ppo_fakes import (
    EOS,
    NUM_PROMPTS,
    FakeFuture,
    Prompts,
    collate,
    fit_until_stopped,
    make_trainer,
)
from tests.rs_fakes import FakeRSPolicy, make_rs_trainer

SEED = 1234  # of the fake policy


def trained_rows(batches):
    """Every row that updates saw, as (tokens that the mask trains on, all tokens), sorted."""
    rows = []
    for batch in batches:
        for tokens, mask in zip(
            batch["response_tokens"].tolist(), batch["mask"].tolist(), strict=True
        ):
            rows.append(
                (tuple(t for t, m in zip(tokens[1:], mask, strict=True) if m), tuple(tokens))
            )
    return sorted(rows)


def logged(trainer, first_step=0, updates_per_step=4):
    """Everything logged but times, from a step on."""
    return [
        (name, step, value)
        for name, step, value in trainer.logger.metrics
        if not name.startswith(("timers/", "speed/"))
        and step
        >= (updates_per_step * first_step + 1 if name.startswith("train_optim/") else first_step)
    ]


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


def test_run_counts_prompts_and_logs_by_family():
    trainer = make_rs_trainer()
    trainer.fit()
    assert trainer.state_dict() == {
        "step": 3,
        "consumed_samples": 24,
        "epoch": 1,
        "rs_optimization_step": 12,
        "num_rollout_samples": 8,
    }
    assert all(type(value) is int for value in trainer.state_dict().values())
    assert trainer.scheduler.num_steps == 12
    logger = trainer.logger
    assert logger.series("train_rollouts/consumed_samples") == [(0, 8), (1, 16), (2, 24)]
    assert logger.series("train_rollouts/rollout_size") == [(0, 24), (1, 24), (2, 24)]
    assert [step for step, _ in logger.series("train_optim/loss")] == list(range(1, 13))
    for name in ("rollout_time", "generate", "rm_wait", "train_time", "train_step_time"):
        assert len(logger.series(f"timers/{name}")) == 3, name
    assert all(value > 0 for _, value in logger.series("speed/generate_tokens_per_s"))
    assert logger.finalized == 1 and trainer.run_timer.started == 1
    assert [row["step"] for row in logger.tables[-1][2]] == [0, 1, 2]


def test_metrics_are_means_over_all_rollouts_and_over_the_selected_ones():
    trainer = make_rs_trainer(max_steps=1)
    trainer.fit()
    metrics = {
        name.removeprefix("train_rollouts/"): value for name, _, value in trainer.logger.metrics
    }
    rewards = dict(trainer.rm.scored)
    assert len(rewards) == 24
    assert metrics["global_rewards"] == pytest.approx(sum(rewards.values()) / 24)
    assert metrics["rewards_kind"] == pytest.approx(metrics["global_rewards"])
    assert metrics["rewards_terse"] == pytest.approx(-sum(map(len, rewards)) / 24)
    assert metrics["response_lengths"] == pytest.approx(sum(map(len, rewards)) / 24)
    assert metrics["global_response_lengths_mean"] == pytest.approx(
        metrics["response_lengths"] - metrics["global_prompt_lengths"]
    )
    kept = [
        tuple(t for t in tokens if t != EOS) for _, tokens in trained_rows(trainer.model.batches)
    ]
    assert metrics["selected_rewards"] == pytest.approx(
        sum(rewards[tokens] for tokens in kept) / 16
    )
    assert metrics["selected_rewards"] > metrics["global_rewards"]


@pytest.mark.parametrize("make", [make_rs_trainer, make_trainer])
def test_without_validation_data_nothing_is_validated(make):
    settings = {"val_check_interval": 1, "save_interval": 1, "run_init_validation": True}
    trainer = make(has_validation=False, **settings)
    trainer.fit()
    assert trainer.step == 3 and not trainer.logger.series("timers/validation_time")
    assert [state["step"] for _, _, state in trainer.ckpt_callback.saved] == [1, 2, 3]


def test_validation_scores_one_response_to_each_prompt_the_same_each_time():
    trainer = make_rs_trainer(val_check_interval=1, save_interval=1, run_init_validation=True)
    trainer.fit()
    rewards = trainer.logger.series("val_rollouts/global_rewards")
    assert [step for step, _ in rewards] == [0, 1, 2, 3]
    assert (
        len({value for _, value in rewards}) == 1
    )  # the fake policy's text does not depend on its weight
    assert {value for _, value in trainer.logger.series("val_rollouts/rollout_size")} == {4}
    assert len(trainer.logger.series("val_rollouts/rewards_terse")) == 4
    for name in ("validation_time", "validation_generate", "validation_rm_wait"):
        assert len(trainer.logger.series(f"timers/{name}")) == 4
    assert trainer.val_df.step.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    candidates, is_train_end, state = trainer.ckpt_callback.saved[-1]
    assert is_train_end and state == trainer.state_dict()
    assert candidates["val_global_rewards"] == rewards[-1][1] and candidates["step"] == 3


def test_failed_scoring_ends_the_run_before_an_update():
    trainer = make_rs_trainer()
    submitted = []

    def infer_rm(rollout):
        submitted.append(
            FakeFuture(trainer.events, "rm_result", RuntimeError("remote traceback: model lost"))
        )
        return submitted[-1]

    trainer.score = infer_rm
    with pytest.raises(RuntimeError, match="remote traceback: model lost"):
        trainer.fit()
    assert len(submitted) == 12 and "update" not in trainer.events


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
            candidates.append(
                (float(score(rollout)), response, tokens, int(rollout["prompt_lengths"]))
            )
        candidates.sort(
            key=lambda candidate: candidate[:2]
        )  # of equal rewards the later response is kept
        rows += [
            (tuple(tokens[prompt:]), tuple(tokens)) for _, _, tokens, prompt in candidates[-top_n:]
        ]
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
        expected = brute_force(
            dataset, range(8 * step, 8 * step + 8), step, responses, top_n, coarse
        )
        seen = [
            (response, tuple(t for t in row if t != EOS))
            for response, row in trained_rows(batches)
        ]
        assert sorted(seen) == expected


def test_selection_of_ragged_groups_against_python_sorting():
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        group = torch.randint(0, 4, (12,), generator=generator)
        rewards = torch.randint(-1, 2, (12, 1), generator=generator).float()
        batch = {
            "idx": group,
            "rewards": rewards,
            "row": torch.arange(12),
            "prompt_tokens": torch.zeros(12, 3),
        }
        expected = []
        for value in sorted(set(group.tolist())):
            rows = [row for row in range(12) if group[row] == value]
            expected += sorted(rows, key=lambda row: (float(rewards[row]), row))[-2:]
        assert select_topk(batch, 2, group_by="idx")["row"].tolist() == expected
        best = sorted(range(12), key=lambda row: (float(rewards[row]), row))[-2:]
        assert select_topk(batch, 2)["row"].tolist() == best  # by text, all rows are one prompt


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


def test_resume_continues_exactly():
    settings = dict(val_check_interval=1, save_interval=1, max_epochs=2)
    whole = make_rs_trainer(**settings)
    whole.fit()

    first = make_rs_trainer(time_limit=2, **settings)
    fit_until_stopped(first)
    _, is_train_end, state = first.ckpt_callback.saved[-1]
    assert not is_train_end
    assert state == {
        "step": 2,
        "consumed_samples": 16,
        "epoch": 0,
        "rs_optimization_step": 8,
        "num_rollout_samples": 8,
    }

    second = make_rs_trainer(**settings)
    second.model.weight = first.model.weight
    second.load_state_dict(state)
    second.fit()

    assert logged(second) == logged(whole, first_step=2)[-len(logged(second)) :]
    assert len(logged(first)) + len(logged(second)) == len(logged(whole))
    assert second.state_dict() == whole.state_dict() and second.state_dict()["epoch"] == 2
    assert second.model.weight == whole.model.weight
    for resumed, uninterrupted in zip(second.model.batches, whole.model.batches[8:], strict=True):
        for key, value in uninterrupted.items():
            torch.testing.assert_close(resumed[key], value, rtol=0, atol=0)


def test_loader_that_runs_ahead_changes_nothing():
    """Worker processes draw indices before they are needed."""
    ahead, plain = make_rs_trainer(max_epochs=2, num_workers=1), make_rs_trainer(max_epochs=2)
    ahead.load_state_dict({"step": 1, "consumed_samples": 8, "rs_optimization_step": 4})
    plain.load_state_dict({"step": 1, "consumed_samples": 8, "rs_optimization_step": 4})
    ahead.fit()
    plain.fit()
    assert ahead.step == 6 and trained_rows(ahead.model.batches) == trained_rows(
        plain.model.batches
    )


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
    assert trainer.state_dict() == {
        "step": 6,
        "consumed_samples": 60,
        "epoch": 3,
        "rs_optimization_step": 24,
        "num_rollout_samples": 10,
    }
    assert trainer.logger.series("train_rollouts/rollout_size") == [
        (step, 30) for step in range(6)
    ]
    assert trainer.logger.series("train_rollouts/epoch") == [
        (0, 1),
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 3),
        (5, 3),
    ]


# ------------------------------------------------------------------------------------ bad values


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"responses": 2, "top_n": 3},
            "top_n_rollouts=3 must be from 1 to model.rs.num_rollouts_per_prompt=2",
        ),
        ({"top_n": 0}, "top_n_rollouts=0 must be from 1 to"),
        (
            {"model_gbs": 6},
            "num_rollout_samples=8 x model.rs.top_n_rollouts=2=16 is not a multiple of "
            "model.global_batch_size=6",
        ),
        ({"max_epochs": 2, "random": False}, "trainer.rs.max_epochs=2 needs a random sampler"),
        ({"micro_batch_size": 3}, "8 .* is not a multiple of 3"),
    ],
)
def test_values_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_rs_trainer(**changes)
