# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The actors of PPO, rejection sampling and REINFORCE."""

from collections.abc import Callable
from typing import Any

from nemo_aligner.config import rollout_rules, server_rules
from nemo_aligner.config.fields import ABSENT, Configuration, Section, inert, key, section
from nemo_aligner.config.keys import common, rollouts
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.values import Values
from nemo_aligner.core import estimators
from nemo_aligner.core.errors import ConfigError


def _actor(
    algo: str,
    loop: type,
    policy: type,
    remotes: dict[str, type],
    check: Callable[[Values, dict[str, int], int], None],
    data: type = Lines,
    monitor: str = "val_rewards",
    more: dict[str, Any] | None = None,
) -> Configuration:
    """The actor of an algorithm; `remotes`: its servers' sections, `more`: other defaults."""
    name = f"megatron_gpt-{{step}}-{{consumed_samples}}-{{{algo}_optimization_step}}-{{epoch}}"
    return Configuration(
        f"gpt_{algo}_actor",
        {
            **common.FROM_CHECKPOINT,
            f"trainer.{algo}": loop,
            **remotes,
            "model": TrainedModel,
            f"model.{algo}": policy,
            "model.peft": PolicyPeft,
            "model.data": data,
        },
        {
            **common.NEW_DATA,
            "exp_manager.name": f"megatron_gpt_{algo}_actor",
            **common.wandb(f"nemo_aligner_{algo}", f"gpt3_{algo}_2b"),
            f"{common.PARAMS}.monitor": monitor,
            f"{common.PARAMS}.mode": "max",
            f"{common.PARAMS}.save_top_k": 1,
            f"{common.PARAMS}.filename": f"{name}-{{{monitor}:.3f}}",
            "model.optim.lr": 9e-7,
            "model.optim.sched.min_lr": 9e-8,
            "model.data.validation_drop_last": ABSENT,
            **(more or {}),
        },
        check=check,
        records="prompt",
    )


class AdaptiveKL(Section):
    """Moves the weight of the KL.

    enable, target, horizon: **new**, ppo.md: move `initial_policy_kl_penalty` so that the KL of a
        sample stays near the target
    """

    enable: bool = key(False)
    target: float | None = key(6.0, above=0)
    horizon: float | None = key(10000, above=0)


class SamplerCorrectionKeys(Section):
    """Against a sampler that is not the trainer.

    weights, cap: **new**, ppo.md: importance weights by the ratio of each `token`, of its response
        (`sequence`) or its geometric mean (`geometric`), at most `cap`; null: none
    reject, low, high: **new**, ppo.md: nothing is learned from what has a ratio out of this range,
        by the same names; null: everything counts
    """

    weights: str | None = key(None, choices=estimators.CORRECTION_LEVELS)
    cap: float = key(2.0, above=0)
    reject: str | None = key(None, choices=estimators.CORRECTION_LEVELS)
    low: float = key(0.5, at_least=0)
    high: float = key(2.0, above=0)


class Covariance(Section):
    """Against the fall of entropy.

    rule: **new**, ppo.md: tokens with a large covariance of log-prob and advantage have no
        gradient (`clip`) or a KL to the policy that generated (`kl`); null: off
    fraction: **new**: of the response tokens of a rollout
    low, high: **new**, with `clip`: range of the covariances among which they are drawn
    kl_coef: **new**, with `kl`: weight of the KL
    """

    rule: str | None = key(None, choices=estimators.COVARIANCE_RULES)
    fraction: float = key(0.0002, above=0, at_most=1)
    low: float = key(1.0)
    high: float = key(5.0)
    kl_coef: float = key(1.0, above=0)


class PPOAlarms(rollouts.RolloutAlarms):
    """Alarms of PPO."""

    sampling_mismatch: float | None = key(0.05, above=0)
    first_update_kl: Any = key(0.001)
    clip_fraction: float | None = key(0.3, at_least=0, at_most=1)
    explained_variance: float | None = key(-0.2, at_most=1)


