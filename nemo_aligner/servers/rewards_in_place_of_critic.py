# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Remote reward models in place of a remote critic, for advantage estimators that need none.

The PPO trainer then stays as it is: it asks for scores, and has the critic train and save.
"""

from omegaconf import DictConfig

from nemo_aligner.core.types import PPOTrainBatch, Rollout
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.servers.futures import FutureResult, FutureScores
from nemo_aligner.servers.reward_client import RemoteGPTRMClient, ScoreSource


class NoCriticFuture(FutureResult[None]):
    """The outcome of an update or a checkpoint where there is no critic: None, at once."""

    def result(self) -> None:
        return None


class RewardsInPlaceOfCritic(RemoteGPTRMClient):
    """A `Critic` for advantage estimators without a critic.

    Remote reward models give the rewards; nothing is trained or saved. Every rank constructs one.

    Args:
        cfg: `remote_critic_rm`, of which `critic` is not read; otherwise as for
            `RemoteGPTRMClient`, which also lists the errors and the other arguments.
    """

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: object | None = None,
        max_length: int | None = None,
        score_source: ScoreSource | None = None,
    ):
        setting = RemoteGPTRMCriticClient.SETTING
        super().__init__(cfg, tokenizer, setting, max_length, score_source)

    def infer_rm_critic(self, rollout_batch: Rollout) -> FutureScores:
        return self.infer_rm(rollout_batch)

    def train(self, rollout_batch: PPOTrainBatch) -> NoCriticFuture:
        return NoCriticFuture()

    def save(self, actor_step: int | None = None) -> NoCriticFuture:
        return NoCriticFuture()

    def status(self) -> None:
        """None: there is no critic."""

    def go_to(self, actor_step: int) -> bool:
        return True

    def check_status(self, expected_actor_step: int, checkpoints: dict[int, str]) -> None:
        """Do nothing: there is no critic that could be at another step."""
