# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of PPO in the trainer: their data against loops over plain numbers, whole runs
among fakes, and numbers by hand.
"""

import math
import statistics

import pytest
import torch

from nemo_aligner.algorithms import ppo
from nemo_aligner.algorithms.ppo_data import with_normalized_rewards
from nemo_aligner.core.advantages import RunningMoments, calculate_ppo_rewards
from nemo_aligner.core.tensors import create_mask, sample_seeds
from tests.ppo_fakes import NUM_PROMPTS, make_trainer, stopped_and_resumed

NAN = float("nan")
WIDTH = 9  # S - 1
# (idx, prompt length, total length, reward) of the responses to three prompts; the last row is a
# stand-in.
ROWS = [(7, 2, 6, 1.5), (3, 3, 8, -0.5), (7, 2, 5, 0.25), (3, 3, 10, 2.0), (5, 4, 6, 0.75)]
ROWS += [(7, 2, 9, -2.5), (5, 4, 5, 0.75), (5, 4, 9, 1000.0)]
STAND_IN = 7


def scored_rollout(with_values: bool, with_teacher: bool = False) -> dict:
    """Random numbers on the responses, NaN everywhere else."""
    generator = torch.Generator().manual_seed(5)
    idx, prompts, lengths, rewards = (torch.tensor(column) for column in zip(*ROWS))
    column = torch.arange(WIDTH)
    outside = (column < prompts[:, None] - 1) | (column >= lengths[:, None] - 1)

    def random(scale, shift):
        values = torch.randn(len(ROWS), WIDTH, generator=generator) * scale + shift
        return values.masked_fill(outside, NAN)

    rollout = {"response_tokens": torch.arange(len(ROWS) * (WIDTH + 1)).view(len(ROWS), -1)}
    rollout |= {"idx": idx, "prompt_lengths": prompts, "response_lengths": lengths}
    rollout |= {"is_end": torch.ones(len(ROWS), dtype=torch.bool), "rewards": rewards}
    rollout |= {"loss_multiplier": torch.tensor([float(i != STAND_IN) for i in range(len(ROWS))])}
    rollout |= {"logprobs": random(0.4, -1.5), "init_logprobs": random(0.4, -1.5)}
    values, teacher = random(0.8, 0.2), random(0.6, -2.0)
    rollout |= {"values": values} if with_values else {}
    return rollout | ({"teacher_logprobs": teacher} if with_teacher else {})


def naive_data(rollout: dict, cfg: dict, max_response_length: int):
    """Advantages and returns of each row as lists over its response, by the formulas of
    docs/ppo.md, without tensors.
    """
    rows = [i for i in range(len(ROWS)) if i != STAND_IN]
    spans = {i: range(ROWS[i][1] - 1, ROWS[i][2] - 1) for i in rows}

    def kl(i, t):
        k1 = float(rollout["logprobs"][i, t]) - float(rollout["init_logprobs"][i, t])
        default = "abs" if cfg.get("use_absolute_kl", False) else "k1"
        estimator = cfg.get("kl_estimator") or default
        kinds = {"k1": k1, "abs": abs(k1), "k2": k1 * k1 / 2, "k3": math.exp(-k1) - 1 + k1}
        return kinds[estimator]

    def scalar_reward(i):
        clip, buffer = cfg.get("reward_clip") or math.inf, cfg.get("overlong_buffer_len", 0)
        reward = max(-clip, min(clip, ROWS[i][3]))
        if buffer:
            over = (max_response_length - buffer) - len(spans[i])
            beyond = len(spans[i]) > max_response_length
            penalty = 0 if over >= 0 else -1 if beyond else over / buffer
            reward += penalty * cfg.get("overlong_penalty_factor", 1.0)
        return reward

    beta = cfg.get("initial_policy_kl_penalty", 0.01)
    rewards = {i: [-beta * kl(i, t) for t in spans[i]] for i in rows}
    for i in rows:
        rewards[i][-1] += scalar_reward(i)
    if cfg.get("whiten_rewards"):
        rewards = shifted_and_scaled(rewards, keep_mean=True)

    estimator, gamma = cfg.get("advantage_estimator", "gae"), cfg.get("discount_factor", 1.0)
    returns = None
    if estimator == "gae":
        values = {i: [float(rollout["values"][i, t]) for t in spans[i]] + [0.0] for i in rows}

        def gae(i, lam):  # as a sum over all later columns, not as a recursion
            v, n = values[i], len(spans[i])
            deltas = [rewards[i][t] + gamma * v[t + 1] - v[t] for t in range(n)]
            return discounted(deltas, gamma * lam)

        advantages = {i: gae(i, 0.95) for i in rows}
        of_critic = cfg.get("critic_gae_lambda")
        returns = {i: gae(i, 0.95 if of_critic is None else of_critic) for i in rows}
        returns = {i: [a + v for a, v in zip(returns[i], values[i])] for i in rows}
    elif estimator == "reinforce_plus_plus":
        advantages = {i: discounted(rewards[i], gamma) for i in rows}
    elif estimator == "teacher":
        advantages = {i: [0.0] * len(spans[i]) for i in rows}
    else:
        advantages = {}
        for i in rows:
            same = [j for j in rows if ROWS[j][0] == ROWS[i][0]]
            scores = [sum(rewards[j]) for j in same]
            mine, mean = sum(rewards[i]), statistics.mean(scores)
            advantage = {
                "dr_grpo": mine - mean,
                "rloo": mine - (sum(scores) - mine) / (len(scores) - 1),
                "grpo": (mine - mean) / (statistics.stdev(scores) + 1e-6),
            }[estimator]
            advantages[i] = [advantage] * len(spans[i])
    if cfg.get("normalize_advantages", True) and estimator in ("gae", "reinforce_plus_plus"):
        advantages = shifted_and_scaled(advantages)
    if cfg.get("teacher_kl_coef"):
        coef, gamma = cfg["teacher_kl_coef"], cfg.get("teacher_kl_discount", 0.0)
        for i in rows:
            own, theirs = rollout["logprobs"], rollout["teacher_logprobs"]
            to_come = discounted([float(own[i, t] - theirs[i, t]) for t in spans[i]], gamma)
            advantages[i] = [a - coef * later for a, later in zip(advantages[i], to_come)]
    clip = cfg.get("advantage_clip") or math.inf
    return {i: [max(-clip, min(clip, a)) for a in row] for i, row in advantages.items()}, returns


def discounted(row: list, gamma: float) -> list:
    """Of each element its sum with all later ones."""
    return [sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]


def shifted_and_scaled(rows: dict, keep_mean: bool = False) -> dict:
    every = [x for row in rows.values() for x in row]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every) + 1e-8)
    shift = mean if keep_mean else 0
    return {i: [(x - mean) / std + shift for x in row] for i, row in rows.items()}


EVERYTHING = {"kl_estimator": "k2", "initial_policy_kl_penalty": 0.3, "reward_clip": 1.25}
EVERYTHING |= {"overlong_buffer_len": 3, "overlong_penalty_factor": 0.5, "advantage_clip": 0.8}
EVERYTHING |= {"whiten_rewards": True, "discount_factor": 0.9}
STRONG = {"initial_policy_kl_penalty": 0.5}
RPP = {"advantage_estimator": "reinforce_plus_plus"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_absolute_kl": True, **STRONG},
        *({"kl_estimator": name, **STRONG} for name in ("k1", "abs", "k2", "k3")),
        {"critic_gae_lambda": 0.0, "discount_factor": 0.9},
        {"advantage_clip": 0.5, "normalize_advantages": False},
        {"whiten_rewards": True},
        {"overlong_buffer_len": 6, "overlong_penalty_factor": 2.5},
        {**EVERYTHING, "critic_gae_lambda": 0.7},
        RPP,
        {**RPP, "normalize_advantages": False, "discount_factor": 0.8},
        *(
            {"advantage_estimator": name, **EVERYTHING, "whiten_rewards": False}
            for name in ("reinforce_plus_plus", "rloo", "grpo")
        ),
        {"advantage_estimator": "grpo", "kl_estimator": "k3", **STRONG},
        {"teacher_kl_coef": 1.0},
        {"teacher_kl_coef": 0.7, "teacher_kl_discount": 0.6, **EVERYTHING},
        *(
            {"teacher_kl_coef": 0.5, "teacher_kl_discount": gamma, "advantage_estimator": name}
            for name in ("teacher", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo")
            for gamma in (0.0, 1.0)
        ),
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items())[:60],
)
def test_data_equal_a_loop_over_plain_numbers(changes):
    trainer = make_trainer(max_response_length=6, **changes)
    has_critic = "advantage_estimator" not in changes
    rollout = scored_rollout(has_critic, "teacher_kl_coef" in changes)
    data, metrics = trainer.generate_ppo_data(rollout)
    advantages, returns = naive_data(rollout, changes, max_response_length=6)
    for i, (_, prompt_length, length, _) in enumerate(ROWS):
        span = slice(prompt_length - 1, length - 1)
        assert data["mask"][i].sum() == (0 if i == STAND_IN else length - prompt_length)
        if i == STAND_IN:
            continue
        wanted = pytest.approx(advantages[i], rel=1e-4, abs=1e-5)
        assert data["advantages"][i, span].tolist() == wanted
        if has_critic:
            wanted = pytest.approx(returns[i], rel=1e-4, abs=1e-5)
            assert data["returns"][i, span].tolist() == wanted
    assert has_critic == ("returns" in data) == ("values" in data) == ("values_mean" in metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(tensor.isfinite().all() for key, tensor in data.items() if key != "advantages")


def test_a_teacher_is_asked_of_rollouts_and_not_of_validations():
    trainer = make_trainer(teacher_kl_coef=1.0, val_check_interval=1)
    trainer.fit()
    assert trainer.events.count("teacher") == 3 * 4 < trainer.events.count("critic_infer")


def test_a_policy_that_is_its_teacher_learns_nothing_from_it():
    rollout = scored_rollout(False)
    rollout["teacher_logprobs"] = rollout["logprobs"].clone()
    settings = {"advantage_estimator": "teacher", "teacher_kl_coef": 1.0}
    data, metrics = make_trainer(**settings).generate_ppo_data(rollout)
    assert not data["advantages"].any() and metrics["teacher_kl"] == 0
    rollout["teacher_logprobs"] -= 0.25  # of 29 tokens of 7 responses
    data, metrics = make_trainer(**settings).generate_ppo_data(rollout)
    assert data["advantages"].sum().item() == pytest.approx(-0.25 * 29, rel=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["teacher_kl_per_sample"] == pytest.approx(0.25 * 29 / 7, rel=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_equally_rewarded_responses_of_any_length_teach_nothing(estimator):
    rollout = scored_rollout(False) | {"rewards": torch.ones(len(ROWS))}
    # A prompt of its own, which cannot be used: it is not one without signal either.
    rollout["idx"][STAND_IN] = 9
    trainer = make_trainer(advantage_estimator=estimator, initial_policy_kl_penalty=0.0)
    data, metrics = trainer.generate_ppo_data(rollout)
    assert (data["advantages"][data["mask"].bool()] == 0).all()
    assert metrics["fraction_of_prompts_without_signal"] == 1.0
    rollout["rewards"][0] = 2.0  # of one of three prompts
    _, metrics = trainer.generate_ppo_data(rollout)
    assert metrics["fraction_of_prompts_without_signal"] == pytest.approx(2 / 3)


def test_metrics_say_what_was_clipped_and_taken_off():
    settings = dict(reward_clip=1.0, overlong_buffer_len=4, advantage_clip=1e-3)
    settings |= dict(initial_policy_kl_penalty=0.5, max_response_length=6, kl_estimator="k2")
    rollout = scored_rollout(True)
    _, metrics = make_trainer(**settings).generate_ppo_data(rollout)
    lengths = [4, 5, 3, 7, 2, 7, 1]  # nothing is taken off up to 2 tokens, everything from 6 on
    taken = 2 / 4 + 3 / 4 + 1 / 4 + 1 + 0 + 1 + 0
    assert metrics["overlong_penalty"] == pytest.approx(-taken / 7)
    assert metrics["fraction_of_rewards_clipped"] == pytest.approx(3 / 7)  # 1.5, 2.0 and -2.5
    assert metrics["fraction_of_advantages_clipped"] > 0.9
    kl = 0.5 * (rollout["logprobs"] - rollout["init_logprobs"])[:STAND_IN].double() ** 2
    assert metrics["init_policy_kl_per_sample"] == pytest.approx(float(kl.nansum() / 7), rel=1e-5)
    means = [row.nansum() / length for row, length in zip(kl, lengths)]
    assert metrics["init_policy_kl"] == pytest.approx(float(sum(means) / 7), rel=1e-5)
    assert metrics["kl_penalty"] == 0.5


# ------------------------------------------------------------------------------- several responses


def rows_by_prompt(batches) -> dict:
    """Prompt (its first token is unique) to the responses to it, as sets of token tuples."""
    rows = {}
    for batch in batches:
        for row in batch["response_tokens"].tolist():
            rows.setdefault(row[0], []).append(tuple(row[: row.index(0)] if 0 in row else row))
    return rows


def test_each_prompt_gets_several_responses():
    settings = dict(advantage_estimator="grpo", max_steps=1, val_check_interval=1)
    once = make_trainer(num_rollouts_per_prompt=1, **settings)
    thrice = make_trainer(num_rollouts_per_prompt=3, **settings)
    for trainer in (once, thrice):
        trainer.fit()
        assert trainer.consumed_samples == 8
        assert len(trainer.logger.tables[-1][2]) == 4  # a validation draws one response
    assert len(once.model.batches) == 2 and len(thrice.model.batches) == 6
    assert thrice.logger.series("train_rollouts/rollout_size") == [(0, 24)]
    first, all_responses = rows_by_prompt(once.model.batches), rows_by_prompt(thrice.model.batches)
    assert first.keys() == all_responses.keys() and len(first) == 8
    for prompt, (response,) in first.items():
        assert len(all_responses[prompt]) == 3 and response in all_responses[prompt]
    assert any(len(set(responses)) == 3 for responses in all_responses.values())
    rewards = [trainer.logger.series("val_rollouts/rewards") for trainer in (once, thrice)]
    assert rewards[0] == rewards[1]


# ------------------------------------------------------------------------------ without a critic


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "rloo", "grpo"])
def test_without_a_critic_a_run_has_no_values(estimator):
    trainer = make_trainer(advantage_estimator=estimator, num_rollouts_per_prompt=2)
    trainer.fit()
    assert trainer.step == 3 and len(trainer.model.batches) == 12
    names = " ".join(name for name, _, _ in trainer.logger.metrics)
    assert not any(word in names for word in ("values", "returns", "critic_loss"))
    assert all(set(batch).isdisjoint({"values", "returns"}) for batch in trainer.model.batches)
    kl = dict(trainer.logger.series("train_rollouts/init_policy_kl"))
    assert kl[0] == 0.0 and kl[2] > 0


# -------------------------------------------------------------------------------------------- KL


def test_adaptive_penalty_follows_the_kl_and_is_resumed():
    adaptive = {"enable": True, "target": 1e-9, "horizon": 40}
    settings = dict(adaptive_kl=adaptive, kl_estimator="k2", initial_policy_kl_penalty=0.2)
    settings |= dict(val_check_interval=1, save_interval=1)
    whole = make_trainer(critic_warmup_steps=2, **settings)
    whole.fit()
    used = [value for _, value in whole.logger.series("train_rollouts/kl_penalty")]
    kl = [value for _, value in whole.logger.series("train_rollouts/init_policy_kl_per_sample")]
    expected = [0.2]  # the rollouts that warm the critic up, with a KL of 0, have not moved it
    for value in kl:
        error = max(-0.2, min(0.2, value / 1e-9 - 1))
        expected.append(expected[-1] * (1 + error * 8 / 40))
    assert used == pytest.approx(expected[:3], rel=1e-12)
    assert kl[0] == 0 and used[1] < used[0] and used[2] > used[1]
    assert whole.state_dict()["kl_coef"] == pytest.approx(expected[3], rel=1e-12)

    second = stopped_and_resumed(critic_warmup_steps=2, **settings)
    assert [value for _, value in second.logger.series("train_rollouts/kl_penalty")] == used[1:]
    assert second.model.weight == whole.model.weight


def test_rewards_are_normalized_by_all_so_far_and_resumed():
    settings = dict(normalize_rewards=True, save_interval=1, initial_policy_kl_penalty=0.0)
    whole = make_trainer(**settings)
    whole.fit()
    kept = whole.state_dict()["reward_moments"]
    assert kept["count"] == NUM_PROMPTS
    rewards = [value for _, value in whole.logger.series("train_rollouts/rewards")]
    assert kept["mean"] == pytest.approx(sum(rewards) / 3, rel=1e-6)  # logged as they came
    second = stopped_and_resumed(**settings)
    assert second.state_dict() == whole.state_dict()
    assert second.model.weight == whole.model.weight != 0
    batch = scored_rollout(with_values=True)
    moments = RunningMoments(2, 1.0, 9.0)
    changed = with_normalized_rewards(batch, moments)["rewards"]
    assert moments.count == 2 + STAND_IN
    torch.testing.assert_close(changed, (batch["rewards"] - moments.mean) / moments.std)


def test_weights_of_samples_multiply_their_advantages():
    trainer = make_trainer(advantage_estimator="grpo", num_rollouts_per_prompt=2)
    batch = scored_rollout(with_values=False)
    plain = trainer.generate_ppo_data(batch)[0]["advantages"]
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0, 1.0, 1.0, 0.0])
    weighted, _ = trainer.generate_ppo_data(batch | {"loss_multiplier": weights})
    found, wanted = weighted["advantages"], plain * weights[:, None]
    compared = [0, 2, 4, 5, 6, 7]  # without row 3 and the one of the same prompt
    torch.testing.assert_close(found[compared], wanted[compared])
    assert not weighted["mask"][3].any()


def test_target_kl_skips_the_other_updates_of_the_rollout():
    free = make_trainer(ppo_epochs=3)
    free.fit()
    kl = [value for _, value in free.logger.series("train_optim/approx_kl")]
    assert len(kl) == 18 and kl[0] == kl[6] == kl[12] == 0.0
    done = next(i for i in range(2, 6) if kl[i] > max(kl[:i])) + 1
    target = kl[done - 1] * 0.999  # the last of these updates alone is beyond it
    assert max(kl[: done - 1]) < target and done < 6

    trainer = make_trainer(ppo_epochs=3, target_kl=target, max_steps=1)
    trainer.fit()
    assert trainer.ppo_optimization_step == trainer.scheduler.num_steps == done
    assert trainer.logger.series("train_optim/updates_skipped") == [(done, 6 - done)]
    assert [value for _, value in trainer.logger.series("train_optim/approx_kl")] == kl[:done]
    # The update is brought to its end.
    assert trainer.events[-2:] == ["finish_training", "critic_train_result"]

    trainer = make_trainer(ppo_epochs=2, target_kl=0.0)
    trainer.fit()  # only the first update of each rollout finds no distance
    skipped = [value for _, value in trainer.logger.series("train_optim/updates_skipped")]
    assert trainer.step == 3 and trainer.ppo_optimization_step == 6 and skipped == [2, 2, 2]

    trainer = make_trainer(ppo_epochs=3, target_kl=1e9)
    trainer.fit()
    assert trainer.model.weight == free.model.weight
    assert trainer.logger.series("train_optim/updates_skipped") == [(6, 0), (12, 0), (18, 0)]
    assert free.logger.series("train_optim/updates_skipped") == []


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"use_absolute_kl": True, "kl_estimator": "k1"}, None),
        ({"use_absolute_kl": True, "initial_policy_kl_penalty": 0.0}, None),
        ({"use_absolute_kl": True}, "use_absolute_kl=True: "),
        ({"kl_estimator": "k3"}, "kl_estimator=k3: "),
    ],
)
def test_a_kl_in_the_reward_that_does_not_regularise_is_named(monkeypatch, changes, named):
    said = []
    monkeypatch.setattr(ppo.logging, "warning", said.append)
    make_trainer(**changes)
    assert [text.startswith(f"trainer.ppo.{named}") for text in said] == [True] * bool(named)


def test_kl_in_the_loss_brings_the_references_log_probs():
    trainer = make_trainer(initial_policy_kl_penalty=0.0, kl_loss_coef=0.1, kl_estimator="k3")
    trainer.fit()
    for batch in trainer.model.batches:
        on_responses = batch["mask"].bool()
        reference = trainer.model._logprobs(batch["response_tokens"], 0.0)
        found, wanted = batch["init_logprobs"][on_responses], reference[on_responses]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert (batch["init_logprobs"][~on_responses] == 0).all()
    # Measured, but not in the reward.
    assert dict(trainer.logger.series("train_rollouts/init_policy_kl"))[2] > 0
    plain, name = make_trainer(initial_policy_kl_penalty=0.0), "train_rollouts/rewards_with_kl"
    plain.fit()
    assert plain.logger.series(name) == trainer.logger.series(name)
    assert "init_logprobs" not in plain.model.batches[0] and "init_logprobs" not in plain.events


# ------------------------------------------------------------------------------- by hand


def test_reward_sits_at_the_last_response_column():
    values = torch.zeros(3, 5)
    per_token = calculate_ppo_rewards(
        values, torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([6, 3, 1]), 0.0
    )
    assert per_token.tolist() == [[0, 0, 0, 0, 1], [0, 2, 0, 0, 0], [3, 0, 0, 0, 0]]
    # A factor of 0 does not read the KL at all.
    plain = calculate_ppo_rewards(values, torch.ones(3), torch.full((3,), 4), values + NAN)
    assert not plain.isnan().any()


def test_mask_has_as_many_ones_as_response_tokens():
    prompt, total = torch.tensor([1, 3, 4]), torch.tensor([5, 3, 9])
    mask = create_mask(torch.empty(3, 8), prompt, total)
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 1, 1, 1, 1, 1]]


def _python_splitmix64(state):
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_sample_seeds_against_unbounded_integers():
    # First output of the published generator for seed 0.
    assert _python_splitmix64(0) == 0xE220A8397B1DCDAF
    idx = torch.tensor([0, 1, 5, 2**40])
    for seed, step in [(1234, 0), (0, 7), (2**31 - 1, 10**6)]:
        state = _python_splitmix64((_python_splitmix64(seed) + step) % 2**64)
        expected = [_python_splitmix64((state + i) % 2**64) % 2**63 for i in idx.tolist()]
        assert sample_seeds(seed, step, idx).tolist() == expected
