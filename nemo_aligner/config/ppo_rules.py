# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot work for a PPO actor, above all for the variants of PPO (docs/ppo.md)."""

import os

from nemo_aligner.config.rollout_rules import (
    check_compares_responses,
    check_policy,
    check_responses_differ,
)
from nemo_aligner.config.server_rules import check_source_of_rewards
from nemo_aligner.config.values import Values, require_multiple
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS

PPO, MODEL = "trainer.ppo.", "model.ppo."


def check_ppo_actor(values: Values, dp: dict[str, int]) -> None:
    """Check the configuration of a PPO actor.

    Args:
        dp: `{"data parallel size": DP}`; empty while it is not known.
    """
    v = values
    check_policy(v, "ppo", "remote_critic_rm", dp)
    prompts = v.size(MODEL + "num_rollout_samples")
    responses = v.size(MODEL + "num_rollouts_per_prompt")
    name = MODEL + "num_rollout_samples"
    name += f" x num_rollouts_per_prompt={responses}" if responses > 1 else ""
    batch = v.size("model.global_batch_size")
    require_multiple(name, prompts * responses, {"model.global_batch_size": batch})
    check_ppo_variants(v)
    for key in ("loss", "advantages"):
        named = v.get(PPO + key)
        if named is not None and not os.path.isfile(str(named).rpartition(".py:")[0] + ".py"):
            raise ConfigError(
                f"{PPO}{key}={named!r} must be path/to/file.py:function of a file that exists."
            )
    check_source_of_rewards(v.get("remote_critic_rm"))


def check_ppo_variants(values: Values) -> None:
    """Refuse variants of PPO that cannot work.

    Raises:
        ConfigError: with the value and the remedy.
    """
    _check_ranges(values)
    _check_adaptive_kl(values)
    _check_responses(values)
    _check_target_kl(values)
    estimator = values.get(PPO + "advantage_estimator")
    if not ADVANTAGE_ESTIMATORS[estimator].needs_critic:
        _check_critic_free(values, estimator)
        return
    for key in ("ip", "port"):
        if values.is_null(f"remote_critic_rm.critic.{key}"):
            raise ConfigError(
                f"remote_critic_rm.critic.{key} is not set, but "
                f"trainer.ppo.advantage_estimator={estimator} needs a critic; give the address of "
                "its server."
            )


def _check_ranges(v: Values) -> None:
    check_estimator(v.get(PPO + "advantage_estimator"))
    estimator = v.get(PPO + "advantage_estimator")
    if v.get(PPO + "process_rewards") == "steps" and estimator != "grpo":
        raise ConfigError(
            "trainer.ppo.process_rewards=steps normalizes the rewards of steps within the "
            f"responses to a prompt, as grpo does, but trainer.ppo.advantage_estimator="
            f"{estimator}; set process_rewards=sum."
        )
    overlong = v.get(PPO + "overlong_buffer_len")
    if v.get(PPO + "process_rewards") == "steps" and overlong:
        raise ConfigError(
            f"trainer.ppo.overlong_buffer_len={overlong} is a penalty at the last token of a "
            "response. With trainer.ppo.process_rewards=steps it would count only where that "
            "token ends a step; set one of them back."
        )
    buffer = v.get(PPO + "overlong_buffer_len")
    longest = v.get(MODEL + "length_params.max_length")
    if buffer > longest:
        raise ConfigError(
            f"trainer.ppo.overlong_buffer_len={buffer} is more than the {longest} tokens that a "
            "response can have (model.ppo.length_params.max_length); set it to at most "
            f"{longest}."
        )


