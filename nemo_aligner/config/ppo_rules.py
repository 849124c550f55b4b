# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of PPO's variants (docs/ppo.md) cannot work, alone or together; called by
`config_rules.py`.
"""

from nemo_aligner.core.errors import ConfigError

ADVANTAGE_ESTIMATORS = ("gae", "reinforce_plus_plus", "rloo", "grpo")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
PPO, MODEL = "trainer.ppo.", "model.ppo."


def check_ppo_variants(values) -> None:
    """Refuse variants that cannot work.

    Args:
        values: `config_values.Values` of the configuration of a PPO actor.

    Raises:
        ConfigError: with the value and the remedy.
    """
    _check_ranges(values)
    _check_adaptive_kl(values)
    _check_answers(values)
    _check_target_kl(values)
    estimator = values.get(PPO + "advantage_estimator", "gae")
    if estimator != "gae":
        return _check_critic_free(values, estimator)
    for key in ("ip", "port"):
        if values.is_null(f"remote_critic_rm.critic.{key}"):
            raise ConfigError(
                f"remote_critic_rm.critic.{key} is not set, but "
                "trainer.ppo.advantage_estimator=gae needs a critic; "
                "give the address of its server."
            )


def _check_ranges(v) -> None:
    v.choice(PPO + "advantage_estimator", ADVANTAGE_ESTIMATORS)
    v.choice(PPO + "kl_estimator", KL_ESTIMATORS)
    v.choice(MODEL + "kl_loss_estimator", KL_ESTIMATORS)
    v.number(PPO + "critic_gae_lambda", 0, 1)
    for key in (
        "target_kl",
        "advantage_clip",
        "reward_clip",
        "adaptive_kl.target",
        "adaptive_kl.horizon",
    ):
        v.number(PPO + key, 0, above=True)
    v.number(PPO + "overlong_penalty_factor", 0, above=True)
    v.number(MODEL + "kl_loss_coef", 0)
    v.number(MODEL + "dual_clip", 1, above=True)
    buffer, longest = (
        v.whole(PPO + "overlong_buffer_len", 0),
        v.get(MODEL + "length_params.max_length"),
    )
    if buffer and longest and buffer > longest:
        raise ConfigError(
            f"trainer.ppo.overlong_buffer_len={buffer} is more than the {longest} tokens an "
            "answer can have "
            f"(model.ppo.length_params.max_length); set it to at most {longest}."
        )


def _check_adaptive_kl(v) -> None:
    if not v.get(PPO + "adaptive_kl.enable", False):
        return
    for key in ("target", "horizon"):
        if v.get(f"{PPO}adaptive_kl.{key}") is None:
            raise ConfigError(
                f"trainer.ppo.adaptive_kl.{key} is not set, but adaptive_kl.enable=True needs it; "
                "give a number, or "
                "switch adaptive_kl off."
            )
    if not v.get(PPO + "initial_policy_kl_penalty", 0):
        raise ConfigError(
            "trainer.ppo.adaptive_kl.enable=True multiplies "
            "trainer.ppo.initial_policy_kl_penalty=0, which stays 0; "
            "set a small penalty to start from, for example 0.01, or switch adaptive_kl off."
        )
    rows, horizon = _rows(v), v.get(PPO + "adaptive_kl.horizon")
    if rows and horizon and horizon <= 0.2 * rows:
        raise ConfigError(
            f"trainer.ppo.adaptive_kl.horizon={horizon} is too short for {rows} answers per PPO "
            "step: one step could "
            f"make the penalty negative; set it above {0.2 * rows:g}, better to {10 * rows} or "
            "more."
        )


def _check_answers(v) -> None:
    answers = v.whole(MODEL + "num_rollouts_per_prompt", 1) or 1
    estimator, sampling = v.get(PPO + "advantage_estimator", "gae"), MODEL + "sampling_params."
    if estimator in ("rloo", "grpo") and answers == 1:
        raise ConfigError(
            f"trainer.ppo.advantage_estimator={estimator} compares the answers to a prompt, but "
            "model.ppo.num_rollouts_per_prompt=1; set it to 2 or more (4 to 16 are common)."
        )
    if answers > 1 and (v.get(sampling + "use_greedy") or v.get(sampling + "top_k") == 1):
        raise ConfigError(
            f"model.ppo.num_rollouts_per_prompt={answers} answers to a prompt would be the same "
            "with "
            "sampling_params.use_greedy=True or top_k=1; sample, or draw one answer."
        )


def _check_target_kl(v) -> None:
    rows, batch, epochs = _rows(v), v.get("model.global_batch_size"), v.get(PPO + "ppo_epochs", 1)
    if v.get(PPO + "target_kl") is not None and rows and batch and rows // batch * epochs == 1:
        raise ConfigError(
            f"trainer.ppo.target_kl={v.get(PPO + 'target_kl')} ends the updates on a rollout "
            "early, but there is only "
            f"one: {rows} answers per PPO step are one model.global_batch_size={batch}, in one "
            "pass. Set target_kl to "
            "null, or a smaller global_batch_size or more ppo_epochs."
        )


def _check_critic_free(v, estimator: str) -> None:
    name = f"trainer.ppo.advantage_estimator={estimator}"
    remote = "remote_critic_rm.combine_rm_and_critic_server"
    if v.get(remote, True):
        raise ConfigError(
            f"{name} needs no critic, so the rewards cannot come from its server ({remote}=True); "
            f"set {remote}=False "
            "and the address of a reward server in remote_critic_rm.reward_model (or "
            "reward_models)."
        )
    if v.get(PPO + "critic_warmup_steps", 0):
        raise ConfigError(
            f"trainer.ppo.critic_warmup_steps={v.get(PPO + 'critic_warmup_steps')} would train a "
            f"critic, but {name} "
            "has none; set it to 0."
        )
    if v.get(PPO + "critic_gae_lambda") is not None:
        raise ConfigError(
            f"trainer.ppo.critic_gae_lambda={v.get(PPO + 'critic_gae_lambda')} is of what a "
            f"critic learns, but {name} "
            "has none; set it to null."
        )
    if v.get(PPO + "whiten_rewards", False):
        raise ConfigError(
            "trainer.ppo.whiten_rewards=True rescales the rewards of single tokens, whose sum "
            "would then depend on "
            f"the length of an answer, and {name} compares sums; set it to False (its advantages "
            "are scaled anyway)."
        )
    if estimator in ("rloo", "grpo") and v.get(PPO + "discount_factor", 1.0) != 1.0:
        raise ConfigError(
            f"trainer.ppo.discount_factor={v.get(PPO + 'discount_factor')} has no part in {name}, "
            "which "
            "compares whole answers; set it to 1.0."
        )


def _rows(v) -> int | None:
    """Answers per PPO step."""
    prompts = v.whole(MODEL + "num_rollout_samples", 1)
    return prompts and prompts * (v.whole(MODEL + "num_rollouts_per_prompt", 1) or 1)
