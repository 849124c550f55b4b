# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of jobs that learn from data."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import inert, key, section
from nemo_aligner.config.keys.common import Alarms, SupervisedLoop
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.rollouts import LengthParams, Responses, SamplingParams
from nemo_aligner.core.estimators import (
    DIRECT_PREFERENCE_LOSSES,
    DISTILLATION_LOSSES,
    LOSS_REDUCTIONS,
    OUTSIDE_TOP_K,
)


@dataclass
class RMModel:
    """Reward models.

    Attributes:
        loss_func: the same; NeMo-Aligner's documentation has the key above, its code read this
            one
    """

    loss_func: Any = key(None, fallback=None)


@dataclass
class RMLoop(SupervisedLoop):
    """Reward models.

    Attributes:
        train_random_sampler, val_random_sampler: shuffle
    """

    train_random_sampler: bool = key(True)
    val_random_sampler: bool = key(False)


@dataclass
class SFTAlarms(Alarms):
    """Alarms of SFT.

    Attributes:
        effective_responses: **new**, of `train_steerlm2.py` alone: threshold of an alarm, see
            [metrics.md](metrics.md#alarms); null switches it off
    """

    effective_responses: float | None = key(1.05, at_least=1)


@dataclass
class SteerLM2:
    """SteerLM 2.0.

    Attributes:
        micro_batch_size, forward_micro_batch_size: of `train_steerlm2.py` alone: responses per
            micro-batch, and per forward pass that gives their weights. The sizes of `train_ds`
            count prompts ([SteerLM](steerlm.md#steerlm-20))
    """

    micro_batch_size: int = key(1, at_least=1)
    forward_micro_batch_size: int = key(1, at_least=1)


@dataclass
class SFTModel:
    """SFT.

    Attributes:
        restore_from_path: base model; null: random weights. NeMo-Aligner: required
        answer_only_loss: False: the prompt counts in the loss too. NeMo-Aligner never read this
            key and always trained on the responses only
        loss_reduction: **new**, as for the PPO actor
    """

    restore_from_path: Any = key(None)
    answer_only_loss: bool = key(True)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    steerlm2: SteerLM2 = section()


@dataclass
class PreferenceAlarms(Alarms):
    """Alarms of preference learning.

    Attributes:
        likelihood_fall, first_rewards, margin: **new**: thresholds of alarms, see
            [metrics.md](metrics.md); null switches one off
    """

    likelihood_fall: float | None = key(10.0, above=0)
    first_rewards: Any = key(0.2)
    margin: float | None = key(0.0)


@dataclass
class PairAlarms(PreferenceAlarms):
    """Alarms of learning from pairs.

    Attributes:
        accuracy: **new**: thresholds of alarms, see [metrics.md](metrics.md); null switches one
            off
    """

    accuracy: float | None = key(0.4, at_least=0, at_most=1)


@dataclass
class Preferences:
    """What DPO, KTO and SPIN have in common.

    Attributes:
        ref_policy_kl_penalty: beta: how much a difference of log-probs counts, so how far the
            policy goes from the reference before the loss is satisfied
        preference_average_log_probs: the log-prob of a response is the mean over its tokens, not
            the sum; in the preference loss, in the likelihood of the chosen responses
        log_prob_forward_micro_batch_size: pairs of one forward pass of the reference policy
    """

    ref_policy_kl_penalty: float = key(0.2, above=0)
    preference_average_log_probs: bool = key(False)
    log_prob_forward_micro_batch_size: int = key("${model.micro_batch_size}", at_least=1)


@dataclass
class WeighedPreferences(Preferences):
    """What DPO and KTO have in common.

    Attributes:
        sft_average_log_probs: the log-prob of a response is the mean over its tokens, not the
            sum; in the preference loss, in the likelihood of the chosen responses
        preference_loss_weight, sft_loss_weight: weights of the preference loss and of the
            negative log-likelihood of the chosen responses
        ref_log_probs_dir: **new**: folder in which the log-probs of the reference policy are kept
            for all epochs and jobs, so that no copy of its weights is; null: they are computed
            for each batch ([dpo.md](dpo.md#log-probs-that-are-kept))
    """

    sft_average_log_probs: bool = key("${.preference_average_log_probs}")
    preference_loss_weight: float = key(1, at_least=0)
    sft_loss_weight: float = key(0, at_least=0)
    ref_log_probs_dir: Any = key(None)


@dataclass
class DPO(WeighedPreferences):
    """DPO.

    Attributes:
        preference_loss: `dpo`, `ipo`, `rpo_sq`, `rpo_bwd_kl` or `rpo_fwd_kl`
        label_smoothing: **new**: of `dpo`: the share of pairs that are assumed to be the wrong
            way round, below 0.5
        gt_reward_scale: of `rpo_*`: factor of the rewards in the data
    """

    preference_loss: str = key("dpo", choices=DIRECT_PREFERENCE_LOSSES)
    label_smoothing: float = key(0.0, at_least=0, at_most=0.5)
    gt_reward_scale: float = key(1.0)


