# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO, IPO, RPO; KTO; SPIN."""

from typing import Any

from nemo_aligner.config.data_rules import check_prompts_can_be_read, check_sft_data
from nemo_aligner.config.fields import Configuration, Section, key, section
from nemo_aligner.config.keys import common, data
from nemo_aligner.config.keys.model import Peft, PolicyPeft, TrainedModel
from nemo_aligner.config.keys.rollouts import Responses
from nemo_aligner.config.rollout_rules import check_generation, check_reshard
from nemo_aligner.config.values import Values, is_number
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import DIRECT_PREFERENCE_LOSSES


class PreferenceAlarms(common.Alarms):
    """Alarms of preference learning."""

    likelihood_fall: float | None = key(10.0, above=0)
    first_rewards: Any = key(0.2)
    margin: float | None = key(0.0)


class PairAlarms(PreferenceAlarms):
    """Alarms of learning from pairs."""

    accuracy: float | None = key(0.4, at_least=0, at_most=1)


class Preferences(Section):
    """What DPO, KTO and SPIN have in common.

    ref_policy_kl_penalty: beta: how much a difference of log-probs counts, so how far the policy
        goes from the reference before the loss is satisfied
    preference_average_log_probs: in the preference loss the log-prob of a response is the mean
        over its tokens, not the sum
    log_prob_forward_micro_batch_size: pairs of one forward pass of the reference policy
    """

    ref_policy_kl_penalty: float = key(0.2, above=0)
    preference_average_log_probs: bool = key(False)
    log_prob_forward_micro_batch_size: int = key("${model.micro_batch_size}", at_least=1)


class WeighedPreferences(Preferences):
    """What DPO and KTO have in common.

    sft_average_log_probs: likewise in the likelihood of the chosen responses
    preference_loss_weight, sft_loss_weight: weights of the preference loss and of the negative
        log-likelihood of the chosen responses
    ref_log_probs_dir: **new**: folder in which the log-probs of the reference policy are kept for
        all epochs and jobs, so that no copy of its weights is; null: they are computed for each
        batch ([DPO](preferences.md#log-probs-that-are-kept))
    """

    sft_average_log_probs: bool = key("${.preference_average_log_probs}")
    preference_loss_weight: float = key(1, at_least=0)
    sft_loss_weight: float = key(0, at_least=0)
    ref_log_probs_dir: str | None = key(None)


def check_preferences(values: Values, kind: str) -> None:
    """What DPO and KTO, `kind`, have in common."""
    section = f"model.{kind}."
    check_prompts_can_be_read(str(values.get("model.data.data_impl")))
    check_not_both_0(values, [f"{section}preference_loss_weight", f"{section}sft_loss_weight"])


def check_not_both_0(values: Values, weights: list[str]) -> None:
    if not any(values.get(key) for key in weights):
        raise ConfigError(f"{' and '.join(weights)} are both 0: nothing would be learned.")


class DPO(WeighedPreferences):
    """DPO.

    preference_loss: `dpo`, `ipo`, `rpo_sq`, `rpo_bwd_kl` or `rpo_fwd_kl`
    label_smoothing: **new**: of `dpo`: the share of pairs that are assumed to be the wrong way
        round, below 0.5
    gt_reward_scale: of `rpo_*`: factor of the rewards in the data
    """

    preference_loss: str = key("dpo", choices=DIRECT_PREFERENCE_LOSSES)
    label_smoothing: float = key(0.0, at_least=0, at_most=0.5)
    gt_reward_scale: float = key(1.0)


class Pairs(data.Lines):
    """Pairs with rewards.

    default_chosen_reward, default_rejected_reward: of `rpo_*`: rewards of pairs without
        `chosen_reward` and `rejected_reward`
    """

    default_chosen_reward: float | None = key(1.0)
    default_rejected_reward: float | None = key(0.0)


