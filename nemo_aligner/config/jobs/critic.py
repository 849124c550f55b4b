# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO: the critic's server."""

from dataclasses import dataclass

from nemo_aligner.config.fields import Job, key, section
from nemo_aligner.config.jobs.shared import PARAMS
from nemo_aligner.config.keys.common import Alarms, ExpManager, Pretrained, Trainer
from nemo_aligner.config.keys.model import Peft, RewardHead, TrainedModel
from nemo_aligner.config.keys.servers import Listening, Server
from nemo_aligner.config.server_rules import check_reward_standardization, check_serving
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import LOSS_REDUCTIONS


@dataclass
class CriticModel:
    """The critic.

    Attributes:
        loss_clip_val: clip range of the values; 0: no clipping
        loss_reduction: **new**, as for the actor
        offload_adam_states: as for the actor
    """

    loss_clip_val: float | None = key(0.2, at_least=0)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    offload_adam_states: bool = key(False)


@dataclass
class CriticServer(Listening):
    """The critic's loop.

    Attributes:
        require_lease: **new**: only the actor that holds the lease may train and save. False: so
            may a client that knows no lease, such as NeMo-Aligner's, while no actor holds it
        combine_rm_and_critic_server: score rewards too, by swapping weights
        max_steps: whichever comes first; -1: no limit. `max_steps` of the critic (10000) is the
            horizon of its learning rate, in updates
        gradient_clip_val: largest norm of the whole gradient; 0: no clipping
    """

    require_lease: bool = key(True)
    combine_rm_and_critic_server: bool = key(True)
    max_steps: int = key(10000, at_least=-1)
    gradient_clip_val: float | None = key(1.0, at_least=0)
    alarms: Alarms | None = section()


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_serving(values, "trainer.ppo")
    check_reward_standardization(values.get("model"))
    if values.get("model.save_hf") is True:
        raise ConfigError(
            "model.save_hf=True writes at the end of training, which a server does not have; use "
            "every_checkpoint."
        )


JOB = Job(
    "gpt_ppo_critic",
    {
        "trainer": Trainer,
        "trainer.ppo": CriticServer,
        "server": Server,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": (TrainedModel, RewardHead, CriticModel),
        "model.peft": Peft,
    },
    {
        "trainer.max_epochs": None,
        "exp_manager.name": "megatron_gpt_critic",
        f"{PARAMS}.monitor": "step",
        f"{PARAMS}.mode": "max",
        f"{PARAMS}.save_top_k": 0,
        f"{PARAMS}.filename": "megatron_gpt-{step}",
        f"{PARAMS}.save_nemo_on_train_end": False,
        "model.regression.merge_attributes": True,
    },
    # A critic serves until it is stopped: it has neither a time limit nor an end of training.
    without=frozenset(("trainer.max_time", "exp_manager.max_time_per_run")),
    check=check,
    inert=frozenset([f"{PARAMS}.save_nemo_on_train_end"]),
)
