# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Trained reward models, ready to score: for the server and for an evaluation."""

from pathlib import Path

from lightning.pytorch import Trainer
from omegaconf import DictConfig

from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.reward_model_classes import reward_model_class


def load_reward_model(
    model_cfg: DictConfig, trainer: Trainer | None, restore_path: Path, key: str
) -> MegatronGPTRewardModel:
    """The reward model in `restore_path`; every rank calls it.

    Args:
        model_cfg: complete section `model`, with what the file says.
        key: that `restore_path` comes from, for the message.

    Raises:
        UserError: the weights hold no head that was trained to give rewards.
    """
    model_class = reward_model_class(model_cfg.reward_model_type)
    model = load_from_nemo(model_class, model_cfg, trainer, restore_path=restore_path)
    assert isinstance(model, MegatronGPTRewardModel)
    if not model.has_trained_head:
        raise UserError(
            f"{key}={restore_path} holds no head that was trained to give rewards: a "
            "language model has none, and a critic's gives values. Train a reward model from it "
            "(train_reward_model.py) and name that one."
        )
    model.prepare_for_inference()
    return model