def _check_adaptive_kl(v: Values) -> None:
    if not v.get(PPO + "adaptive_kl.enable"):
        return
    for key in ("target", "horizon"):
        if v.get(f"{PPO}adaptive_kl.{key}") is None:
            raise ConfigError(
                f"trainer.ppo.adaptive_kl.{key} is not set, but adaptive_kl.enable=True needs it; "
                "give a number, or switch adaptive_kl off."
            )
    if not v.get(PPO + "initial_policy_kl_penalty"):
        raise ConfigError(
            "trainer.ppo.adaptive_kl.enable=True multiplies "
            "trainer.ppo.initial_policy_kl_penalty=0, which stays 0; set a small penalty to start "
            "from, for example 0.01, or switch adaptive_kl off."
        )
    samples, horizon = _samples_per_step(v), v.get(PPO + "adaptive_kl.horizon")
    if horizon <= 0.2 * samples:
        raise ConfigError(
            f"trainer.ppo.adaptive_kl.horizon={horizon} is too short for {samples} samples per "
            "PPO step: one step could make the penalty negative; set it above "
            f"{0.2 * samples:g}, better to {10 * samples} or more."
        )


def _check_responses(v: Values) -> None:
    responses = v.size(MODEL + "num_rollouts_per_prompt")
    estimator = v.get(PPO + "advantage_estimator")
    if ADVANTAGE_ESTIMATORS[estimator].compares_responses:
        name = f"trainer.ppo.advantage_estimator={estimator}"
        check_compares_responses(name, MODEL + "num_rollouts_per_prompt", responses)
    check_responses_differ(v, MODEL, responses)


def check_estimator(estimator: str) -> None:
    """Raise `ConfigError` unless the advantage estimator exists."""
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(
            f"trainer.ppo.advantage_estimator={estimator!r} must be one of "
            f"{', '.join(ADVANTAGE_ESTIMATORS)}."
        )


def _check_target_kl(v: Values) -> None:
    target, samples = v.get(PPO + "target_kl"), _samples_per_step(v)
    batch, epochs = v.get("model.global_batch_size"), v.get(PPO + "ppo_epochs")
    if target is not None and samples // batch * epochs == 1:
        raise ConfigError(
            f"trainer.ppo.target_kl={target} ends the updates on a rollout early, but there is "
            f"only one: {samples} samples per PPO step are one model.global_batch_size={batch}, "
            "in one epoch. Set target_kl to null, or a smaller global_batch_size or more "
            "ppo_epochs."
        )


def _check_critic_free(v: Values, estimator: str) -> None:
    name = f"trainer.ppo.advantage_estimator={estimator}"
    combined = "remote_critic_rm.combine_rm_and_critic_server"
    if v.get(combined):
        raise ConfigError(
            f"{name} needs no critic, so the rewards cannot come from its server "
            f"({combined}=True); leave that unset, and set trainer.ppo.reward_fn, or the address "
            "of a reward server in remote_critic_rm.reward_model (or reward_models)."
        )
    if v.get(PPO + "critic_warmup_steps"):
        raise ConfigError(
            f"trainer.ppo.critic_warmup_steps={v.get(PPO + 'critic_warmup_steps')} would train a "
            f"critic, but {name} has none; set it to 0."
        )
    if v.get(PPO + "critic_gae_lambda") is not None:
        raise ConfigError(
            f"trainer.ppo.critic_gae_lambda={v.get(PPO + 'critic_gae_lambda')} is for the returns "
            f"that a critic learns, but {name} has none; set it to null."
        )
    if v.get(PPO + "whiten_rewards"):
        raise ConfigError(
            "trainer.ppo.whiten_rewards=True rescales the rewards of single tokens, whose sum "
            f"would then depend on the length of a response, and {name} compares sums; set it to "
            "False (its advantages are scaled anyway)."
        )
    discount = v.get(PPO + "discount_factor")
    if ADVANTAGE_ESTIMATORS[estimator].compares_responses and discount != 1.0:
        raise ConfigError(
            f"trainer.ppo.discount_factor={discount} has no part in {name}, which compares whole "
            "responses; set it to 1.0."
        )


def _samples_per_step(v: Values) -> int:
    prompts = v.size(MODEL + "num_rollout_samples")
    return prompts * v.size(MODEL + "num_rollouts_per_prompt")
