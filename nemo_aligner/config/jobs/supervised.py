# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning and SteerLM 2.0; reward models; DPO, IPO, RPO; KTO; SPIN."""

from enum import Enum
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config import data_rules
from nemo_aligner.config.fields import ABSENT, Configuration, Section, key, section
from nemo_aligner.config.keys import common, data, model, rollouts
from nemo_aligner.config.rollout_rules import check_generation, check_reshard
from nemo_aligner.config.values import Values, is_number, require_one_of
from nemo_aligner.core import estimators


class SFTAlarms(common.Alarms):
    """Alarms of SFT.

    effective_responses: **new**, of `train_steerlm2.py` alone: threshold of an alarm, see
        [alarms](troubleshooting.md#alarms); null switches it off
    """

    effective_responses: float | None = key(1.05, at_least=1)


class SteerLM2(Section):
    """SteerLM 2.0.

    micro_batch_size, forward_micro_batch_size: of `train_steerlm2.py` alone: responses per
        micro-batch, and per forward pass that gives their weights. The sizes of `train_ds` count
        prompts ([SteerLM](algorithms.md#steerlm-20))
    """

    micro_batch_size: int = key(1, at_least=1)
    forward_micro_batch_size: int = key(1, at_least=1)


class SFTModel(model.TrainedModel):
    """SFT.

    restore_from_path: base model; null: random weights. NeMo-Aligner: required
    answer_only_loss: False: the prompt counts in the loss too. NeMo-Aligner never read this key
        and always trained on the responses only
    loss_reduction: **new**, as for the PPO actor
    """

    restore_from_path: str | None = key(None)
    answer_only_loss: bool = key(True)
    loss_reduction: str | None = key("token", choices=estimators.LOSS_REDUCTIONS)
    steerlm2: SteerLM2 = section()


def check_steerlm2(values: Values) -> None:
    """Raise `ConfigError` unless a checked job of `gpt_sft.yaml` can train SteerLM 2.0."""
    values.refuse("""
        model.restore_from_path=null | ; give the policy that sampled the responses
        !model.data.chat | : data of SteerLM 2 are in NeMo's chat format; set it to True
        model.loss_reduction!=token | is not for SteerLM 2; leave it at token
        model.data.train_ds.packed_sequence or model.data.validation_ds.packed_sequence | : SteerLM
            2 packs none; set it to False
    """)


_SIZES = {name: f"${{model.data.train_ds.{name}}}" for name in common.SIZES}

SFT_JOB = Configuration(
    "gpt_sft",
    {
        "": common.Named,
        **common.TRAINS,
        "trainer.sft": common.SupervisedLoop,
        "trainer.sft.alarms": SFTAlarms,
        "model": SFTModel,
        "model.peft": model.PolicyPeft,
        "model.data": data.Examples,
        "model.data.train_ds": data.PackedSet,
        "model.data.validation_ds": data.PackedSet,
        "model.data.test_ds": data.PackedSet,
    },
    {
        **common.OF_SFT,
        **common.FROM_SCRATCH,
        **common.NO_RECOMPUTATION,
        **common.NO_LAYERS,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        **common.below("model", _SIZES),
        **common.below("model.data.validation_ds", common.VALIDATION_SET | _SIZES),
    },
    required=common.VALIDATION_SIZES,
    check=lambda v, dp, ranks: data_rules.check_sft_data(v, dp, ("train_ds", "validation_ds")),
    restore_key="model.restore_from_path",
    from_scratch=True,
    records="example",
    bare=("model.data.test_ds",),
)


class RMModel(model.RewardHead, model.TrainedModel):
    """Reward models.

    loss_func: the same; NeMo-Aligner's documentation has the key above, its code read this one
    """

    loss_func: Any = key(None, fallback=None)


class RMLoop(common.SupervisedLoop):
    """Reward models.

    train_random_sampler, val_random_sampler: shuffle
    """

    train_random_sampler: bool = key(True)
    val_random_sampler: bool = key(False)


class RewardModelType(Enum):
    BINARY_RANKING = "binary_ranking"
    REGRESSION = "regression"


def reward_model_type(name: str | None) -> RewardModelType:
    """The kind that `model.reward_model_type` names, or `ConfigError`; None: binary ranking."""
    kinds = {kind.value: kind for kind in RewardModelType}
    if name is not None:
        require_one_of("model.reward_model_type", name, kinds)
    return RewardModelType.BINARY_RANKING if name is None else kinds[name]


def training_loss(cfg: DictConfig) -> str:
    """What a model with the complete section `cfg` learns by: "regression" or one of
    `estimators.PREFERENCE_LOSSES`.

    NeMo-Aligner's documentation says `model.regression.loss_func`, its code reads
    `model.loss_func`; both are read here.

    Raises:
        ConfigError: an unknown loss, or two different ones.
    """
    v, own, documented = Values({"model": cfg}), "model.loss_func", "model.regression.loss_func"
    for name in (own, documented):
        v.choice(name, ("regression", *estimators.PREFERENCE_LOSSES))
    if cfg.loss_func != cfg.regression.loss_func:
        v.refuse(
            f"""{own}!=null & {documented}!=regression | and {{}} contradict each other; set only
            the latter"""
        )
    return str(v.get(own, v.get(documented)))


def learns_labelled_pairs(cfg: DictConfig) -> bool:
    """Whether a model with the complete section `cfg` learns pairs of samples with labels."""
    return (
        reward_model_type(cfg.reward_model_type) is RewardModelType.REGRESSION
        and training_loss(cfg) in estimators.PREFERENCE_LOSSES
    )


