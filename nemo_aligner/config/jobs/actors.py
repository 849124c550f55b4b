# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The actors of PPO, rejection sampling and REINFORCE."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import ABSENT, LARGEST_PORT, Configuration, inert, key, section
from nemo_aligner.config.keys.common import (
    DATALOADER,
    FROM_CHECKPOINT,
    of_actor,
)
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.keys.rollouts import (
    BatchIterator,
    Policy,
    PolicyTrtLlm,
    Remote,
    RemoteRM,
    RemoteTeacher,
    RolloutAlarms,
    RolloutLoop,
    TrtLlm,
)
from nemo_aligner.config.rollout_rules import (
    check_compares_responses,
    check_policy,
    check_remote,
    check_responses_differ,
)
from nemo_aligner.config.server_rules import check_source_of_rewards, read_teachers
from nemo_aligner.config.values import Values, require_multiple
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import (
    ADVANTAGE_ESTIMATORS,
    CORRECTION_LEVELS,
    COVARIANCE_RULES,
    DUAL_CLIPPED,
    KL_ESTIMATORS,
    LOSSES_OF_RESPONSES,
    POLICY_LOSSES,
    PROCESS_REWARDS,
    RANGED,
    ROLLOUT_LOGPROBS,
    AdvantageEstimator,
)


@dataclass
class AdaptiveKL:
    """Moves the weight of the KL.

    Attributes:
        enable, target, horizon: **new**, ppo.md: move `initial_policy_kl_penalty` so that the KL
            of a sample stays near the target
    """

    enable: bool = key(False)
    target: float | None = key(6.0, above=0)
    horizon: float | None = key(10000, above=0)


@dataclass
class SamplerCorrectionKeys:
    """Against a sampler that is not the trainer.

    Attributes:
        weights, cap: **new**, ppo.md: importance weights by the ratio of each `token`, of its
            response (`sequence`) or its geometric mean (`geometric`), at most `cap`; null: none
        reject, low, high: **new**, ppo.md: nothing is learned from what has a ratio out of this
            range, by the same names; null: everything counts
    """

    weights: str | None = key(None, choices=CORRECTION_LEVELS)
    cap: float = key(2.0, above=0)
    reject: str | None = key(None, choices=CORRECTION_LEVELS)
    low: float = key(0.5, at_least=0)
    high: float = key(2.0, above=0)


@dataclass
class Covariance:
    """Against the fall of entropy.

    Attributes:
        rule: **new**, ppo.md: tokens with a large covariance of log-prob and advantage have no
            gradient (`clip`) or a KL to the policy that generated (`kl`); null: off
        fraction: **new**: of the response tokens of a rollout
        low, high: **new**, with `clip`: range of the covariances among which they are drawn
        kl_coef: **new**, with `kl`: weight of the KL
    """

    rule: str | None = key(None, choices=COVARIANCE_RULES)
    fraction: float = key(0.0002, above=0, at_most=1)
    low: float = key(1.0)
    high: float = key(5.0)
    kl_coef: float = key(1.0, above=0)


@dataclass
class PPOAlarms(RolloutAlarms):
    """Alarms of PPO.

    Attributes:
        sampling_mismatch, first_update_kl, clip_fraction, explained_variance: **new**: thresholds
            of the alarms, see [metrics.md](metrics.md); null switches one off
    """

    sampling_mismatch: float | None = key(0.05, above=0)
    first_update_kl: Any = key(0.001)
    clip_fraction: float | None = key(0.3, at_least=0, at_most=1)
    explained_variance: float | None = key(-0.2, at_most=1)


