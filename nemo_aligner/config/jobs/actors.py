# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The actors of PPO, rejection sampling and REINFORCE."""

from collections.abc import Callable
from typing import Any

from nemo_aligner.config import rollout_rules
from nemo_aligner.config.fields import (
    ABSENT,
    LARGEST_PORT,
    Configuration,
    Section,
    inert,
    key,
    section,
)
from nemo_aligner.config.keys import common, rollouts
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.ppo_rules import check_ppo
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
    port: int | None = key(5556, at_least=1, at_most=LARGEST_PORT)
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
    rollout_rules.check_responses_differ(v, "model.rs.", drawn)
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
    num_rollouts_per_prompt: int = key(4, at_least=1)
    trt_llm: rollouts.TrtLlm = section()
    batch_iterator: rollouts.BatchIterator = section()
    alarms: ReinforceAlarms | None = section()


class ReinforcePolicy(rollouts.Policy):
    """The actor of REINFORCE."""

    trt_llm: rollouts.PolicyTrtLlm = section()


def check_reinforce(v: Values, dp: dict[str, int], ranks: int) -> None:
    responses_key = "trainer.reinforce.num_rollouts_per_prompt"
    responses = v.size(responses_key)
    rollout_rules.check_compares_responses("REINFORCE", responses_key, responses)
    rollout_rules.check_responses_differ(v, "model.reinforce.", responses, responses_key)
    rollout_rules.check_policy(v, "reinforce", "remote_rm", dp, responses_key)


REINFORCE_JOB = _actor(
    "reinforce", ReinforceLoop, ReinforcePolicy, {"remote_rm": rollouts.RemoteRM}, check_reinforce
)
