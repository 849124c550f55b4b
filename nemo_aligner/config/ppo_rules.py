# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules across the keys of PPO, which are in `jobs/actors.py`: variants that cannot work."""

from nemo_aligner.config.rollout_rules import (
    check_compares_responses,
    check_policy,
    check_remote,
    check_responses_differ,
)
from nemo_aligner.config.server_rules import (
    REWARD_ADDRESS,
    check_source_of_rewards,
    read_teachers,
)
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import (
    ADVANTAGE_ESTIMATORS,
    DUAL_CLIPPED,
    LOSSES_OF_RESPONSES,
    RANGED,
    AdvantageEstimator,
)

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
    check_policy(v, "ppo", "remote_critic_rm", dp, PER_PROMPT)
    check_ppo_variants(v)
    check_source_of_rewards(v.get("remote_critic_rm"))
    if v.get(PPO + "teacher_kl_coef"):
        check_remote(v, "remote_teacher")
        read_teachers(v.get("remote_teacher"))


def check_ppo_variants(v: Values) -> None:
    """Raise `ConfigError` for variants of PPO that cannot work."""
    estimator = v.get(PPO + "advantage_estimator")
    kind, name = ADVANTAGE_ESTIMATORS[estimator], f"{PPO}advantage_estimator={estimator}"
    responses, batch = v.size(PER_PROMPT), v.size("model.global_batch_size")
    samples = v.size(MODEL + "num_rollout_samples") * responses
    _check_rewards_of_steps(v, name)
    _check_dynamic_sampling(v, name, kind)
    _check_policy_loss(v, kind.compares_responses and not v.get(PPO + "teacher_kl_coef"))
    _check_corrections(v)
    _check_adaptive_kl(v, samples)
    if kind.compares_responses:
        check_compares_responses(name, PER_PROMPT, responses)
    check_responses_differ(v, MODEL, responses)
    if samples // batch * v.get(PPO + "ppo_epochs") == 1:
        for setting in ("target_kl", "covariance.rule"):
            value = v.get(PPO + setting)
            if value not in (None, "clip"):
                raise ConfigError(
                    f"{PPO}{setting}={value} acts from the second update of a rollout on, but "
                    f"there is only one: {samples} samples per PPO step are one "
                    f"model.global_batch_size={batch}, in one epoch. Set it to null, or a smaller "
                    "global_batch_size or more ppo_epochs."
                )
    if not kind.needs_critic:
        _check_critic_free(v, name, kind)
        return
    for part in ("ip", "port"):
        if v.is_null(f"remote_critic_rm.critic.{part}"):
            raise ConfigError(
                f"remote_critic_rm.critic.{part} is not set, but {name} needs a critic; give the "
                "address of its server."
            )


def _check_rewards_of_steps(v: Values, name: str) -> None:
    """Check rewards of steps and the penalty on long responses; `name`: of the estimator."""
    buffer, longest = v.get(PPO + "overlong_buffer_len"), v.get(MODEL + "length_params.max_length")
    of_steps = v.get(PPO + "process_rewards") == "steps"
    if of_steps and not name.endswith("=grpo"):
        raise ConfigError(
            f"{PPO}process_rewards=steps normalizes the rewards of steps within the responses to "
            f"a prompt, as grpo does, but {name}; set process_rewards=sum."
        )
    if of_steps and buffer:
        raise ConfigError(
            f"{PPO}overlong_buffer_len={buffer} is a penalty at the last token of a response. "
            f"With {PPO}process_rewards=steps it would count only where that token ends a step; "
            "set one of them back."
        )
    if buffer > longest:
        raise ConfigError(
            f"{PPO}overlong_buffer_len={buffer} is more than the {longest} tokens that a response "
            f"can have ({MODEL}length_params.max_length); set it to at most {longest}."
        )


def _check_dynamic_sampling(v: Values, name: str, kind: AdvantageEstimator) -> None:
    """Check that prompts with equal rewards have no signal; `name`: of the estimator."""
    rounds, signal = v.get(PPO + "dynamic_sampling_rounds"), None
    if kind.compares_parts or not kind.compares_responses:
        signal = name
    elif v.get(PPO + "process_rewards") == "steps":
        signal = f"{PPO}process_rewards=steps"
    elif v.get(PPO + "teacher_kl_coef"):
        signal = f"{PPO}teacher_kl_coef={v.get(PPO + 'teacher_kl_coef')}"
    if rounds and signal:
        raise ConfigError(
            f"{PPO}dynamic_sampling_rounds={rounds} replaces prompts whose responses all have the "
            f"same reward, but with {signal} they have a signal too; set it to 0, or use grpo, "
            "dr_grpo or rloo with process_rewards=sum and without a teacher."
        )


def _check_policy_loss(v: Values, compares_responses: bool) -> None:
    """Check that the policy loss fits the advantages, and reads what is given."""
    loss, own = v.get(MODEL + "policy_loss"), v.get(PPO + "loss")
    name, reduction = f"{MODEL}policy_loss={loss}", v.get(MODEL + "loss_reduction")
    if own is not None and loss != "clip":
        raise ConfigError(f"{PPO}loss={own} takes the place of {name}; leave one of them out.")
    if loss in LOSSES_OF_RESPONSES and reduction != "sequence":
        raise ConfigError(
            f"{name} is one value of a response, and {MODEL}loss_reduction={reduction} would "
            "weigh it by the number of tokens; set loss_reduction=sequence."
        )
    whole = compares_responses and v.get(PPO + "process_rewards") != "steps"
    if loss == "gmpo" and not (whole and v.get(PPO + "advantages") is None):
        raise ConfigError(
            f"{name} gives all tokens of a response the mean of their advantages; with "
            "advantages of single tokens that is another objective. Use grpo, dr_grpo or rloo, "
            "without process_rewards=steps, advantages of your own and teacher_kl_coef, or "
            "policy_loss=gspo."
        )
    for setting, losses in (("dual_clip", DUAL_CLIPPED), ("ratio_eps_high", RANGED)):
        value = v.get(MODEL + setting)
        if value is not None and loss not in losses:
            raise ConfigError(
                f"{MODEL}{setting}={value} is for policy_loss={', '.join(losses)}, not {loss}; "
                "set it to null."
            )


