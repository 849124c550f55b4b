# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models."""

from enum import Enum
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.fields import ABSENT, Configuration, Section, key
from nemo_aligner.config.keys import common
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import DEFAULT_MASK_VALUE, Peft, RewardHead, TrainedModel
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import PREFERENCE_LOSSES


class RMModel(Section):
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
    try:
        return RewardModelType.BINARY_RANKING if name is None else RewardModelType(name)
    except ValueError:
        available = ", ".join(kind.value for kind in RewardModelType)
        raise ConfigError(
            f"model.reward_model_type={name!r} is not supported; use {available}."
        ) from None


def training_loss(cfg: DictConfig) -> str:
    """What a model with the complete section `cfg` learns by: "regression" or one of
    `estimators.PREFERENCE_LOSSES`.

    NeMo-Aligner's documentation says `model.regression.loss_func`, its code reads
    `model.loss_func`; both are read here.

    Raises:
        ConfigError: an unknown loss, or two different ones.
    """
    known = ("regression", *PREFERENCE_LOSSES)
    written = {
        "model.loss_func": cfg.loss_func,
        "model.regression.loss_func": cfg.regression.loss_func,
    }
    for where, name in written.items():
        if name is not None and name not in known:
            raise ConfigError(f"{where}={name!r} is not supported; use one of {', '.join(known)}.")
    name, documented = written.values()
    if name not in (None, documented) and documented != "regression":
        raise ConfigError(
            f"model.loss_func={name} and model.regression.loss_func={documented} contradict "
            "each other; set only the latter."
        )
    return str(documented if name is None else name)


def learns_labelled_pairs(cfg: DictConfig) -> bool:
    """Whether a model with the complete section `cfg` learns pairs of samples with labels."""
    return (
        reward_model_type(cfg.reward_model_type) is RewardModelType.REGRESSION
        and training_loss(cfg) in PREFERENCE_LOSSES
    )


REWARD_MODEL_JOB = Configuration(
    "training_rm",
    {
        **common.FROM_CHECKPOINT,
        "trainer.rm": RMLoop,
        "model": (TrainedModel, RewardHead, RMModel),
        "model.peft": Peft,
        "model.data": Lines,
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
        "model.regression.loss_mask_val": DEFAULT_MASK_VALUE,
        "model.regression.loss_func": "regression",
        "model.regression.load_rm_head_weights": False,
        **common.below(
            "model.reward_standardization", dict.fromkeys(("enable", "mean", "std"), ABSENT)
        ),
    },
    without=frozenset(["model.data.allow_empty_prompt"]),
    from_scratch=True,
    pairs=True,
    records="scored",
)
