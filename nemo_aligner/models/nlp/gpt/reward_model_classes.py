# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which class trains and serves which kind of reward model (`model.reward_model_type`)."""

from enum import Enum

from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
    MegatronGPTRegressionRewardModel,
    training_loss,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel


class RewardModelType(Enum):
    BINARY_RANKING = "binary_ranking"
    REGRESSION = "regression"


REWARD_MODEL_CLASS_DICT = {
    RewardModelType.BINARY_RANKING: MegatronGPTRewardModel,
    RewardModelType.REGRESSION: MegatronGPTRegressionRewardModel,
}


def reward_model_type(name: str | None) -> RewardModelType:
    """The kind that `model.reward_model_type` names, or `ConfigError`; None: binary ranking."""
    try:
        return RewardModelType.BINARY_RANKING if name is None else RewardModelType(name)
    except ValueError:
        available = ", ".join(kind.value for kind in RewardModelType)
        raise ConfigError(
            f"model.reward_model_type={name!r} is not supported; use {available}."
        ) from None


def reward_model_class(name: str | None) -> type[MegatronGPTRewardModel]:
    """The class for `model.reward_model_type`; None and errors as in `reward_model_type`."""
    return REWARD_MODEL_CLASS_DICT[reward_model_type(name)]


def learns_labelled_pairs(cfg: DictConfig) -> bool:
    """Whether a model with the complete section `cfg` learns pairs of samples with labels."""
    return (
        reward_model_type(cfg.reward_model_type) is RewardModelType.REGRESSION
        and training_loss(cfg) in PREFERENCE_LOSSES
    )


def held_out_text(
    kind: RewardModelType, metrics: dict[str, float], samples: float, num_attributes: int = 1
) -> str:
    """The result of a validation in words: "held-out accuracy 0.980 on 256 pairs".

    Args:
        kind: of the reward model; one with labels that learns pairs has their accuracy too.
        metrics, samples: an entry of `SupervisedTrainer.held_out`.
        num_attributes: of the reward model; with several, the correlation of each is named.
    """
    key, name, unit = {
        RewardModelType.BINARY_RANKING: ("acc", "accuracy", "pairs"),
        RewardModelType.REGRESSION: ("correlation", "correlation", "labels"),
    }[RewardModelType.BINARY_RANKING if "acc" in metrics else kind]
    value = f"{metrics[key]:.3f}" if key in metrics else "undefined"
    by_attribute = [
        f"{attribute}: {metrics[f'correlation_{attribute}']:.3f}"
        for attribute in range(num_attributes)
        if f"correlation_{attribute}" in metrics
    ]
    details = f" (by attribute {', '.join(by_attribute)})" if by_attribute else ""
    return f"held-out {name} {value} on {samples:.0f} {unit}{details}"
