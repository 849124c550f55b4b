# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling."""

from dataclasses import dataclass

from nemo_aligner.config.fields import Job, key
from nemo_aligner.config.jobs.shared import DATALOADER, of_actor
from nemo_aligner.config.keys.common import ExpManager, Pretrained, Trainer
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.keys.rollouts import Policy, RemoteRM, RolloutLoop
from nemo_aligner.config.rollout_rules import check_policy, check_responses_differ
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass
class RSPolicy(Policy):
    """Rejection sampling.

    Attributes:
        num_rollouts_per_prompt: responses generated to each prompt
        top_n_rollouts: how many of them, those with the highest rewards, are trained on
    """

    num_rollouts_per_prompt: int = key(4, at_least=1)
    top_n_rollouts: int = key(1, at_least=1)


def check(v: Values, dp: dict[str, int], ranks: int) -> None:
    check_policy(v, "rs", "remote_rm", dp)
    prompts = v.size("model.rs.num_rollout_samples")
    drawn = v.size("model.rs.num_rollouts_per_prompt")
    kept = v.size("model.rs.top_n_rollouts")
    check_top_n(kept, drawn)
    check_responses_differ(v, "model.rs.", drawn)
    batch = v.size("model.global_batch_size")
    if prompts * kept % batch:
        raise ConfigError(
            f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={kept} = "
            f"{prompts * kept} kept responses are not a multiple of "
            f"model.global_batch_size={batch}; change one of them."
        )


def check_top_n(top_n_rollouts: int, num_rollouts_per_prompt: int) -> None:
    """Raise `ConfigError` unless rejection sampling keeps at least one response to a prompt and no
    more than it draws.
    """
    if top_n_rollouts < 1:
        raise ConfigError(f"model.rs.top_n_rollouts={top_n_rollouts} must be at least 1.")
    if top_n_rollouts > num_rollouts_per_prompt:
        raise ConfigError(
            f"model.rs.top_n_rollouts={top_n_rollouts} is above "
            f"model.rs.num_rollouts_per_prompt={num_rollouts_per_prompt}: no more responses can "
            "be kept than were drawn; lower the first or raise the second."
        )


JOB = Job(
    "gpt_rs_actor",
    {
        "trainer": Trainer,
        "trainer.rs": RolloutLoop,
        "remote_rm": RemoteRM,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.rs": RSPolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    of_actor("rs", "val_global_rewards") | DATALOADER,
    check=check,
    records="prompt",
)