class PPOLoop(rollouts.RolloutLoop):
    """PPO.

    critic_warmup_steps: rollouts before step 0 that train only the critic
    ppo_epochs: **new**: passes over one rollout
    initial_policy_kl_penalty: weight of the KL to the reference policy in the reward; 0: no
        reference policy
    advantage_estimator: **new**: `gae` (with a critic), or without one `reinforce_plus_plus`,
        `rloo`, `grpo`, `dr_grpo`, `gdpo`, or `teacher` alone; see [ppo.md](ppo.md) for this and
        all that follows marked "ppo.md"
    kl_estimator: **new**, ppo.md: `k1`, `abs`, `k2` or `k3`; null: `k1`, or `abs` with
        `use_absolute_kl`
    use_absolute_kl: True, as in NeMo-Aligner's files: the KL in the reward is the absolute value
        of each token's log-ratio. It keeps its meaning, with a warning: it does not hold the
        policy to the reference ([measured](ppo.md#which-kl-regularises))
    discount_factor, gae_lambda: of generalised advantage estimation
    critic_gae_lambda: **new**, ppo.md: lambda of the returns that the critic learns; null:
        `gae_lambda`
    normalize_advantages: to mean 0 and variance 1 over all response tokens
    advantage_clip, reward_clip, whiten_rewards, normalize_rewards: **new**, ppo.md
    process_rewards: **new**: what `grpo` makes of rewards of steps or tokens: `sum` (their sum is
        that of the response) or `steps` (each compared with the others',
        [rewards](rewards.md#rewards-of-steps-and-tokens))
    dynamic_sampling_rounds: **new**, ppo.md: rollouts drawn more, at most, to replace prompts
        whose responses all have the same reward; 0: none
    overlong_buffer_len, overlong_penalty_factor: **new**, ppo.md: penalty on responses that come
        close to `max_length`
    teacher_kl_coef, teacher_kl_discount: **new**, ppo.md: weight of a [served
        teacher](ppo.md#a-teacher-of-the-policy) in the advantages, 0: none; of what it thinks of
        later tokens
    target_kl: **new**, ppo.md: stop the updates of a rollout early
    loss, advantages: **new**: `path/to/file.py:function`, your own loss of a token in place of the
        clipped one, your own advantages ([ppo.md](ppo.md#your-own-loss-and-advantages))
    ratio_eps, entropy_bonus: clip range of the policy ratio, weight of the entropy;
        `trainer.ppo.*` or `model.ppo.*`
    """

    critic_warmup_steps: int = key(0, at_least=0)
    ppo_epochs: int = key(1, at_least=1)
    initial_policy_kl_penalty: float = key(0.01, at_least=0)
    advantage_estimator: str = key("gae", choices=tuple(estimators.ADVANTAGE_ESTIMATORS))
    kl_estimator: str | None = key(None, choices=estimators.KL_ESTIMATORS)
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
    process_rewards: str | None = key("sum", choices=estimators.PROCESS_REWARDS)
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
    trt_llm: rollouts.TrtLlm = section()
    batch_iterator: rollouts.BatchIterator = section()
    alarms: PPOAlarms | None = section()


class PPOPolicy(rollouts.Policy):
    """The actor.

    num_rollouts_per_prompt: **new**: responses to each prompt; times `num_rollout_samples` a
        multiple of `global_batch_size`
    kl_loss_coef, kl_loss_estimator: **new**, ppo.md: a KL to the reference policy in the loss;
        with `initial_policy_kl_penalty` above 0 both apply, which a warning says
    policy_loss, ratio_eps_high, dual_clip: **new**, ppo.md: what takes the place of the clipped
        loss; the clip range's upper side (null: `ratio_eps`); a bound on the loss of unlikely
        tokens
    train_on_truncated: **new**: truncated responses count in the policy's loss too
    ratio_eps, entropy_bonus: as in `trainer.ppo`
    rollout_logprobs: **new**: where the policy's log-probs of a rollout come from: `recompute`, a
        forward pass like those of training, or `sampler`, generation itself, which saves the pass.
        They differ by rounding: 1e-6 in fp32, in bf16 by 0.008 on average, which every ratio of
        the loss then contains. The first rollout of a run is recomputed in any case, to be
        compared with the reference
    """

    num_rollouts_per_prompt: int = key(1, at_least=1)
    kl_loss_coef: float = key(0.0, at_least=0)
    kl_loss_estimator: str = key("k3", choices=estimators.KL_ESTIMATORS)
    policy_loss: str = key("clip", choices=estimators.POLICY_LOSSES)
    ratio_eps_high: float | None = key(None, above=0)
    dual_clip: float | None = key(None, above=1)
    train_on_truncated: bool = key(False)
    ratio_eps: float = key("${trainer.ppo.ratio_eps}", above=0)
    entropy_bonus: float = key("${trainer.ppo.entropy_bonus}", at_least=0)
    rollout_logprobs: str = key("recompute", choices=estimators.ROLLOUT_LOGPROBS)
    trt_llm: rollouts.PolicyTrtLlm = section()


