# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, and SteerLM 2.0."""

from dataclasses import dataclass

from nemo_aligner.config.data_rules import check_sft_data
from nemo_aligner.config.fields import Configuration, key, section
from nemo_aligner.config.keys.common import (
    FROM_SCRATCH,
    NO_LAYERS,
    NO_RECOMPUTATION,
    OF_SFT,
    SIZES,
    TRAINS,
    VALIDATION_SET,
    VALIDATION_SIZES,
    Alarms,
    Named,
    SupervisedLoop,
    below,
)
from nemo_aligner.config.keys.data import Examples, PackedSet
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import LOSS_REDUCTIONS


@dataclass
class SFTAlarms(Alarms):
    """Alarms of SFT.

    Attributes:
        effective_responses: **new**, of `train_steerlm2.py` alone: threshold of an alarm, see
            [alarms](troubleshooting.md#alarms); null switches it off
    """

    effective_responses: float | None = key(1.05, at_least=1)


@dataclass
class SteerLM2:
    """SteerLM 2.0.

    Attributes:
        micro_batch_size, forward_micro_batch_size: of `train_steerlm2.py` alone: responses per
            micro-batch, and per forward pass that gives their weights. The sizes of `train_ds`
            count prompts ([SteerLM](algorithms.md#steerlm-20))
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

    restore_from_path: str | None = key(None)
    answer_only_loss: bool = key(True)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    steerlm2: SteerLM2 = section()


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_sft_data(values, dp, ("train_ds", "validation_ds"))


def check_steerlm2(values: Values) -> None:
    """Raise `ConfigError` unless a whole configuration of `gpt_sft.yaml`, which has passed
    `check_values`, can train SteerLM 2.0.
    """
    key = JOB.restore_key
    if values.get(key) is None:
        raise ConfigError(
            f"{key} is not set; SteerLM 2 starts from the policy that sampled the responses: give "
            "its .nemo file or folder."
        )
    if not values.get("model.data.chat"):
        raise ConfigError(
            "model.data.chat=False: data of SteerLM 2 are in NeMo's chat format; set it to True."
        )
    reduction = values.get("model.loss_reduction")
    if reduction != "token":
        raise ConfigError(
            f"model.loss_reduction={reduction}: the loss of SteerLM 2 has a reduction of its own, "
            "a mean over prompts; leave it at token."
        )
    for split in ("train_ds", "validation_ds"):
        if values.get(f"model.data.{split}.packed_sequence"):
            raise ConfigError(
                f"model.data.{split}.packed_sequence=True: responses of SteerLM 2 are not packed; "
                "set it to False, and model.dynamic_micro_batch_tokens for short ones."
            )


_SIZES = {name: f"${{model.data.train_ds.{name}}}" for name in SIZES}

JOB = Configuration(
    "gpt_sft",
    {
        "": Named,
        **TRAINS,
        "trainer.sft": SupervisedLoop,
        "trainer.sft.alarms": SFTAlarms,
        "model": (TrainedModel, SFTModel),
        "model.peft": PolicyPeft,
        "model.data": Examples,
        "model.data.train_ds": PackedSet,
        "model.data.validation_ds": PackedSet,
        "model.data.test_ds": PackedSet,
    },
    {
        **OF_SFT,
        **FROM_SCRATCH,
        **NO_RECOMPUTATION,
        **NO_LAYERS,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        **below("model", _SIZES),
        **below("model.data.validation_ds", VALIDATION_SET | _SIZES),
    },
    required=VALIDATION_SIZES,
    check=check,
    restore_key="model.restore_from_path",
    from_scratch=True,
    records="example",
    bare=("model.data.test_ds",),
)
