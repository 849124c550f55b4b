# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the configuration that constructors alone call, on plain values; those that a job's
start checks too are in test_config_checks.py.
"""

import pytest

from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.parallel_rules import parallel_factor
from nemo_aligner.config.rollout_rules import check_shared_queue
from nemo_aligner.config.server_rules import (
    check_one_reward_per_sample,
    check_reward_standardization,
)
from nemo_aligner.config.values import Values
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
    def check(experts, size, dp, cp):
        model = {"num_moe_experts": experts, "expert_model_parallel_size": size}
        values = Values({"model": model | {"context_parallel_size": cp}})
        assert parallel_factor(values, dp * cp, complete=True) == {"data parallel size": dp}

    check(None, 1, 3, 1)
    check(4, 2, 1, 2)
    with pytest.raises(ConfigError, match=message):
        check(*sizes)


def test_what_a_constructor_may_be_given():
    for use_flask, experts in ((False, 4), (None, 4), (True, 1)):
        check_shared_queue("", use_flask, experts)
    check_reward_standardization({"reward_standardization": None})
    standardization = {"enable": False, "mean": None, "std": 0.0}
    check_reward_standardization({"reward_standardization": standardization})
    standardization |= {"enable": True, "mean": 0.0}
    with pytest.raises(ConfigError, match="std=0.0 must be above 0"):
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
