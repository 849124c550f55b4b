# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The remote critic as an object of the actor job.

Every rank of the actor constructs a client and calls the same methods. The source rank of each
model-parallel group sends for scoring, global rank 0 for training and saving. Every call returns a
future whose `result()` every rank calls: it brings the outcome, or the error, to all of them.
"""

import dataclasses
import json
import uuid
from typing import Any, TypedDict, cast

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.checkpoint.folders import mismatch_remedy, step_to_resume
from nemo_aligner.config.server_rules import check_source_of_rewards
from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.core.types import PPOTrainBatch, Rollout, Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, rebalance_nd_tensor
from nemo_aligner.servers import schema
from nemo_aligner.servers.futures import (
    Awaitable,
    FutureScores,
    PendingReply,
    RankZeroFuture,
    get_future_result,
    try_on_source,
)
from nemo_aligner.servers.schema import Arrays
from nemo_aligner.servers.scoring_clients import RemoteClient, RewardModels, ScoreSource
from nemo_aligner.servers.served_model import ADDITIONS

# In place of a reply, on rank 0: of a server without `critic_status`, and of a lease.
_NO_STATUS = PendingReply({}, by_name=True)
_WITHOUT_STATUS = {a.name: a.without for a in ADDITIONS}[schema.CRITIC_STATUS]


class CriticStatus(TypedDict):
    """Where a critic server stands."""

    actor_step: int  # of its last checkpoint; UNKNOWN_STEP if that does not say
    critic_step: int  # optimizer updates of the weights in memory
    saved_critic_step: int  # optimizer updates of the last checkpoint
    checkpoints: dict[int, str]  # folder of each checkpoint, by its actor step


@dataclasses.dataclass(eq=False)
class RMCriticFutureResult(FutureScores):
    """Pending rewards and values of a rollout micro-batch."""

    critic_future: PendingReply | Exception | None  # on the model-parallel source rank
    rm_future: FutureScores | None  # on every rank if the rewards come from other servers
    combine_rm_and_critic_server: bool  # the critic's reply holds the rewards too
    og_seq_length: int  # S of the micro-batch

    def __post_init__(self) -> None:
        self.pending = () if self.critic_future is None else (self.critic_future,)
        if self.rm_future is not None:
            self.pending += self.rm_future.pending

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Rewards float32 [b] and values float32 [b, S-1], as NeMo-Aligner's client gives them."""
        scores = self.scores()
        return scores.rewards, scores.values

    def scores(self) -> Scores:
        """Wait for the scores on this rank's device; values of columns not sent are 0."""
        if self.rm_future is None:
            rewards, values = get_future_result(self.critic_future, "rewards", "values")
            scores = Scores(rewards.flatten())
        else:
            scores = self.rm_future.scores()
            (values,) = get_future_result(self.critic_future, "values")
        values = values[:, : self.og_seq_length - 1]
        values = torch.nn.functional.pad(values, (0, self.og_seq_length - 1 - values.shape[1]))
        return dataclasses.replace(scores, values=values)


class TrainFuture(RankZeroFuture[float]):
    def result(self) -> float:
        """Wait for the update and return the critic's mean loss over it."""
        return self.reply()["loss_mean"].item(0)


class SaveFuture(RankZeroFuture[int]):
    def result(self) -> int:
        """Return 0 once the checkpoint is written."""
        return self.reply()["status"].item(0)


class StatusFuture(RankZeroFuture[CriticStatus | None]):
    def result(self) -> CriticStatus | None:
        """Wait for the status and return it; None from a server that cannot say."""
        reply = self.reply()
        if not reply:
            return None
        folders = json.loads(reply["checkpoints"][0])
        names = "actor_step", "critic_step", "saved_critic_step"
        status: dict[str, Any] = {name: int(reply[name][0]) for name in names}
        status["checkpoints"] = {int(step): folder for step, folder in folders.items()}
        return cast(CriticStatus, status)


