# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the configuration that constructors may call too, on plain values."""

import pytest

from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.jobs.actors import check_top_n
from nemo_aligner.config.parallel_rules import check_expert_parallel
from nemo_aligner.config.rollout_rules import check_shared_queue
from nemo_aligner.config.server_rules import (
    check_one_reward_per_sample,
    check_reward_standardization,
    check_source_of_rewards,
)
from nemo_aligner.core.errors import ConfigError

TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "encoder_seq_length": 32}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((None, 2, 2, 1), "this model has none"),
        ((3, 2, 2, 1), "model.num_moe_experts=3 must be a multiple of 2"),
        ((4, 4, 3, 2), "_size=4 does not divide the 6 data-parallel"),
    ],
)
def test_expert_parallel(sizes, message):
    check_expert_parallel(None, 1, 3, 1)
    check_expert_parallel(4, 2, 1, 2)
    with pytest.raises(ConfigError, match=message):
        check_expert_parallel(*sizes)


def test_shared_queue():
    check_shared_queue("", False, 4)
    check_shared_queue("", None, 4)
    check_shared_queue("", True, 1)
    with pytest.raises(ConfigError, match=r"^trainer.ppo.batch_iterator.use_flask=True does not"):
        check_shared_queue("trainer.ppo.", True, 2)


def test_top_n():
    check_top_n(4, 4)
    with pytest.raises(ConfigError, match="top_n_rollouts=0 must be from 1 to"):
        check_top_n(0, 4)
    with pytest.raises(ConfigError, match="top_n_rollouts=5 must be .*=4: no more responses"):
        check_top_n(5, 4)


def test_source_of_rewards():
    check_source_of_rewards({"reward_models": None, "combine_rm_and_critic_server": True})
    check_source_of_rewards({"reward_models": {"a": 1}, "combine_rm_and_critic_server": False})
    with pytest.raises(ConfigError, match="has the critic server score rewards"):
        check_source_of_rewards({"reward_models": {"a": 1}, "combine_rm_and_critic_server": True})


@pytest.mark.parametrize(
    ("standardization", "message"),
    [
        ({"enable": True, "mean": None, "std": 1.0}, "needs model.reward_standardization.mean"),
        ({"enable": True, "mean": 0.0, "std": 0.0}, "std=0.0 must be above 0"),
    ],
)
def test_reward_standardization(standardization, message):
    check_reward_standardization({"reward_standardization": None})
    check_reward_standardization({"reward_standardization": {**standardization, "enable": False}})
    with pytest.raises(ConfigError, match=message):
        check_reward_standardization({"reward_standardization": standardization})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regression": {"num_attributes": 2}}, "gives 2 attributes"),
        ({"regression": {"attribute_weights": [1.0]}}, "only when attributes are merged"),
        ({"output_sequence": True}, "a number per token"),
    ],
)
def test_one_reward_per_text(changes, message):
    check_one_reward_per_sample(complete_model(TINY, "inference_rm"))
    merged = {"regression": {"num_attributes": 2, "merge_attributes": True}}
    check_one_reward_per_sample(complete_model(TINY | merged, "inference_rm"))
    with pytest.raises(ConfigError, match=message):
        check_one_reward_per_sample(complete_model(TINY | changes, "inference_rm"))
