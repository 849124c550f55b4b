# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which class trains and serves which kind of reward model (`model.reward_model_type`)."""

from enum import Enum

from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import MegatronGPTRegressionRewardModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.utils.errors import ConfigError


class RewardModelType(Enum):
    BINARY_RANKING = "binary_ranking"
    REGRESSION = "regression"


REWARD_MODEL_CLASS_DICT = {
    RewardModelType.BINARY_RANKING: MegatronGPTRewardModel,
    RewardModelType.REGRESSION: MegatronGPTRegressionRewardModel,
}


def reward_model_type(name: str | None) -> RewardModelType:
    """The kind that `model.reward_model_type` names; None (a checkpoint that does not say) means binary ranking.

    Raises:
        ConfigError: an unknown kind.
    """
    try:
        return RewardModelType.BINARY_RANKING if name is None else RewardModelType(name)
    except ValueError:
        available = ", ".join(kind.value for kind in RewardModelType)
        raise ConfigError(f"model.reward_model_type={name!r} is not supported; use {available}.") from None


def reward_model_class(name: str | None) -> type[MegatronGPTRewardModel]:
    """The class for `model.reward_model_type` (see `reward_model_type`)."""
    return REWARD_MODEL_CLASS_DICT[reward_model_type(name)]