def _estimators(kind: str) -> str:
    """The advantage estimators of this property, as a rule has them."""
    found = (name for name, each in estimators.ADVANTAGE_ESTIMATORS.items() if getattr(each, kind))
    return "|".join(found)


_PPO_WORDS = {
    "WITH_CRITIC": _estimators("needs_critic"),
    "COMPARES": _estimators("compares_responses"),
    "OF_PARTS": _estimators("compares_parts"),
    "OF_TEACHER": _estimators("of_teacher"),
    "OF_RESPONSES": "|".join(estimators.LOSSES_OF_RESPONSES),
    "DUAL_CLIPPED": "|".join(estimators.DUAL_CLIPPED),
    "RANGED": "|".join(estimators.RANGED),
    "ESTIMATOR": "trainer.ppo.advantage_estimator",
    "REMOTE": "remote_critic_rm",
    "PPO": "trainer.ppo",
    "MODEL": "model.ppo",
}
_PPO_RULES = """
PPO.process_rewards=steps & ESTIMATOR!=grpo | is for grpo, but {}; set it to sum
PPO.overlong_buffer_len & PPO.process_rewards=steps | is a penalty at the last token of a response,
    which ends no step as {} needs it; set one of them back
PPO.overlong_buffer_len>MODEL.length_params.max_length | is longer than
    {MODEL.length_params.max_length}; lower it
PPO.dynamic_sampling_rounds & ESTIMATOR!=COMPARES or ESTIMATOR=OF_PARTS or
    PPO.process_rewards=steps or PPO.teacher_kl_coef | replaces prompts whose responses all have
    the same reward, but with {} they have a signal too; set it to 0, or use grpo, dr_grpo or rloo
    with process_rewards=sum and without a teacher
PPO.loss & MODEL.policy_loss!=clip | takes the place of {}; leave one of them out
MODEL.policy_loss=OF_RESPONSES & MODEL.loss_reduction!=sequence | is one value of a response, and
    {} would weigh it by the number of tokens; set loss_reduction=sequence
MODEL.policy_loss=gmpo & ESTIMATOR!=COMPARES or PPO.teacher_kl_coef or PPO.process_rewards=steps or
    PPO.advantages | takes one advantage for a whole response, which {} does not give. Use grpo,
    dr_grpo or rloo, without process_rewards=steps, own advantages and teacher_kl_coef, or
    policy_loss=gspo
MODEL.dual_clip & MODEL.policy_loss!=DUAL_CLIPPED | is for policy_loss=DUAL_CLIPPED, not {}; set it
    to null
MODEL.ratio_eps_high & MODEL.policy_loss!=RANGED | is for policy_loss=RANGED, not {}; set it to
    null
PPO.sampler_correction.low>=PPO.sampler_correction.high | must be below
    {PPO.sampler_correction.high}
PPO.covariance.low>=PPO.covariance.high | must be below {PPO.covariance.high}
PPO.sampler_correction.weights or PPO.sampler_correction.reject & MODEL.rollout_logprobs=sampler |
    compares the sampler's log-probs with the trainer's, which {} leaves out; set it to recompute
PPO.covariance.rule=clip or PPO.sampler_correction.weights=token or
    PPO.sampler_correction.reject=token & MODEL.policy_loss=gmpo | gives tokens of a response other
    advantages, of which {} takes the mean; set it to null, or use gspo
PPO.adaptive_kl.target=null or PPO.adaptive_kl.horizon=null & PPO.adaptive_kl.enable | , but {}
    needs a number
PPO.adaptive_kl.enable & !PPO.initial_policy_kl_penalty | multiplies {}, which stays 0; set a small
    penalty to start from, for example 0.01, or switch adaptive_kl off
MODEL.num_rollouts_per_prompt<2 & ESTIMATOR=COMPARES | gives nothing to compare, but {} compares
    the responses to a prompt; raise it
REMOTE.critic.ip=null or REMOTE.critic.port=null & ESTIMATOR=WITH_CRITIC | , but {} needs a critic;
    give its address
REMOTE.combine_rm_and_critic_server & ESTIMATOR!=WITH_CRITIC | has the critic's server give
    rewards, but {} has no critic; unset it, and set PPO.reward_fn, REMOTE.reward_model or
    reward_models
REMOTE.reward_models=null & ESTIMATOR=OF_PARTS | , but {} needs its rewards; set it
ESTIMATOR=OF_TEACHER & !PPO.teacher_kl_coef | learns from a teacher alone, and {} leaves that out;
    set it to 1, and the teacher's address in remote_teacher
PPO.critic_warmup_steps & ESTIMATOR!=WITH_CRITIC | would train a critic, but {} has none; set it to
    0
PPO.critic_gae_lambda!=null & ESTIMATOR!=WITH_CRITIC | is for the returns that a critic learns, but
    {} has none; set it to null
PPO.whiten_rewards & ESTIMATOR!=WITH_CRITIC | rescales rewards of single tokens, so that their sum
    depends on the length of a response, and {} compares sums; set it to False
PPO.initial_policy_kl_penalty or PPO.overlong_buffer_len & ESTIMATOR=OF_PARTS|OF_TEACHER | is part
    of the total reward, from which {} does not learn; set it to 0 (kl_loss_coef works)
PPO.normalize_rewards or PPO.reward_clip & ESTIMATOR=OF_PARTS|OF_TEACHER | shapes the total reward,
    from which {} does not learn; leave it at its default
PPO.discount_factor!=1.0 & ESTIMATOR=COMPARES | has no part in {}, which compares whole responses;
    set it to 1.0
"""


