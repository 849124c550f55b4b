# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KTO."""

from dataclasses import dataclass

from nemo_aligner.config.fields import Job, key
from nemo_aligner.config.jobs.shared import DATALOADER, NEW_DATA, wandb
from nemo_aligner.config.keys.common import ExpManager, Pretrained, SupervisedLoop, Trainer
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import Peft, TrainedModel
from nemo_aligner.config.keys.preferences import (
    PreferenceAlarms,
    WeighedPreferences,
    check_not_both_0,
    check_preferences,
)
from nemo_aligner.config.values import Values


@dataclass
class KTO(WeighedPreferences):
    """KTO.

    Attributes:
        desirable_loss_weight, undesirable_loss_weight: weights of chosen and of rejected
            responses
    """

    desirable_loss_weight: float = key(1.0, at_least=0)
    undesirable_loss_weight: float = key(1.0, at_least=0)


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_preferences(values, "kto")
    check_not_both_0(
        values, ["model.kto.desirable_loss_weight", "model.kto.undesirable_loss_weight"]
    )


JOB = Job(
    "gpt_kto",
    {
        "trainer": Trainer,
        "trainer.kto": SupervisedLoop,
        "trainer.kto.alarms": PreferenceAlarms,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.kto": KTO,
        "model.peft": Peft,
        "model.data": Lines,
    },
    NEW_DATA | DATALOADER | wandb("nemo_aligner_kto", "rlhf_gpt3_kto"),
    check=check,
    records="labelled",
)