class RemoteGPTRMCriticClient(RemoteClient):
    """The remote critic, with the reward model on the same server or on its own (a `Critic`); see
    `RemoteClient`. `cfg`: `remote_critic_rm`. `score_source`: gives the rewards in place of reward
    models, only with separate servers. `ServerUnreachableError`: none within `init_timeout_s`.
    `ServerMismatchError`: an endpoint is missing, is no critic's, or lacks the rewards.
    """

    SETTING = "remote_critic_rm"

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: object | None = None,
        max_length: int | None = None,
        score_source: ScoreSource | None = None,
    ):
        super().__init__(cfg, self.SETTING, tokenizer, max_length)
        cfg = self.cfg
        self.combine_rm_and_critic_server = cfg.combine_rm_and_critic_server
        names = cfg.critic.name
        self.infer_name, self.train_name, self.save_name = names.infer, names.train, names.save
        # Not in the YAML file: NeMo-Aligner's critic has no such endpoint.
        self.status_name = names.get("status", schema.CRITIC_STATUS)
        self.resume_name = names.get("resume", schema.CRITIC_RESUME)
        check_source_of_rewards(cfg)
        self.reward_models: ScoreSource | None = score_source
        if score_source is None and not self.combine_rm_and_critic_server:
            self.reward_models = RewardModels(self, self.SETTING)
        self._connect()

    def _connect(self) -> None:
        endpoints = {
            self.infer_name: schema.critic_infer_endpoint(self.combine_rm_and_critic_server),
            self.train_name: schema.critic_train_endpoint(),
            self.save_name: schema.critic_save_endpoint(),
        }
        servers = dict.fromkeys(endpoints, (self.cfg.critic.ip, self.cfg.critic.port))

        def take_lease() -> Awaitable:
            self.communicator.connections[self.train_name].take_lease()
            return _NO_STATUS

        try:
            self.communicator.create_http_communicator_from_dict(servers, endpoints)
            StatusFuture(try_on_source(take_lease, 0)).result()
        except (UserError, ServerRequestError):
            self.close()
            raise
        self.communicator.print_server_dict()

    def infer_rm_critic(self, rollout_batch: Rollout) -> RMCriticFutureResult:
        """As `RemoteGPTRMClient.infer_rm`; the future's `result()` gives (rewards, values)."""

        def send() -> PendingReply:
            payload = self.payload(rollout_batch)
            used = used_values(rollout_batch, payload["tokens"].shape[1] - 1)
            return self.communicator.send_data_to_server(self.infer_name, payload, used=used)

        sent, rm_future = try_on_source(send), None
        if self.reward_models is not None:
            payload = lambda: self.payload(rollout_batch)
            rm_future = self.reward_models.score(rollout_batch, payload)
        width = rollout_batch["response_tokens"].shape[1]
        return RMCriticFutureResult(sent, rm_future, self.combine_rm_and_critic_server, width)

    def train(self, rollout_batch: PPOTrainBatch) -> TrainFuture:
        """Have the critic train on all ranks' batches (`training_payload`); returns at once."""
        payload = training_payload(rollout_batch)
        if payload is not None:  # on rank 0
            payload["request_id"] = np.array([uuid.uuid4().hex.encode()])
        return TrainFuture(try_on_source(lambda: self._send(self.train_name, payload), 0))

    def save(self, actor_step: int | None = None) -> SaveFuture:
        """Have the critic write a checkpoint that belongs to `actor_step`; returns at once."""
        data = {"dummy_var": np.zeros(1, dtype=np.int64)}
        if actor_step is not None:
            data["actor_step"] = np.array([actor_step], dtype=np.int64)
        return SaveFuture(try_on_source(lambda: self._send(self.save_name, data), 0))

    def _send(self, name: str, data: Arrays | None) -> PendingReply:
        assert data is not None  # on rank 0
        return self.communicator.send_data_to_server(name, data, batching=False)

    def status(self) -> CriticStatus | None:
        """Where the server stands; every rank calls it. None: no actor step in its checkpoints."""

        def ask() -> Awaitable:
            # What `critic_save` lists says for certain which kind of server it is.
            if not self.communicator.served[self.save_name].lists("actor_step"):
                return _NO_STATUS
            data = {"dummy_var": np.zeros(1, dtype=np.int64)}
            return self._send_to_added(self.status_name, schema.critic_status_endpoint(), data)

        return StatusFuture(try_on_source(ask, 0)).result()

    def _send_to_added(self, name: str, endpoint: schema.Endpoint, data: Arrays) -> PendingReply:
        if name not in self.communicator.connections:
            address = self.cfg.critic.ip, self.cfg.critic.port
            self.communicator.add_server_by_name(name, *address, endpoint)
        return self._send(name, data)

    def go_to(self, actor_step: int) -> bool:
        """Have the critic load its checkpoint of `actor_step`, unless its weights are those; every
        rank calls it. False: that checkpoint is damaged, and the critic has set it aside.
        `ServerRequestError`: it could not for another reason.
        """
        data = {"actor_step": np.array([actor_step], dtype=np.int64)}

        def ask() -> PendingReply:
            return self._send_to_added(self.resume_name, schema.critic_resume_endpoint(), data)

        try:
            StatusFuture(try_on_source(ask, 0)).result()
        except ServerRequestError as error:
            status = self.status()
            if status is None or actor_step in status["checkpoints"]:
                raise
            step = f"actor step {actor_step}"
            logging.warning(f"the critic has no whole checkpoint of {step}: {error}")
            return False
        return True

    def check_status(self, expected_actor_step: int, checkpoints: dict[int, str]) -> None:
        """Raise unless the critic's weights are those saved at `expected_actor_step`, 0 for a new
        run; it goes back to a checkpoint of them. Every rank calls it once, before the first
        rollout. A server that cannot say where it stands is not checked, with a warning.
        `checkpoints`: the actor's complete ones, folder by step. `UserError`, on every rank: the
        remedy.
        """
        status = self.status()
        where = f"{self.cfg.critic.ip}:{self.cfg.critic.port}"
        if status is None:
            logging.warning(
                f"the critic server at {where} has no endpoint '{self.status_name}': "
                f"{_WITHOUT_STATUS}. When you restart one job, see to it that the other one loads "
                f"the checkpoint of the same step (now {expected_actor_step})."
            )
            return
        have, unsaved = status["actor_step"], status["critic_step"] - status["saved_critic_step"]
        if have == schema.UNKNOWN_STEP and not unsaved:
            logging.warning(
                f"the critic at {where} does not know which actor step its checkpoint belongs to; "
                f"continuing from actor step {expected_actor_step} without that check"
            )
            return
        if have == expected_actor_step and not unsaved:
            return
        steps = {expected_actor_step} - {0}
        if step_to_resume(steps, status["checkpoints"]) == expected_actor_step:
            if self.go_to(expected_actor_step):
                return
            status = self.status() or status
        last = f"the checkpoint of actor step {have}" if have > 0 else "its first weights"
        moved = f", {unsaved} optimizer step(s) after {last}" if unsaved else f" at {last}"
        remedy = mismatch_remedy(expected_actor_step, have, checkpoints, status["checkpoints"])
        raise UserError(
            f"actor and critic do not match: this actor is at step {expected_actor_step}, the "
            f"critic at {where} is{moved}. {remedy}"
        )