REWARD_MODEL_JOB = Configuration(
    "training_rm",
    {
        **common.FROM_CHECKPOINT,
        "trainer.rm": RMLoop,
        "model": RMModel,
        "model.peft": model.Peft,
        "model.data": data.Lines,
    },
    {
        **common.NEW_DATA,
        **common.FROM_SCRATCH,
        **common.wandb("nemo_aligner_rm", "rlhf_gpt3_rm_2b"),
        "model.micro_batch_size": 2,
        "model.sequence_parallel": ABSENT,
        "model.share_embeddings_and_output_weights": False,
        "model.hidden_dropout": None,
        "model.attention_dropout": None,
        "model.reward_model_type": "binary_ranking",
        "model.output_sequence": False,
        "model.use_avg_pool": False,
        "model.force_head_dtype": "bfloat16",
        "model.regression.num_attributes": 1,
        "model.regression.loss_mask_val": model.DEFAULT_MASK_VALUE,
        "model.regression.loss_func": "regression",
        "model.regression.load_rm_head_weights": False,
        **common.below(
            "model.reward_standardization", dict.fromkeys(("enable", "mean", "std"), ABSENT)
        ),
    },
    without=frozenset(["model.data.allow_empty_prompt"]),
    rules=f"""model.data.data_impl={data_rules.TOKENS} & model.reward_model_type=regression |
    {data_rules.NO_LABELS}""",
    from_scratch=True,
    pairs=True,
    records="scored",
)


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


_PREFERENCE_RULES = f"""
model.data.data_impl={data_rules.TOKENS} | {data_rules.NO_PROMPTS}
OWN.preference_loss_weight=0 & OWN.sft_loss_weight=0 | {common.BOTH_0}
"""


def _of_preferences(
    algo: str, own: type, lines: type, alarms: type, loop: type = common.SupervisedLoop
) -> dict[str, type]:
    """The sections of a job that learns from preferences; `own`: its own below `model`."""
    return {
        **common.FROM_CHECKPOINT,
        f"trainer.{algo}": loop,
        f"trainer.{algo}.alarms": alarms,
        "model": model.TrainedModel,
        f"model.{algo}": own,
        "model.peft": model.Peft,
        "model.data": lines,
    }


class DPO(WeighedPreferences):
    """DPO.

    preference_loss: `dpo`, `ipo`, `rpo_sq`, `rpo_bwd_kl` or `rpo_fwd_kl`
    label_smoothing: **new**: of `dpo`: the share of pairs that are assumed to be the wrong way
        round, below 0.5
    gt_reward_scale: of `rpo_*`: factor of the rewards in the data
    """

    preference_loss: str = key("dpo", choices=estimators.DIRECT_PREFERENCE_LOSSES)
    label_smoothing: float = key(0.0, at_least=0, at_most=0.5)
    gt_reward_scale: float = key(1.0)


class Pairs(data.Lines):
    """Pairs with rewards.

    default_chosen_reward, default_rejected_reward: of `rpo_*`: rewards of pairs without
        `chosen_reward` and `rejected_reward`
    """

    default_chosen_reward: float | None = key(1.0)
    default_rejected_reward: float | None = key(0.0)


DPO_JOB = Configuration(
    "gpt_dpo",
    _of_preferences("dpo", DPO, Pairs, PairAlarms),
    common.NEW_DATA | common.wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
    rules=f"""{_PREFERENCE_RULES}
OWN.label_smoothing & OWN.preference_loss!=dpo | belongs to OWN.preference_loss=dpo, not {{}}
""",
    pairs=True,
    records="pair",
)


class KTO(WeighedPreferences):
    """KTO.

    desirable_loss_weight, undesirable_loss_weight: weights of chosen and of rejected responses
    """

    desirable_loss_weight: float = key(1.0, at_least=0)
    undesirable_loss_weight: float = key(1.0, at_least=0)


KTO_JOB = Configuration(
    "gpt_kto",
    _of_preferences("kto", KTO, data.Lines, PreferenceAlarms),
    common.NEW_DATA | common.DATALOADER | common.wandb("nemo_aligner_kto", "rlhf_gpt3_kto"),
    rules=f"""{_PREFERENCE_RULES}
OWN.desirable_loss_weight=0 & OWN.undesirable_loss_weight=0 | {common.BOTH_0}
""",
    records="labelled",
)


class SPINAlarms(PairAlarms):
    """Alarms of SPIN."""

    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)
    identical_fraction: float | None = key(0.9, at_least=0, at_most=1)


class SPIN(Preferences, rollouts.Responses):
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


def check_spin(v: Values, dp: dict[str, int], ranks: int) -> None:
    section, model = "trainer.spin.", "model.spin."
    betas, iterations = model + "ref_policy_kl_penalty", v.size(section + "max_iterations")
    given = v.get(betas)
    penalties = given if isinstance(given, list) else [given] * iterations
    if not all(is_number(penalty) and penalty > 0 for penalty in penalties):
        raise v.error(betas, "must be a number above 0, or a list.")
    if len(penalties) < iterations:
        raise v.error(
            betas,
            f"has {len(penalties)} value(s) for trainer.spin.max_iterations={iterations}; give "
            "one number, or one for each.",
        )
    check_generation(v, model)
    check_reshard(v, section, model + "generation.reshard", dp)
    data_rules.check_sft_data(v, dp, ("validation_ds",))


SPIN_JOB = Configuration(
    "gpt_spin",
    {
        **_of_preferences("spin", SPIN, data.Examples, SPINAlarms, SPINLoop),
        "model.peft": model.PolicyPeft,
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
