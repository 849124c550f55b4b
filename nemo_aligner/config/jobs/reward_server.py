# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The server of rewards."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import ABSENT, Job, inert, key
from nemo_aligner.config.jobs.shared import NO_RECOMPUTATION, TOKENIZER, below
from nemo_aligner.config.keys.common import ServerMachines
from nemo_aligner.config.keys.model import Model, RewardHead
from nemo_aligner.config.keys.rollouts import RewardFunction
from nemo_aligner.config.keys.servers import Inference, Server
from nemo_aligner.config.server_rules import (
    check_kind_of_rewards,
    check_reward_standardization,
    check_serving,
)
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass
class RewardModelFile:
    """The model that a reward server serves.

    Attributes:
        rm_model_file: the reward model's `.nemo`; with `reward_fn` the `.nemo` whose tokenizer
            decodes (the policy's)
    """

    rm_model_file: str | None = key(None)


@dataclass
class RewardServerModel(Model):
    """A model that a reward server serves."""

    global_batch_size: Any = inert(0)


@dataclass
class RewardInference(Inference, RewardFunction):
    """A server of rewards.

    Attributes:
        micro_batch_size: as for the critic; `inference.micro_batch_size` is the former name of
            the second
    """

    micro_batch_size: Any = key("${model.forward_micro_batch_size}")


def check(v: Values, dp: dict[str, int], ranks: int) -> None:
    check_serving(v, "inference")
    check_reward_standardization(v.get("model"))
    check_kind_of_rewards(v, "inference")
    function = v.get("inference.reward_fn")
    if function is None:
        return
    if v.get("rm_model_file") is None and v.get("model.tokenizer.library") is None:
        raise ConfigError(
            f"inference.reward_fn={function} reads text, so it needs the tokenizer of the policy "
            "that it judges: set rm_model_file to the policy's .nemo, or model.tokenizer."
        )
    if ranks > 1:
        raise ConfigError(
            f"inference.reward_fn={function} is served by one process, but the job has {ranks} "
            "ranks; set trainer.devices=1, and more inference.reward_fn_workers if needed."
        )


JOB = Job(
    "inference_rm",
    {
        "": RewardModelFile,
        "trainer": ServerMachines,
        "server": Server,
        "inference": RewardInference,
        "model": (RewardServerModel, RewardHead),
    },
    {
        "inference.port": 5555,
        "inference.inference_micro_batch_size": "${.micro_batch_size}",
        "model.forward_micro_batch_size": 4,
        **below("model", dict.fromkeys(("output_sequence", "use_avg_pool", "seed"), ABSENT)),
        "model.force_head_dtype": ABSENT,
        **TOKENIZER,
        **NO_RECOMPUTATION,
    },
    check=check,
    restore_key="rm_model_file",
)