@dataclass
class PPOLoop(RolloutLoop):
    """PPO.

    Attributes:
        critic_warmup_steps: rollouts before step 0 that train only the critic
        ppo_epochs: **new**: passes over one rollout
        initial_policy_kl_penalty: weight of the KL to the reference policy in the reward; 0: no
            reference policy
        advantage_estimator: **new**: `gae` (with a critic), or without one `reinforce_plus_plus`,
            `rloo`, `grpo`, `dr_grpo`, `gdpo`, or `teacher` alone; see [ppo.md](ppo.md) for this
            and all that follows marked "ppo.md"
        kl_estimator: **new**, ppo.md: `k1`, `abs`, `k2` or `k3`; null: `k1`, or `abs` with
            `use_absolute_kl`
        use_absolute_kl: True, as in NeMo-Aligner's files: the KL in the reward is the absolute
            value of each token's log-ratio. It keeps its meaning, with a warning: it does not
            hold the policy to the reference ([measured](ppo.md#which-kl-regularises))
        discount_factor, gae_lambda: of generalised advantage estimation
        critic_gae_lambda: **new**, ppo.md: lambda of the returns that the critic learns; null:
            `gae_lambda`
        normalize_advantages: to mean 0 and variance 1 over all response tokens
        advantage_clip, reward_clip, whiten_rewards, normalize_rewards: **new**, ppo.md
        process_rewards: **new**: what `grpo` makes of rewards of steps or tokens: `sum` (their
            sum is that of the response) or `steps` (each compared with the others',
            [rewards](rewards.md#rewards-of-steps-and-tokens))
        dynamic_sampling_rounds: **new**, ppo.md: rollouts drawn more, at most, to replace prompts
            whose responses all have the same reward; 0: none
        overlong_buffer_len, overlong_penalty_factor: **new**, ppo.md: penalty on responses that
            come close to `max_length`
        teacher_kl_coef, teacher_kl_discount: **new**, ppo.md: weight of a
            [served teacher](ppo.md#a-teacher-of-the-policy) in the advantages, 0: none; of what
            it thinks of later tokens
        target_kl: **new**, ppo.md: stop the updates of a rollout early
        loss, advantages: **new**: `path/to/file.py:function`, your own loss of a token in place of
            the clipped one, your own advantages ([ppo.md](ppo.md#your-own-loss-and-advantages))
        ratio_eps, entropy_bonus: clip range of the policy ratio, weight of the entropy;
            `trainer.ppo.*` or `model.ppo.*`
    """

    critic_warmup_steps: int = key(0, at_least=0)
    ppo_epochs: int = key(1, at_least=1)
    initial_policy_kl_penalty: float = key(0.01, at_least=0)
    advantage_estimator: str = key("gae")
    kl_estimator: str | None = key(None, choices=KL_ESTIMATORS)
    adaptive_kl: AdaptiveKL = section()
    use_absolute_kl: bool = key(False)
    discount_factor: float = key(1.0, at_least=0, at_most=1)
    gae_lambda: float = key(0.95, at_least=0, at_most=1)
    critic_gae_lambda: float | None = key(None, at_least=0, at_most=1)
    normalize_advantages: bool = key(True)
    advantage_clip: float | None = key(None, above=0)
    reward_clip: float | None = key(None, above=0)
    whiten_rewards: bool = key(False)
    normalize_rewards: bool = key(False)
    process_rewards: str | None = key("sum", choices=PROCESS_REWARDS)
    dynamic_sampling_rounds: int = key(0, at_least=0)
    overlong_buffer_len: int = key(0, at_least=0)
    overlong_penalty_factor: float = key(1.0, above=0)
    teacher_kl_coef: float = key(0.0, at_least=0)
    teacher_kl_discount: float = key(0.0, at_least=0, at_most=1)
    sampler_correction: SamplerCorrectionKeys = section()
    covariance: Covariance = section()
    target_kl: float | None = key(None, above=0)
    loss: str | None = key(None, code="function")
    advantages: str | None = key(None, code="function")
    ratio_eps: Any = key(0.2)
    entropy_bonus: Any = key(0.0)
    trt_model_dir: Any = inert("/tmp/trt_llm_model")
    trt_llm: TrtLlm = section()
    batch_iterator: BatchIterator = section()
    alarms: PPOAlarms | None = section()


@dataclass
class PPOPolicy(Policy):
    """The actor.

    Attributes:
        num_rollouts_per_prompt: **new**: responses to each prompt; times `num_rollout_samples` a
            multiple of `global_batch_size`
        kl_loss_coef, kl_loss_estimator: **new**, ppo.md: a KL to the reference policy in the
            loss; with `initial_policy_kl_penalty` above 0 both apply, which a warning says
        policy_loss, ratio_eps_high, dual_clip: **new**, ppo.md: what takes the place of the
            clipped loss; the clip range's upper side (null: `ratio_eps`); a bound on the loss of
            unlikely tokens
        train_on_truncated: **new**: truncated responses count in the policy's loss too
        ratio_eps, entropy_bonus: as in `trainer.ppo`
        rollout_logprobs: **new**: where the policy's log-probs of a rollout come from:
            `recompute`, a forward pass like those of training, or `sampler`, generation itself,
            which saves the pass. They differ by rounding: 1e-6 in fp32, in bf16 by 0.008 on
            average, which every ratio of the loss then contains. The first rollout of a run is
            recomputed in any case, to be compared with the reference
    """

    num_rollouts_per_prompt: int = key(1, at_least=1)
    kl_loss_coef: float = key(0.0, at_least=0)
    kl_loss_estimator: str = key("k3", choices=KL_ESTIMATORS)
    policy_loss: str = key("clip", choices=POLICY_LOSSES)
    ratio_eps_high: float | None = key(None, above=0)
    dual_clip: float | None = key(None, above=1)
    train_on_truncated: bool = key(False)
    ratio_eps: float = key("${trainer.ppo.ratio_eps}", above=0)
    entropy_bonus: float = key("${trainer.ppo.entropy_bonus}", at_least=0)
    rollout_logprobs: str = key("recompute", choices=ROLLOUT_LOGPROBS)
    trt_llm: PolicyTrtLlm = section()


