# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE."""

from dataclasses import dataclass

from nemo_aligner.config.fields import Job, key, section
from nemo_aligner.config.jobs.shared import of_actor
from nemo_aligner.config.keys.common import ExpManager, Pretrained, Trainer
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.keys.rollouts import (
    BatchIterator,
    Policy,
    PolicyTrtLlm,
    RemoteRM,
    RolloutAlarms,
    RolloutLoop,
    TrtLlm,
)
from nemo_aligner.config.rollout_rules import (
    check_compares_responses,
    check_policy,
    check_responses_differ,
)
from nemo_aligner.config.values import Values, require_multiple


@dataclass
class ReinforceAlarms(RolloutAlarms):
    """Alarms of REINFORCE.

    Attributes:
        sampling_mismatch: **new**, as for the PPO actor; the first needs a KL penalty
    """

    sampling_mismatch: float | None = key(0.05, above=0)


@dataclass
class ReinforceLoop(RolloutLoop):
    """REINFORCE.

    Attributes:
        initial_policy_kl_penalty: weight of the KL to the reference in the reward; 0: no
            reference
        use_absolute_kl: True in NeMo-Aligner: the absolute log-ratio in place of the KL
        num_rollouts_per_prompt: responses to each prompt, 2 or more
    """

    initial_policy_kl_penalty: float = key(0.01, at_least=0)
    use_absolute_kl: bool = key(False)
    num_rollouts_per_prompt: int = key(4, at_least=1)
    trt_llm: TrtLlm = section()
    batch_iterator: BatchIterator = section()
    alarms: ReinforceAlarms | None = section()


@dataclass
class ReinforcePolicy(Policy):
    """The actor of REINFORCE."""

    trt_llm: PolicyTrtLlm = section()


def check(v: Values, dp: dict[str, int], ranks: int) -> None:
    responses_key = "trainer.reinforce.num_rollouts_per_prompt"
    check_policy(v, "reinforce", "remote_rm", dp)
    responses = v.size(responses_key)
    check_compares_responses("REINFORCE", responses_key, responses)
    check_responses_differ(v, "model.reinforce.", responses, responses_key)
    prompts, batch = v.size("model.reinforce.num_rollout_samples"), "model.global_batch_size"
    name = f"model.reinforce.num_rollout_samples x {responses_key}={responses}"
    require_multiple(name, prompts * responses, {batch: v.size(batch)})


JOB = Job(
    "gpt_reinforce_actor",
    {
        "trainer": Trainer,
        "trainer.reinforce": ReinforceLoop,
        "remote_rm": RemoteRM,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.reinforce": ReinforcePolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    of_actor("reinforce", "val_rewards"),
    check=check,
    records="prompt",
)