def check_ppo(v: Values, dp: dict[str, int], ranks: int) -> None:
    rollout_rules.check_policy(
        v, "ppo", "remote_critic_rm", dp, "model.ppo.num_rollouts_per_prompt"
    )
    check_ppo_variants(v)
    server_rules.check_source_of_rewards(v.get("remote_critic_rm"))
    if v.get("trainer.ppo.teacher_kl_coef"):
        rollout_rules.check_remote(v, "remote_teacher")
        server_rules.read_teachers(v.get("remote_teacher"))


def check_ppo_variants(v: Values) -> None:
    v.refuse(_PPO_RULES, **_PPO_WORDS)
    rollout_rules.check_responses_differ(v, "model.ppo.")
    prompts, responses = (
        v.size(f"model.ppo.{key}") for key in ("num_rollout_samples", "num_rollouts_per_prompt")
    )
    samples, batch = prompts * responses, v.size("model.global_batch_size")
    horizon = "trainer.ppo.adaptive_kl.horizon"
    if v.get("trainer.ppo.adaptive_kl.enable") and v.get(horizon) <= 0.2 * samples:
        raise v.error(
            horizon,
            f"is too short for {samples} samples per PPO step, of which one could make the "
            f"penalty negative; set it above {0.2 * samples:g}, better to {10 * samples} or more.",
        )
    if samples // batch * v.get("trainer.ppo.ppo_epochs") == 1:
        v.refuse(
            f"""trainer.ppo.target_kl or trainer.ppo.covariance.rule=kl | acts from the second
            update of a rollout on, but there is only one: its {samples} samples are one
            model.global_batch_size={batch}, in one epoch. Set it to null, or a smaller
            global_batch_size or more ppo_epochs"""
        )
    served = "remote_critic_rm.reward_model"
    estimator = v.get("trainer.ppo.advantage_estimator")
    is_asked = v.get(served) != server_rules.REWARD_ADDRESS
    if estimators.ADVANTAGE_ESTIMATORS[estimator].of_teacher and is_asked:
        raise v.error(
            served,
            f"is not asked with advantage_estimator={estimator}; name it in "
            "remote_critic_rm.reward_models.",
        )


class CriticNames(Section):
    """Endpoints of the critic.

    train, infer, save, status, resume: names of the endpoints
    """

    train: str | None = key("critic_train")
    infer: str | None = key("critic_infer")
    save: str | None = key("critic_save")
    status: Any = key(ABSENT)
    resume: Any = key(ABSENT)