@dataclass
class CriticNames:
    """Endpoints of the critic.

    Attributes:
        train, infer, save, status, resume: names of the endpoints
    """

    train: str | None = key("critic_train")
    infer: str | None = key("critic_infer")
    save: str | None = key("critic_save")
    status: Any = key(ABSENT)
    resume: Any = key(ABSENT)


@dataclass
class CriticAddress:
    """The critic's server.

    Attributes:
        ip, port: addresses of the servers
    """

    ip: str | None = key("localhost")
    port: int | None = key(5556, at_least=1, at_most=LARGEST_PORT)
    name: CriticNames = section()


@dataclass
class RemoteCriticRM(Remote):
    """The critic's and the rewards' servers.

    Attributes:
        combine_rm_and_critic_server: the critic server scores rewards too; False: a reward model
            server does. False too where it is not set and `reward_fn`, a judge, an environment or
            `reward_models` is, or there is no critic
    """

    combine_rm_and_critic_server: bool = key(
        "${critic_gives_rewards:${trainer.ppo.advantage_estimator},${trainer.pp"
        "o.reward_fn},${trainer.ppo.judge.url},${model.ppo.environment.path},"
        "${model.ppo.environment.port},${.reward_models}}"
    )
    critic: CriticAddress = section()


@dataclass
class WeightedLines(Lines):
    """The prompts of PPO.

    Attributes:
        sample_weight: **new**: a column of the records with a number of at least 0, by which the
            advantages of the responses to the prompt are multiplied; null: 1
    """

    sample_weight: str | None = key(None)


@dataclass
class PolicyTeachers(RemoteTeacher):
    """The servers of a policy's teachers.

    Attributes:
        teachers, column: **new**: several teachers by their names, each a section with what
            differs of `host`, `port` and `name`; column of the data that names the one of a prompt
    """

    teachers: Any = key(None, free=True)
    column: str | None = key(None)


PPO, MODEL = "trainer.ppo.", "model.ppo."


def check_ppo(v: Values, dp: dict[str, int], ranks: int) -> None:
    check_policy(v, "ppo", "remote_critic_rm", dp)
    responses = v.size(MODEL + "num_rollouts_per_prompt")
    name = MODEL + "num_rollout_samples"
    name += f" x num_rollouts_per_prompt={responses}" if responses > 1 else ""
    batch = v.size("model.global_batch_size")
    require_multiple(name, _samples_per_step(v), {"model.global_batch_size": batch})
    check_ppo_variants(v)
    check_source_of_rewards(v.get("remote_critic_rm"))
    if v.get(PPO + "teacher_kl_coef"):
        check_remote(v, "remote_teacher")
        read_teachers(v.get("remote_teacher"))


def check_ppo_variants(v: Values) -> None:
    """Raise `ConfigError` for variants of PPO that cannot work."""
    estimator = v.get(PPO + "advantage_estimator")
    check_estimator(estimator)
    kind, name = ADVANTAGE_ESTIMATORS[estimator], f"{PPO}advantage_estimator={estimator}"
    _check_rewards_of_steps(v, name)
    _check_dynamic_sampling(v, name, kind)
    _check_policy_loss(v, kind.compares_responses and not v.get(PPO + "teacher_kl_coef"))
    _check_corrections(v)
    _check_adaptive_kl(v)
    responses = v.size(MODEL + "num_rollouts_per_prompt")
    if kind.compares_responses:
        check_compares_responses(name, MODEL + "num_rollouts_per_prompt", responses)
    check_responses_differ(v, MODEL, responses)
    samples, batch = _samples_per_step(v), v.get("model.global_batch_size")
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


def check_estimator(estimator: str) -> None:
    """Raise `ConfigError` unless the advantage estimator exists."""
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(
            f"{PPO}advantage_estimator={estimator!r} must be one of "
            f"{', '.join(ADVANTAGE_ESTIMATORS)}."
        )


