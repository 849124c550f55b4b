# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions of `launch/` that users' scripts call take a configuration with keys missing."""

import pytest
from omegaconf import OmegaConf

from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.experiment import build_checkpoint_callback, load_trainer_state
from nemo_aligner.launch.processes import resolve_and_create_trainer

pytestmark = pytest.mark.slow


def test_a_trainer_from_two_keys():
    cfg = OmegaConf.create({"trainer": {"devices": 1, "ppo": {"max_epochs": 3}}})
    trainer = resolve_and_create_trainer(cfg, "ppo")
    assert trainer.world_size == 1 and trainer.precision == "bf16-true"


@pytest.mark.parametrize(
    ("given", "kept"), [({}, 1), ({"checkpoint_callback_params": {"save_top_k": 3}}, 3)]
)
def test_checkpoints_from_a_section_with_keys_missing(tmp_path, given, kept):
    cfg = OmegaConf.create({"exp_manager": {"name": "mine"} | given})
    callback = build_checkpoint_callback(cfg, tmp_path, None, None, None)
    assert callback.enabled and callback.name == "mine" and callback.save_top_k == kept


class NoCheckpoints:
    root = "folder"

    def load_latest(self, resume_from=None):
        return None


def test_resuming_from_a_section_with_one_key():
    resume = {"exp_manager": {"resume_if_exists": True, "resume_ignore_no_checkpoint": False}}
    with pytest.raises(UserError, match="folder holds no complete checkpoint"):
        load_trainer_state(OmegaConf.create(resume), NoCheckpoints())
    cfg = OmegaConf.create({"exp_manager": {"resume_if_exists": False}})
    assert load_trainer_state(cfg, NoCheckpoints()) is None