def _check_corrections(v: Values) -> None:
    """Check the ranges of the two corrections, and that there is something to correct."""
    correction, covariance = PPO + "sampler_correction.", PPO + "covariance."
    for name in (correction, covariance):
        low, high = v.get(name + "low"), v.get(name + "high")
        if low >= high:
            raise ConfigError(f"{name}low={low} must be below {name}high={high}.")
    levels, rule = (correction + "weights", correction + "reject"), covariance + "rule"
    for name in levels:
        if v.get(name) is not None and v.get(MODEL + "rollout_logprobs") == "sampler":
            raise ConfigError(
                f"{name}={v.get(name)} compares the sampler's log-probs with those of a pass of "
                f"the trainer, which {MODEL}rollout_logprobs=sampler leaves out; set it to "
                "recompute."
            )
    of_tokens = {rule: "clip", **dict.fromkeys(levels, "token")}
    for name, value in of_tokens.items():
        if v.get(name) == value and v.get(MODEL + "policy_loss") == "gmpo":
            raise ConfigError(
                f"{name}={value} gives single tokens of a response other advantages, of which "
                f"{MODEL}policy_loss=gmpo takes the mean; set it to null, or use policy_loss=gspo."
            )


def _check_adaptive_kl(v: Values, samples: int) -> None:
    """Check the settings that move the penalty; `samples`: of a step."""
    if not v.get(PPO + "adaptive_kl.enable"):
        return
    for name in ("target", "horizon"):
        if v.get(f"{PPO}adaptive_kl.{name}") is None:
            raise ConfigError(
                f"{PPO}adaptive_kl.{name} is not set, but adaptive_kl.enable=True needs it; give "
                "a number, or switch adaptive_kl off."
            )
    if not v.get(PPO + "initial_policy_kl_penalty"):
        raise ConfigError(
            f"{PPO}adaptive_kl.enable=True multiplies {PPO}initial_policy_kl_penalty=0, which "
            "stays 0; set a small penalty to start from, for example 0.01, or switch adaptive_kl "
            "off."
        )
    horizon = v.get(PPO + "adaptive_kl.horizon")
    if horizon <= 0.2 * samples:
        raise ConfigError(
            f"{PPO}adaptive_kl.horizon={horizon} is too short for {samples} samples per PPO step: "
            f"one step could make the penalty negative; set it above {0.2 * samples:g}, better to "
            f"{10 * samples} or more."
        )


def _check_critic_free(v: Values, name: str, kind: AdvantageEstimator) -> None:
    """Check an estimator that needs no critic, called `name`."""
    combined, served = (
        f"remote_critic_rm.{key}" for key in ("combine_rm_and_critic_server", "reward_model")
    )
    if v.get(combined):
        raise ConfigError(
            f"{name} needs no critic, so the rewards cannot come from its server "
            f"({combined}=True); leave that unset, and set {PPO}reward_fn, or the address of a "
            f"reward server in {served} (or reward_models)."
        )
    if kind.compares_parts and v.is_null("remote_critic_rm.reward_models"):
        raise ConfigError(
            f"{name} normalizes several rewards apart, which remote_critic_rm.reward_models "
            "names; set it, or use grpo."
        )
    if kind.of_teacher and not v.get(PPO + "teacher_kl_coef"):
        raise ConfigError(
            f"{name} learns from a teacher alone, and {PPO}teacher_kl_coef=0 leaves that out; "
            "set it to 1, and the teacher's address in remote_teacher."
        )
    if kind.of_teacher and v.get(served) != REWARD_ADDRESS:
        raise ConfigError(
            f"{served}={v.get(served)} is not asked with {name}, which does not learn from "
            "rewards; to have them measured, name it in remote_critic_rm.reward_models."
        )
    why = {  # a setting must be off
        "critic_warmup_steps": f"would train a critic, but {name} has none",
        "critic_gae_lambda": f"is for the returns that a critic learns, but {name} has none",
        "whiten_rewards": "rescales the rewards of single tokens, whose sum would then depend on "
        f"the length of a response, and {name} compares sums, whose advantages are scaled anyway",
    }
    if kind.compares_parts:
        of_parts = f"has no part in {name}, which reads the rewards of the ensemble alone"
        why |= dict.fromkeys(_SHAPING, of_parts)
        why["initial_policy_kl_penalty"] += " (kl_loss_coef works)"
    if kind.of_teacher:
        why |= dict.fromkeys(_SHAPING, f"is part of the reward, which {name} does not learn from")
    if kind.compares_responses:
        why["discount_factor"] = f"has no part in {name}, which compares whole responses"
    for setting, reason in why.items():
        if v.get(PPO + setting) != _OFF[setting]:
            off = "null" if _OFF[setting] is None else _OFF[setting]
            raise ConfigError(f"{PPO}{setting}={v.get(PPO + setting)} {reason}; set it to {off}.")