@dataclass
class Pairs(Lines):
    """Pairs with rewards.

    Attributes:
        default_chosen_reward, default_rejected_reward: of `rpo_*`: rewards of pairs without
            `chosen_reward` and `rejected_reward`
    """

    default_chosen_reward: float | None = key(1.0)
    default_rejected_reward: float | None = key(0.0)


@dataclass
class KTO(WeighedPreferences):
    """KTO.

    Attributes:
        desirable_loss_weight, undesirable_loss_weight: weights of chosen and of rejected
            responses
    """

    desirable_loss_weight: float = key(1.0, at_least=0)
    undesirable_loss_weight: float = key(1.0, at_least=0)


@dataclass
class SPINAlarms(PairAlarms):
    """Alarms of SPIN.

    Attributes:
        truncated_fraction, identical_fraction: **new**: thresholds of alarms, see
            [metrics.md](metrics.md); null switches one off
    """

    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)
    identical_fraction: float | None = key(0.9, at_least=0, at_most=1)


@dataclass
class SPIN(Preferences, Responses):
    """SPIN.

    Attributes:
        ref_policy_kl_penalty: beta, as for DPO; a number, or a list with one for each iteration
        rollout_micro_batch_size: responses that a data-parallel rank generates together (with
            `generation.kv_cache_gb` as many as fit in), for as many steps ahead as they are enough
            for
    """

    ref_policy_kl_penalty: Any = key(0.2, free=True, required=True)
    log_prob_forward_micro_batch_size: int = key(1, at_least=1)
    rollout_micro_batch_size: int = key(32, at_least=1)


@dataclass
class SPINLoop(SupervisedLoop):
    """SPIN.

    Attributes:
        max_iterations: iterations, each of `max_epochs` passes against the policy with which it
            begins; `max_steps` is over all of them
    """

    max_epochs: int = key(1, at_least=1)
    max_iterations: int = key(3, at_least=1)
    alarms: SPINAlarms | None = section()


@dataclass
class KDAlarms(Alarms):
    """Alarms of distillation.

    Attributes:
        teacher_mass, truncated_fraction: **new**: thresholds of alarms, see
            [metrics.md](metrics.md); null switches one off
    """

    teacher_mass: float | None = key(0.5, at_least=0, at_most=1)
    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)


@dataclass
class OnPolicy:
    """Responses of the student's own.

    Attributes:
        fraction: **new**: share of the updates that learn from the student's own responses; a
            served teacher then gives the logits of all updates
            ([distillation.md](distillation.md#on-policy)). null: the data have them
        rollout_micro_batch_size: **new**: responses that a rank generates together, which bounds
            the memory of their cached keys; another takes the place of one that has ended. null:
            its whole share of the global batch
    """

    fraction: float | None = key(None, at_least=0, at_most=1)
    rollout_micro_batch_size: int | None = key(None, at_least=1)
    sampling_params: SamplingParams = section()
    length_params: LengthParams = section()


@dataclass
class Student:
    """The student.

    Attributes:
        loss_reduction: **new**, as for SFT
    """

    loss_reduction: str = key("token", choices=LOSS_REDUCTIONS)


@dataclass
class Distillation:
    """Distillation.

    Attributes:
        kd_loss: `fwd_kl`, `bwd_kl` or (**new**) `jsd`
        jsd_beta: **new**: of `jsd`: share of the teacher in the mixture, above 0 and below 1
        outside_top_k: **new**: `renormalize`: as if only top-k tokens could come; `bucket`: all
            others are one outcome
        logits_scale, target_logits_scale: factors of the logits of student and teacher
        kd_loss_weight, sft_loss_weight: weights of the divergence and of the negative
            log-likelihood of the responses
        cross_tokenizer: True is refused
    """

    kd_loss: str = key("fwd_kl", choices=DISTILLATION_LOSSES)
    jsd_beta: float = key(0.5)
    outside_top_k: str = key("renormalize", choices=OUTSIDE_TOP_K)
    logits_scale: float = key(1.0, above=0)
    target_logits_scale: float = key(1.0, above=0)
    kd_loss_weight: float = key(1.0, at_least=0)
    sft_loss_weight: float = key(0.0, at_least=0)
    cross_tokenizer: bool = key(False)
    on_policy: OnPolicy = section()


@dataclass
class RemoteTeacher:
    """The teacher's server.

    Attributes:
        host, port, name: **new**: of `on_policy`: where the teacher is served; lists of hosts or
            ports are a fleet
        init_timeout_s, inference_timeout_s, token_file, tls_ca_file: **new**: as for `remote_rm`
    """

    host: str = key("localhost")
    port: Any = key(5556, required=True)
    name: str = key("teacher_logits")
    init_timeout_s: float = key(600, above=0)
    inference_timeout_s: float = key(3600, above=0)
    token_file: Any = key(None)
    tls_ca_file: Any = key(None)


@dataclass
class TeacherLines(Lines):
    """Data with a teacher's logits.

    Attributes:
        top_k: logits of each token that count; null: all in the files
        n_chunks: files that a name with CHUNK_ID stands for, a number or one for each part; the
            second has no effect
    """

    top_k: int | None = key(None, at_least=1)
    n_chunks: Any = key(None, free=True)
    n_examples_per_chunk: Any = inert(None)