def _samples_per_step(v: Values) -> int:
    prompts = v.size(MODEL + "num_rollout_samples")
    return prompts * v.size(MODEL + "num_rollouts_per_prompt")


def _check_rewards_of_steps(v: Values, name: str) -> None:
    """Check rewards of steps and the penalty on long responses; `name`: of the estimator."""
    buffer, longest = v.get(PPO + "overlong_buffer_len"), v.get(MODEL + "length_params.max_length")
    if v.get(PPO + "process_rewards") == "steps" and not name.endswith("=grpo"):
        raise ConfigError(
            f"{PPO}process_rewards=steps normalizes the rewards of steps within the responses to "
            f"a prompt, as grpo does, but {name}; set process_rewards=sum."
        )
    if v.get(PPO + "process_rewards") == "steps" and buffer:
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


def _check_adaptive_kl(v: Values) -> None:
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
    samples, horizon = _samples_per_step(v), v.get(PPO + "adaptive_kl.horizon")
    if horizon <= 0.2 * samples:
        raise ConfigError(
            f"{PPO}adaptive_kl.horizon={horizon} is too short for {samples} samples per PPO step: "
            f"one step could make the penalty negative; set it above {0.2 * samples:g}, better to "
            f"{10 * samples} or more."
        )


def _check_critic_free(v: Values, name: str, kind: AdvantageEstimator) -> None:
    """Check an estimator that needs no critic, called `name`."""
    combined = "remote_critic_rm.combine_rm_and_critic_server"
    if v.get(combined):
        raise ConfigError(
            f"{name} needs no critic, so the rewards cannot come from its server "
            f"({combined}=True); leave that unset, and set {PPO}reward_fn, or the address of a "
            "reward server in remote_critic_rm.reward_model (or reward_models)."
        )
    accepted: dict[str, tuple[Any, str]] = {
        "critic_warmup_steps": (0, f"would train a critic, but {name} has none; set it to 0."),
        "critic_gae_lambda": (
            None,
            f"is for the returns that a critic learns, but {name} has none; set it to null.",
        ),
        "whiten_rewards": (
            False,
            "rescales the rewards of single tokens, whose sum would then depend on the length of "
            f"a response, and {name} compares sums; set it to False (its advantages are scaled "
            "anyway).",
        ),
    }
    if kind.compares_parts:
        if v.is_null("remote_critic_rm.reward_models"):
            raise ConfigError(
                f"{name} normalizes several rewards apart, which remote_critic_rm.reward_models "
                "names; set it, or use grpo."
            )
        beside = f"has no part in {name}, which reads the rewards of the ensemble alone"
        accepted["initial_policy_kl_penalty"] = 0, f"{beside}; set it to 0 (kl_loss_coef works)."
        accepted["overlong_buffer_len"] = 0, f"{beside}; set it to 0."
        accepted["normalize_rewards"] = False, f"{beside}; set it to False."
        accepted["reward_clip"] = None, f"{beside}; set it to null."
    if kind.of_teacher:
        if not v.get(PPO + "teacher_kl_coef"):
            raise ConfigError(
                f"{name} learns from a teacher alone, and {PPO}teacher_kl_coef=0 leaves that out; "
                "set it to 1, and the teacher's address in remote_teacher."
            )
        served = "remote_critic_rm.reward_model"
        if v.get(served) != PPO_JOB.tree["remote_critic_rm"]["reward_model"]:
            raise ConfigError(
                f"{served}={v.get(served)} is not asked with {name}, which does not learn from "
                "rewards; to have them measured, name it in remote_critic_rm.reward_models."
            )
        why = f"is part of the reward, which {name} does not learn from; set it to "
        for key, off in (("initial_policy_kl_penalty", 0), ("overlong_buffer_len", 0)):
            accepted[key] = off, f"{why}{off}."
        accepted["reward_clip"] = None, f"{why}null."
        accepted["normalize_rewards"] = False, f"{why}False."
    if kind.compares_responses:
        why = f"has no part in {name}, which compares whole responses; set it to 1.0."
        accepted["discount_factor"] = 1.0, why
    for setting, (value, why) in accepted.items():
        if v.get(PPO + setting) != value:
            raise ConfigError(f"{PPO}{setting}={v.get(PPO + setting)} {why}")


