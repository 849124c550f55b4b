# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which class trains and serves which kind of reward model (`model.reward_model_type`)."""

from nemo_aligner.config.jobs.reward_model import RewardModelType, reward_model_type
from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
    MegatronGPTRegressionRewardModel,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

REWARD_MODEL_CLASS_DICT = {
    RewardModelType.BINARY_RANKING: MegatronGPTRewardModel,
    RewardModelType.REGRESSION: MegatronGPTRegressionRewardModel,
}


def reward_model_class(name: str | None) -> type[MegatronGPTRewardModel]:
    """The class for `model.reward_model_type`; None and errors as in `reward_model_type`."""
    return REWARD_MODEL_CLASS_DICT[reward_model_type(name)]


def held_out_text(
    kind: RewardModelType, metrics: dict[str, float], samples: float, num_attributes: int = 1
) -> str:
    """The result of a validation in words: "held-out accuracy 0.980 on 256 pairs". `metrics`,
    `samples`: an entry of `SupervisedTrainer.held_out`; each attribute has a correlation.
    """
    key, name, unit = "correlation", "correlation", "labels"
    if "acc" in metrics or kind is RewardModelType.BINARY_RANKING:
        key, name, unit = "acc", "accuracy", "pairs"
    value = f"{metrics[key]:.3f}" if key in metrics else "undefined"
    by_attribute = [
        f"{attribute}: {metrics[f'correlation_{attribute}']:.3f}"
        for attribute in range(num_attributes)
        if f"correlation_{attribute}" in metrics
    ]
    details = f" (by attribute {', '.join(by_attribute)})" if by_attribute else ""
    return f"held-out {name} {value} on {samples:.0f} {unit}{details}"