class CriticAddress(Section):
    """The critic's server.

    ip, port: addresses of the servers
    """

    ip: str | None = key("localhost")
    port: int | None = key(5556, at_least=1, at_most=65535)
    name: CriticNames = section()


class RemoteCriticRM(rollouts.Remote):
    """The critic's and the rewards' servers.

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


class WeightedLines(Lines):
    """The prompts of PPO.

    sample_weight: **new**: a column of the records with a number of at least 0, by which the
        advantages of the responses to the prompt are multiplied; null: 1
    """

    sample_weight: str | None = key(None)


class PolicyTeachers(rollouts.RemoteTeacher):
    """The servers of a policy's teachers.

    teachers, column: **new**: several teachers by their names, each a section with what differs of
        `host`, `port` and `name`; column of the data that names the one of a prompt
    """

    teachers: Any = key(None, free=True)
    column: str | None = key(None)


PPO_JOB = _actor(
    "ppo",
    PPOLoop,
    PPOPolicy,
    {"remote_critic_rm": RemoteCriticRM, "remote_teacher": PolicyTeachers},
    check_ppo,
    WeightedLines,
)


class RSPolicy(rollouts.Policy):
    """Rejection sampling.

    num_rollouts_per_prompt: responses generated to each prompt
    top_n_rollouts: how many of them, those with the highest rewards, are trained on
    """

    num_rollouts_per_prompt: int = key(4, at_least=1)
    top_n_rollouts: int = key(1, at_least=1)


def check_rs(v: Values, dp: dict[str, int], ranks: int) -> None:
    drawn = v.size("model.rs.num_rollouts_per_prompt")
    check_top_n(v.size("model.rs.top_n_rollouts"), drawn)
    rollout_rules.check_responses_differ(v, "model.rs.")
    rollout_rules.check_policy(v, "rs", "remote_rm", dp, "model.rs.top_n_rollouts")


def check_top_n(top_n_rollouts: int, num_rollouts_per_prompt: int) -> None:
    """Raise `ConfigError` unless rejection sampling keeps 1 to all drawn responses."""
    if not 1 <= top_n_rollouts <= num_rollouts_per_prompt:
        raise ConfigError(
            f"model.rs.top_n_rollouts={top_n_rollouts} must be from 1 to "
            f"model.rs.num_rollouts_per_prompt={num_rollouts_per_prompt}, the responses drawn."
        )


RS_JOB = _actor(
    "rs",
    rollouts.RolloutLoop,
    RSPolicy,
    {"remote_rm": rollouts.RemoteRM},
    check_rs,
    monitor="val_global_rewards",
    more=common.DATALOADER,
)


class ReinforceAlarms(rollouts.RolloutAlarms):
    """Alarms of REINFORCE.

    sampling_mismatch: **new**, as for the PPO actor; the first needs a KL penalty
    """

    sampling_mismatch: float | None = key(0.05, above=0)


class ReinforceLoop(rollouts.RolloutLoop):
    """REINFORCE.

    initial_policy_kl_penalty: weight of the KL to the reference in the reward; 0: no reference
    use_absolute_kl: True in NeMo-Aligner: the absolute log-ratio in place of the KL
    num_rollouts_per_prompt: responses to each prompt, 2 or more
    """

    initial_policy_kl_penalty: float = key(0.01, at_least=0)
    use_absolute_kl: bool = key(False)
    num_rollouts_per_prompt: int = key(4, at_least=2)
    trt_llm: rollouts.TrtLlm = section()
    batch_iterator: rollouts.BatchIterator = section()
    alarms: ReinforceAlarms | None = section()


class ReinforcePolicy(rollouts.Policy):
    """The actor of REINFORCE."""

    trt_llm: rollouts.PolicyTrtLlm = section()


def check_reinforce(v: Values, dp: dict[str, int], ranks: int) -> None:
    responses_key = "trainer.reinforce.num_rollouts_per_prompt"
    rollout_rules.check_responses_differ(v, "model.reinforce.", responses_key)
    rollout_rules.check_policy(v, "reinforce", "remote_rm", dp, responses_key)


REINFORCE_JOB = _actor(
    "reinforce", ReinforceLoop, ReinforcePolicy, {"remote_rm": rollouts.RemoteRM}, check_reinforce
)
