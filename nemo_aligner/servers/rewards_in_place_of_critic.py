# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Remote reward models in the place of a remote critic, for the ways of PPO that need none.

The PPO trainer then stays as it is: it asks for rewards and values, and has the critic train and
save.
"""

from nemo_aligner.servers.futures import FutureResult
from nemo_aligner.servers.reward_critic_clients import (
    RemoteGPTRMClient,
    RemoteGPTRMCriticClient,
    RMFutureResult,
)


class RewardsWithoutValues(FutureResult):
    """`RMFutureResult` with the face of `RMCriticFutureResult`."""

    def __init__(self, rm_future: RMFutureResult):
        self.rm_future, self.pending = rm_future, rm_future.pending

    @property
    def reward_parts(self) -> dict:
        return self.rm_future.reward_parts

    def result(self) -> tuple:
        """(rewards float32 [b], None)."""
        return self.rm_future.result().flatten(), None


class NothingToDo(FutureResult):
    """What a critic that is not there has to say of an update or a checkpoint, at once."""

    def result(self) -> None:
        return None


class RewardsInPlaceOfCritic:
    """Plays the critic's part for advantage estimators without a critic: remote reward models give
    the rewards, there are no values, and nothing is to be trained or saved. Every rank constructs
    one, together.

    Args:
        cfg: `remote_critic_rm`, of which `critic` is not read; otherwise as for
            `RemoteGPTRMClient`, which says what is raised.
        tokenizer: of the policy.
    """

    def __init__(self, cfg, tokenizer=None):
        self.rm = RemoteGPTRMClient(cfg, tokenizer, RemoteGPTRMCriticClient.SETTING)
        self.communicator = self.rm.communicator

    def infer_rm_critic(self, rollout_batch: dict) -> RewardsWithoutValues:
        """As `RemoteGPTRMClient.infer_rm`."""
        return RewardsWithoutValues(self.rm.infer_rm(rollout_batch))

    def train(self, rollout_batch: dict) -> NothingToDo:
        """There is no critic to learn from it."""
        return NothingToDo()

    def save(self, actor_step: int | None = None) -> NothingToDo:
        """There is no critic to save."""
        return NothingToDo()

    def check_status(self, expected_actor_step: int, checkpoints: dict[int, str]) -> None:
        """There is no critic that could be at another step."""

    def close(self) -> None:
        """End all connections."""
        self.rm.close()
