# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules across the keys of PPO (`jobs/actors.py`): variants that cannot work, `ConfigError`."""

from nemo_aligner.config import rollout_rules, server_rules
from nemo_aligner.config.values import Values
from nemo_aligner.core import estimators
from nemo_aligner.core.errors import ConfigError

PPO, MODEL = "trainer.ppo.", "model.ppo."
PER_PROMPT = MODEL + "num_rollouts_per_prompt"
# Values with which settings of `trainer.ppo` do nothing; first those that shape a reward.
_SHAPING = {
    "initial_policy_kl_penalty": 0,
    "overlong_buffer_len": 0,
    "normalize_rewards": False,
    "reward_clip": None,
}
_OFF = {
    **_SHAPING,
    "critic_warmup_steps": 0,
    "critic_gae_lambda": None,
    "whiten_rewards": False,
    "discount_factor": 1.0,
}


def check_ppo(v: Values, dp: dict[str, int], ranks: int) -> None:
    rollout_rules.check_policy(v, "ppo", "remote_critic_rm", dp, PER_PROMPT)
    check_ppo_variants(v)
    server_rules.check_source_of_rewards(v.get("remote_critic_rm"))
    if v.get(PPO + "teacher_kl_coef"):
        rollout_rules.check_remote(v, "remote_teacher")
        server_rules.read_teachers(v.get("remote_teacher"))


def check_ppo_variants(v: Values) -> None:
    estimator = v.get(PPO + "advantage_estimator")
    kind, name = (
        estimators.ADVANTAGE_ESTIMATORS[estimator],
        f"{PPO}advantage_estimator={estimator}",
    )
    responses, batch = v.size(PER_PROMPT), v.size("model.global_batch_size")
    samples = v.size(MODEL + "num_rollout_samples") * responses
    _check_rewards_of_steps(v, name)
    _check_dynamic_sampling(v, name, kind)
    _check_policy_loss(v, kind.compares_responses and not v.get(PPO + "teacher_kl_coef"))
    _check_corrections(v)
    _check_adaptive_kl(v, samples)
    if kind.compares_responses:
        rollout_rules.check_compares_responses(name, PER_PROMPT, responses)
    rollout_rules.check_responses_differ(v, MODEL, responses)
    if samples // batch * v.get(PPO + "ppo_epochs") == 1:
        for setting in ("target_kl", "covariance.rule"):
            if v.get(PPO + setting) not in (None, "clip"):
                raise v.error(
                    PPO + setting,
                    "acts from the second update of a rollout on, but there is only one: its "
                    f"{samples} samples are one model.global_batch_size={batch}, in one epoch. "
                    "Set it to null, or a smaller global_batch_size or more ppo_epochs.",
                )
    if not kind.needs_critic:
        _check_critic_free(v, name, kind)
        return
    for part in ("ip", "port"):
        key = f"remote_critic_rm.critic.{part}"
        if v.is_null(key):
            raise ConfigError(f"{key} is not set, but {name} needs a critic; give its address.")


def _check_rewards_of_steps(v: Values, name: str) -> None:
    """Check rewards of steps and the penalty on long responses; `name`: of the estimator."""
    buffer, longest = v.get(PPO + "overlong_buffer_len"), v.get(MODEL + "length_params.max_length")
    of_steps = v.get(PPO + "process_rewards") == "steps"
    if of_steps and not name.endswith("=grpo"):
        raise v.error(PPO + "process_rewards", f"is for grpo, but {name}; set it to sum.")
    if of_steps and buffer:
        raise v.error(
            PPO + "overlong_buffer_len",
            "is a penalty at the last token of a response, which ends no step as "
            f"{PPO}process_rewards=steps needs it; set one of them back.",
        )
    if buffer > longest:
        raise v.error(
            PPO + "overlong_buffer_len",
            f"is longer than {MODEL}length_params.max_length; set it to at most {longest}.",
        )


def _check_dynamic_sampling(v: Values, name: str, kind: estimators.AdvantageEstimator) -> None:
    """Check that prompts with equal rewards have no signal; `name`: of the estimator."""
    signal, coefficient = None, v.get(PPO + "teacher_kl_coef")
    if kind.compares_parts or not kind.compares_responses:
        signal = name
    elif v.get(PPO + "process_rewards") == "steps":
        signal = f"{PPO}process_rewards=steps"
    elif coefficient:
        signal = f"{PPO}teacher_kl_coef={coefficient}"
    if v.get(PPO + "dynamic_sampling_rounds") and signal:
        raise v.error(
            PPO + "dynamic_sampling_rounds",
            "replaces prompts whose responses all have the same reward, but with "
            f"{signal} they have a signal too; set it to 0, or use grpo, dr_grpo or rloo with "
            "process_rewards=sum and without a teacher.",
        )


