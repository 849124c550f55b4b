# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which class trains and serves which kind of reward model (`model.reward_model_type`)."""

from enum import Enum

from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.utils.errors import ConfigError


class RewardModelType(Enum):
    BINARY_RANKING = "binary_ranking"
    REGRESSION = "regression"


REWARD_MODEL_CLASS_DICT = {RewardModelType.BINARY_RANKING: MegatronGPTRewardModel}


def reward_model_class(name: str) -> type[MegatronGPTRewardModel]:
    """The class for `model.reward_model_type`.

    Raises:
        ConfigError: an unknown type, or one that is not built.
    """
    available = ", ".join(kind.value for kind in REWARD_MODEL_CLASS_DICT)
    try:
        return REWARD_MODEL_CLASS_DICT[RewardModelType(name)]
    except (ValueError, KeyError):
        raise ConfigError(f"model.reward_model_type={name!r} is not supported; use {available}.") from None
