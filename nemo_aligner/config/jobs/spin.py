# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SPIN."""

import math
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.data_rules import check_sft_data
from nemo_aligner.config.fields import Job, key, section
from nemo_aligner.config.jobs.shared import (
    CHAT_TOKENS,
    PARAMS,
    SIZES,
    VALIDATION_SET,
    VALIDATION_SIZES,
    below,
    wandb,
)
from nemo_aligner.config.keys.common import ExpManager, Pretrained, SupervisedLoop, Trainer
from nemo_aligner.config.keys.data import Examples, ShuffledSet, SizedSet
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.keys.preferences import PairAlarms, Preferences
from nemo_aligner.config.keys.rollouts import Responses
from nemo_aligner.config.rollout_rules import check_generation, check_reshard
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


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


def check(v: Values, dp: dict[str, int], ranks: int) -> None:
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
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not 0 < penalty < math.inf:
            raise ConfigError(
                f"model.spin.ref_policy_kl_penalty={given} must be a number above 0, or a list of "
                "such numbers."
            )
    if isinstance(given, list) and len(given) < iterations:
        raise ConfigError(
            f"model.spin.ref_policy_kl_penalty={given} has {len(given)} value(s) for "
            f"trainer.spin.max_iterations={iterations}; give one number, or one for each."
        )


JOB = Job(
    "gpt_spin",
    {
        "trainer": Trainer,
        "trainer.spin": SPINLoop,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.spin": SPIN,
        "model.peft": PolicyPeft,
        "model.data": Examples,
        "model.data.train_ds": ShuffledSet,
        "model.data.validation_ds": SizedSet,
    },
    {
        **wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
        f"{PARAMS}.filename": "megatron_gpt--{${.monitor}:.3f}-{step}-{consumed_samples}-"
        "{iteration}-{epoch}",
        "model.overwrite_base_config": {
            "data": {"train_ds": {"file_path": True}, "validation_ds": {"file_path": True}}
        },
        "model.data.chat": True,
        **below("model.data", CHAT_TOKENS),
        **below(
            "model.data",
            dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        ),
        "model.data.train_ds.hf_dataset": True,
        "model.data.validation_ds.hf_dataset": True,
        **below("model.data.validation_ds", VALIDATION_SET),
        **below("model.data.validation_ds", {name: f"${{model.{name}}}" for name in SIZES}),
    },
    required=VALIDATION_SIZES,
    check=check,
    pairs=True,
    records="example",
)
