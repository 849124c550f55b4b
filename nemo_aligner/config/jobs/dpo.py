# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO, IPO, RPO."""

from dataclasses import dataclass

from nemo_aligner.config.fields import Job, key
from nemo_aligner.config.jobs.shared import NEW_DATA, wandb
from nemo_aligner.config.keys.common import ExpManager, Pretrained, SupervisedLoop, Trainer
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import Peft, TrainedModel
from nemo_aligner.config.keys.preferences import PairAlarms, WeighedPreferences, check_preferences
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import DIRECT_PREFERENCE_LOSSES


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


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    dpo = "model.dpo."
    check_preferences(values, "dpo")
    loss, smoothing = values.get(f"{dpo}preference_loss"), values.get(f"{dpo}label_smoothing")
    if smoothing and loss != "dpo":
        raise ConfigError(
            f"{dpo}label_smoothing={smoothing} belongs to {dpo}preference_loss=dpo, not {loss}; "
            "set it to 0."
        )


JOB = Job(
    "gpt_dpo",
    {
        "trainer": Trainer,
        "trainer.dpo": SupervisedLoop,
        "trainer.dpo.alarms": PairAlarms,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.dpo": DPO,
        "model.peft": Peft,
        "model.data": Pairs,
    },
    NEW_DATA | wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
    check=check,
    pairs=True,
    records="pair",
)
