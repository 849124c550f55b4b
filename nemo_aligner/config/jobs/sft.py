# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, and SteerLM 2.0."""

from nemo_aligner.config.data_rules import check_sft_data
from nemo_aligner.config.fields import Configuration, Section, key, section
from nemo_aligner.config.keys import common
from nemo_aligner.config.keys.data import Examples, PackedSet
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.values import Values
from nemo_aligner.core.estimators import LOSS_REDUCTIONS


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


class SFTModel(Section):
    """SFT.

    restore_from_path: base model; null: random weights. NeMo-Aligner: required
    answer_only_loss: False: the prompt counts in the loss too. NeMo-Aligner never read this key
        and always trained on the responses only
    loss_reduction: **new**, as for the PPO actor
    """

    restore_from_path: str | None = key(None)
    answer_only_loss: bool = key(True)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    steerlm2: SteerLM2 = section()


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_sft_data(values, dp, ("train_ds", "validation_ds"))


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
        "model": (TrainedModel, SFTModel),
        "model.peft": PolicyPeft,
        "model.data": Examples,
        "model.data.train_ds": PackedSet,
        "model.data.validation_ds": PackedSet,
        "model.data.test_ds": PackedSet,
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
    check=check,
    restore_key="model.restore_from_path",
    from_scratch=True,
    records="example",
    bare=("model.data.test_ds",),
)