def used_values(rollout_batch: Rollout, columns: int) -> np.ndarray:
    """Return bool [b, columns]: True where the critic's value of a response token is needed."""
    lengths = rollout_batch["response_lengths"].cpu()
    prompts = rollout_batch.get("prompt_lengths", torch.ones_like(lengths)).cpu()
    column = torch.arange(columns)
    return ((column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)).numpy()


def training_payload(batch: PPOTrainBatch) -> Arrays | None:
    """Return the arrays of a train request for all data-parallel ranks on global rank 0, which
    share no memory with `batch`. Every rank calls it; ranks above 0 get None. Columns after the
    last response token of all samples are not sent.

    `batch`: this rank's `response_tokens` int64 [b, S]; `returns`, `values` (of the rollout) and
    `mask` [b, S-1]; optionally `sample_order` int64 [b], each sample's place among those of all
    ranks (else they go in rank order).
    """
    if parallel_state.get_data_parallel_src_rank() != 0:
        return None  # a model-parallel peer of a rank that sends the same samples
    group = parallel_state.get_data_parallel_group()
    several = parallel_state.get_data_parallel_world_size() > 1
    mask = batch["mask"]
    used = mask.bool().any(dim=0).nonzero()
    own = int(used.max()) + 2 if len(used) else 2
    width = max(gathered(own, group)) if several else own
    samples = {
        "tokens": batch["response_tokens"][:, :width].long(),
        "returns": batch["returns"][:, : width - 1].float(),
        "prev_values": batch["values"][:, : width - 1].float(),
        "mask": mask[:, : width - 1].float(),
    }
    if "sample_order" in batch:
        samples["order"] = batch["sample_order"]
    if several:
        samples = {name: rebalance_nd_tensor(each, group) for name, each in samples.items()}
    if parallel_state.get_rank() != 0:
        return None
    # The critic cuts its global batches from these samples: their order must not depend on the
    # number of actor ranks. Copied: the batch is the caller's, and sending goes on.
    order = samples.pop("order", torch.arange(len(samples["mask"]))).cpu().argsort()
    return {name: tensor.cpu()[order].numpy() for name, tensor in samples.items()}