PPO_JOB = Configuration(
    "gpt_ppo_actor",
    {
        **FROM_CHECKPOINT,
        "trainer.ppo": PPOLoop,
        "remote_critic_rm": RemoteCriticRM,
        "remote_teacher": PolicyTeachers,
        "model": TrainedModel,
        "model.ppo": PPOPolicy,
        "model.peft": PolicyPeft,
        "model.data": WeightedLines,
    },
    of_actor("ppo", "val_rewards"),
    check=check_ppo,
    records="prompt",
)


@dataclass
class RSPolicy(Policy):
    """Rejection sampling.

    Attributes:
        num_rollouts_per_prompt: responses generated to each prompt
        top_n_rollouts: how many of them, those with the highest rewards, are trained on
    """

    num_rollouts_per_prompt: int = key(4, at_least=1)
    top_n_rollouts: int = key(1, at_least=1)


def check_rs(v: Values, dp: dict[str, int], ranks: int) -> None:
    check_policy(v, "rs", "remote_rm", dp)
    prompts = v.size("model.rs.num_rollout_samples")
    drawn = v.size("model.rs.num_rollouts_per_prompt")
    kept = v.size("model.rs.top_n_rollouts")
    check_top_n(kept, drawn)
    check_responses_differ(v, "model.rs.", drawn)
    batch = v.size("model.global_batch_size")
    if prompts * kept % batch:
        raise ConfigError(
            f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={kept} = "
            f"{prompts * kept} kept responses are not a multiple of "
            f"model.global_batch_size={batch}; change one of them."
        )


def check_top_n(top_n_rollouts: int, num_rollouts_per_prompt: int) -> None:
    """Raise `ConfigError` unless rejection sampling keeps at least one response to a prompt and no
    more than it draws.
    """
    if not 1 <= top_n_rollouts <= num_rollouts_per_prompt:
        raise ConfigError(
            f"model.rs.top_n_rollouts={top_n_rollouts} must be from 1 to "
            f"model.rs.num_rollouts_per_prompt={num_rollouts_per_prompt}: no more responses can "
            "be kept than were drawn; lower the first or raise the second."
        )


RS_JOB = Configuration(
    "gpt_rs_actor",
    {
        **FROM_CHECKPOINT,
        "trainer.rs": RolloutLoop,
        "remote_rm": RemoteRM,
        "model": TrainedModel,
        "model.rs": RSPolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    of_actor("rs", "val_global_rewards") | DATALOADER,
    check=check_rs,
    records="prompt",
)


@dataclass
class ReinforceAlarms(RolloutAlarms):
    """Alarms of REINFORCE.

    Attributes:
        sampling_mismatch: **new**, as for the PPO actor; the first needs a KL penalty
    """

    sampling_mismatch: float | None = key(0.05, above=0)


@dataclass
class ReinforceLoop(RolloutLoop):
    """REINFORCE.

    Attributes:
        initial_policy_kl_penalty: weight of the KL to the reference in the reward; 0: no
            reference
        use_absolute_kl: True in NeMo-Aligner: the absolute log-ratio in place of the KL
        num_rollouts_per_prompt: responses to each prompt, 2 or more
    """

    initial_policy_kl_penalty: float = key(0.01, at_least=0)
    use_absolute_kl: bool = key(False)
    num_rollouts_per_prompt: int = key(4, at_least=1)
    trt_llm: TrtLlm = section()
    batch_iterator: BatchIterator = section()
    alarms: ReinforceAlarms | None = section()


@dataclass
class ReinforcePolicy(Policy):
    """The actor of REINFORCE."""

    trt_llm: PolicyTrtLlm = section()


def check_reinforce(v: Values, dp: dict[str, int], ranks: int) -> None:
    responses_key = "trainer.reinforce.num_rollouts_per_prompt"
    check_policy(v, "reinforce", "remote_rm", dp)
    responses = v.size(responses_key)
    check_compares_responses("REINFORCE", responses_key, responses)
    check_responses_differ(v, "model.reinforce.", responses, responses_key)
    prompts, batch = v.size("model.reinforce.num_rollout_samples"), "model.global_batch_size"
    name = f"model.reinforce.num_rollout_samples x {responses_key}={responses}"
    require_multiple(name, prompts * responses, {batch: v.size(batch)})


REINFORCE_JOB = Configuration(
    "gpt_reinforce_actor",
    {
        **FROM_CHECKPOINT,
        "trainer.reinforce": ReinforceLoop,
        "remote_rm": RemoteRM,
        "model": TrainedModel,
        "model.reinforce": ReinforcePolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    of_actor("reinforce", "val_rewards"),
    check=check_reinforce,
    records="prompt",
)
