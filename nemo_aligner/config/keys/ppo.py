# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of PPO."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import ABSENT, LARGEST_PORT, inert, key, section
from nemo_aligner.config.keys.rollouts import (
    BatchIterator,
    Policy,
    PolicyTrtLlm,
    Remote,
    RolloutAlarms,
    RolloutLoop,
    TrtLlm,
)
from nemo_aligner.core.estimators import (
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    PROCESS_REWARDS,
    ROLLOUT_LOGPROBS,
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
            `rloo`, `grpo`; see [ppo.md](ppo.md) for this and all that follows marked "ppo.md"
        kl_estimator: **new**, ppo.md: `k1`, `abs`, `k2` or `k3`; null: `k1`, or `abs` with
            `use_absolute_kl`
        use_absolute_kl: True, as in NeMo-Aligner's files: the KL in the reward is the absolute
            value of each token's log-ratio. It keeps its meaning, with a warning: it does not
            hold the policy to the reference ([measured](ppo.md#which-kl-regularises))
        discount_factor, gae_lambda: of generalised advantage estimation
        critic_gae_lambda: **new**, ppo.md: lambda of the returns that the critic learns; null:
            `gae_lambda`
        normalize_advantages: to mean 0 and variance 1 over all response tokens
        advantage_clip, reward_clip, whiten_rewards: **new**, ppo.md
        process_rewards: **new**: what `grpo` makes of rewards of steps or tokens: `sum` (their
            sum is that of the response) or `steps` (each compared with the others',
            [rewards](rewards.md#rewards-of-steps-and-tokens))
        overlong_buffer_len, overlong_penalty_factor: **new**, ppo.md: penalty on responses that
            come close to `max_length`
        target_kl: **new**, ppo.md: stop the updates of a rollout early; bound the loss of
            unlikely tokens (`model.ppo.dual_clip`)
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
    process_rewards: str | None = key("sum", choices=PROCESS_REWARDS)
    overlong_buffer_len: int = key(0, at_least=0)
    overlong_penalty_factor: float = key(1.0, above=0)
    target_kl: float | None = key(None, above=0)
    loss: str | None = key(None)
    advantages: str | None = key(None)
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
        kl_loss_coef, kl_loss_estimator: **new**, ppo.md: a KL to the reference policy in the loss
            (`model.ppo`); with `initial_policy_kl_penalty` above 0 both apply, which a warning
            says
        dual_clip: **new**, ppo.md: stop the updates of a rollout early; bound the loss of
            unlikely tokens (`model.ppo.dual_clip`)
        train_on_truncated: **new**: truncated responses count in the policy's loss too
            (`model.ppo`)
        ratio_eps, entropy_bonus: clip range of the policy ratio, weight of the entropy;
            `trainer.ppo.*` or `model.ppo.*`
        rollout_logprobs: **new**: where the policy's log-probs of a rollout come from:
            `recompute`, a forward pass like those of training, or `sampler`, generation itself,
            which saves the pass. They differ by rounding: 1e-6 in fp32, in bf16 by 0.008 on
            average, which every ratio of the loss then contains. The first rollout of a run is
            recomputed in any case, to be compared with the reference
    """

    num_rollouts_per_prompt: int = key(1, at_least=1)
    kl_loss_coef: float = key(0.0, at_least=0)
    kl_loss_estimator: str = key("k3", choices=KL_ESTIMATORS)
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
            server does. False too where it is not set and `reward_fn`, an environment or
            `reward_models` is, or there is no critic
    """

    combine_rm_and_critic_server: bool = key(
        "${critic_gives_rewards:${trainer.ppo.advantage_estimator},${trainer.pp"
        "o.reward_fn},${model.ppo.environment.path},${.reward_models}}"
    )
    critic: CriticAddress = section()


@dataclass
class CriticModel:
    """The critic.

    Attributes:
        loss_clip_val: clip range of the values; 0: no clipping
        loss_reduction: **new**, as for the actor
        offload_adam_states: as for the actor
    """

    loss_clip_val: float | None = key(0.2, at_least=0)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    offload_adam_states: bool = key(False)


@dataclass
class RSPolicy(Policy):
    """Rejection sampling.

    Attributes:
        num_rollouts_per_prompt: responses generated to each prompt
        top_n_rollouts: how many of them, those with the highest rewards, are trained on
    """

    num_rollouts_per_prompt: int = key(4, at_least=1)
    top_n_rollouts: int = key(1, at_least=1)


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