def check_dpo(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_preferences(values, "dpo")
    values.refuse(
        """model.dpo.label_smoothing & model.dpo.preference_loss!=dpo | belongs to
        model.dpo.preference_loss=dpo, not {}"""
    )


DPO_JOB = Configuration(
    "gpt_dpo",
    {
        **common.FROM_CHECKPOINT,
        "trainer.dpo": common.SupervisedLoop,
        "trainer.dpo.alarms": PairAlarms,
        "model": TrainedModel,
        "model.dpo": DPO,
        "model.peft": Peft,
        "model.data": Pairs,
    },
    common.NEW_DATA | common.wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
    check=check_dpo,
    pairs=True,
    records="pair",
)


class KTO(WeighedPreferences):
    """KTO.

    desirable_loss_weight, undesirable_loss_weight: weights of chosen and of rejected responses
    """

    desirable_loss_weight: float = key(1.0, at_least=0)
    undesirable_loss_weight: float = key(1.0, at_least=0)


def check_kto(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_preferences(values, "kto")
    check_not_both_0(
        values, ["model.kto.desirable_loss_weight", "model.kto.undesirable_loss_weight"]
    )


KTO_JOB = Configuration(
    "gpt_kto",
    {
        **common.FROM_CHECKPOINT,
        "trainer.kto": common.SupervisedLoop,
        "trainer.kto.alarms": PreferenceAlarms,
        "model": TrainedModel,
        "model.kto": KTO,
        "model.peft": Peft,
        "model.data": data.Lines,
    },
    common.NEW_DATA | common.DATALOADER | common.wandb("nemo_aligner_kto", "rlhf_gpt3_kto"),
    check=check_kto,
    records="labelled",
)


class SPINAlarms(PairAlarms):
    """Alarms of SPIN."""

    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)
    identical_fraction: float | None = key(0.9, at_least=0, at_most=1)


class SPIN(Preferences, Responses):
    """SPIN.

    ref_policy_kl_penalty: beta, as for DPO; a number, or a list with one for each iteration
    rollout_micro_batch_size: responses that a data-parallel rank generates together (with
        `generation.kv_cache_gb` as many as fit in), for as many steps ahead as they are enough for
    """

    ref_policy_kl_penalty: Any = key(0.2, free=True, required=True)
    log_prob_forward_micro_batch_size: int = key(1, at_least=1)
    rollout_micro_batch_size: int = key(32, at_least=1)


class SPINLoop(common.SupervisedLoop):
    """SPIN.

    max_iterations: iterations, each of `max_epochs` passes against the policy with which it
        begins; `max_steps` is over all of them
    """

    max_epochs: int = key(1, at_least=1)
    max_iterations: int = key(3, at_least=1)
    alarms: SPINAlarms | None = section()


def check_spin(v: Values, dp: dict[str, int], ranks: int) -> None:
    section, model = "trainer.spin.", "model.spin."
    iterations = v.size(section + "max_iterations")
    _check_penalties(v.get(model + "ref_policy_kl_penalty"), iterations)
    check_generation(v, model)
    check_reshard(v, section, model + "generation.reshard", dp)
    check_sft_data(v, dp, ("validation_ds",))


def _check_penalties(given: Any, iterations: int) -> None:
    """Check `model.spin.ref_policy_kl_penalty`, a number or one for each of `iterations`."""
    penalties = given if isinstance(given, list) else [given]
    for penalty in penalties:
        if not is_number(penalty) or penalty <= 0:
            raise ConfigError(
                f"model.spin.ref_policy_kl_penalty={given} must be a number above 0, or a list."
            )
    if isinstance(given, list) and len(given) < iterations:
        raise ConfigError(
            f"model.spin.ref_policy_kl_penalty={given} has {len(given)} value(s) for "
            f"trainer.spin.max_iterations={iterations}; give one number, or one for each."
        )


SPIN_JOB = Configuration(
    "gpt_spin",
    {
        **common.FROM_CHECKPOINT,
        "trainer.spin": SPINLoop,
        "model": TrainedModel,
        "model.spin": SPIN,
        "model.peft": PolicyPeft,
        "model.data": data.Examples,
        "model.data.train_ds": data.ShuffledSet,
        "model.data.validation_ds": data.SizedSet,
    },
    {
        **common.wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
        f"{common.PARAMS}.filename": "megatron_gpt--{${.monitor}:.3f}-{step}-{consumed_samples}-"
        "{iteration}-{epoch}",
        "model.overwrite_base_config": {
            "data": {"train_ds": {"file_path": True}, "validation_ds": {"file_path": True}}
        },
        "model.data.chat": True,
        **common.below("model.data", common.CHAT_TOKENS),
        **common.below(
            "model.data",
            dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        ),
        "model.data.train_ds.hf_dataset": True,
        "model.data.validation_ds.hf_dataset": True,
        **common.below("model.data.validation_ds", common.VALIDATION_SET),
        **common.below(
            "model.data.validation_ds", {name: f"${{model.{name}}}" for name in common.SIZES}
        ),
    },
    required=common.VALIDATION_SIZES,
    check=check_spin,
    pairs=True,
    records="example",
)