def _check_policy_loss(v: Values, compares_responses: bool) -> None:
    """Check that the policy loss fits the advantages, and reads what is given."""
    loss, own = v.get(MODEL + "policy_loss"), v.get(PPO + "loss")
    reduction = v.get(MODEL + "loss_reduction")
    if own is not None and loss != "clip":
        raise v.error(
            PPO + "loss", f"takes the place of {MODEL}policy_loss={loss}; leave one of them out."
        )
    if loss in estimators.LOSSES_OF_RESPONSES and reduction != "sequence":
        raise v.error(
            MODEL + "policy_loss",
            f"is one value of a response, and {MODEL}loss_reduction={reduction} would weigh it by "
            "the number of tokens; set loss_reduction=sequence.",
        )
    whole = compares_responses and v.get(PPO + "process_rewards") != "steps"
    if loss == "gmpo" and not (whole and v.get(PPO + "advantages") is None):
        raise v.error(
            MODEL + "policy_loss",
            "takes one advantage for a whole response. Use grpo, dr_grpo or rloo, without "
            "process_rewards=steps, own advantages and teacher_kl_coef, or policy_loss=gspo.",
        )
    for setting, losses in (
        ("dual_clip", estimators.DUAL_CLIPPED),
        ("ratio_eps_high", estimators.RANGED),
    ):
        if v.has(MODEL + setting) and loss not in losses:
            raise v.error(
                MODEL + setting,
                f"is for policy_loss={', '.join(losses)}, not {loss}; set it to null.",
            )


def _check_corrections(v: Values) -> None:
    """Check the ranges of the two corrections, and that there is something to correct."""
    correction, covariance = PPO + "sampler_correction.", PPO + "covariance."
    for name in (correction, covariance):
        if v.get(name + "low") >= v.get(name + "high"):
            raise v.error(name + "low", f"must be below {name}high={v.get(name + 'high')}.")
    levels = (correction + "weights", correction + "reject")
    for name in levels:
        if v.has(name) and v.get(MODEL + "rollout_logprobs") == "sampler":
            raise v.error(
                name,
                "compares the sampler's log-probs with the trainer's, which "
                f"{MODEL}rollout_logprobs=sampler leaves out; set it to recompute.",
            )
    of_tokens = {covariance + "rule": "clip", **dict.fromkeys(levels, "token")}
    for name, value in of_tokens.items():
        if v.get(name) == value and v.get(MODEL + "policy_loss") == "gmpo":
            raise v.error(
                name,
                "gives tokens of a response other advantages, of which "
                f"{MODEL}policy_loss=gmpo takes the mean; set it to null, or use gspo.",
            )


def _check_adaptive_kl(v: Values, samples: int) -> None:
    section = PPO + "adaptive_kl."
    if not v.get(section + "enable"):
        return
    for name in (section + "target", section + "horizon"):
        if not v.has(name):
            raise ConfigError(f"{name} is not set; adaptive_kl.enable=True needs a number.")
    if not v.get(PPO + "initial_policy_kl_penalty"):
        raise v.error(
            section + "enable",
            f"multiplies {PPO}initial_policy_kl_penalty=0, which stays 0; set a small penalty to "
            "start from, for example 0.01, or switch adaptive_kl off.",
        )
    if v.get(section + "horizon") <= 0.2 * samples:
        raise v.error(
            section + "horizon",
            f"is too short for {samples} samples per PPO step, of which one could make the "
            f"penalty negative; set it above {0.2 * samples:g}, better to {10 * samples} or more.",
        )


def _check_critic_free(v: Values, name: str, kind: estimators.AdvantageEstimator) -> None:
    combined, served = (
        f"remote_critic_rm.{key}" for key in ("combine_rm_and_critic_server", "reward_model")
    )
    if v.get(combined):
        raise v.error(
            combined,
            f"has the critic's server give rewards, but {name} has no critic; unset it, and set "
            f"{PPO}reward_fn, {served} or reward_models.",
        )
    if kind.compares_parts and v.is_null("remote_critic_rm.reward_models"):
        raise ConfigError(f"{name} needs the rewards of remote_critic_rm.reward_models; set it.")
    if kind.of_teacher and not v.get(PPO + "teacher_kl_coef"):
        raise ConfigError(
            f"{name} learns from a teacher alone, and {PPO}teacher_kl_coef=0 leaves that out; "
            "set it to 1, and the teacher's address in remote_teacher."
        )
    if kind.of_teacher and v.get(served) != server_rules.REWARD_ADDRESS:
        raise v.error(
            served,
            f"is not asked with {name}; name it in remote_critic_rm.reward_models.",
        )
    why = {  # a setting must be off
        "critic_warmup_steps": f"would train a critic, but {name} has none",
        "critic_gae_lambda": f"is for the returns that a critic learns, but {name} has none",
        "whiten_rewards": "rescales rewards of single tokens, so that their sum depends on the "
        f"length of a response, and {name} compares sums",
    }
    if kind.compares_parts:
        why |= dict.fromkeys(_SHAPING, f"has no part in {name}, which reads the ensemble alone")
        why["initial_policy_kl_penalty"] += " (kl_loss_coef works)"
    if kind.of_teacher:
        why |= dict.fromkeys(_SHAPING, f"is part of the reward, which {name} does not learn from")
    if kind.compares_responses:
        why["discount_factor"] = f"has no part in {name}, which compares whole responses"
    for setting, reason in why.items():
        if v.get(PPO + setting) != _OFF[setting]:
            off = "null" if _OFF[setting] is None else _OFF[setting]
            raise v.error(PPO + setting, f"{reason}; set it to {off}.")
