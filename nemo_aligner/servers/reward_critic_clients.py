# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The remote critic and the remote reward models as objects of the actor job.

Every rank of the actor constructs a client and calls the same methods. Only the rank that owns the
data talks to the
server: the source rank of each model-parallel group for scoring, global rank 0 for training and
saving. Every call returns a future whose `result()` every rank calls: it brings the answer to all
ranks that need it, and a failure, with the remote traceback, to all of them.

A reward model may be served by several servers (servers/fleet.py: what happens when one dies), and
several reward
models may be combined: reward = sum of weight * reward of each.
"""

import functools
import json
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist
from nemo.utils import logging

from nemo_aligner.checkpoint.resume_pair import mismatch_remedy
from nemo_aligner.config.reward_models import read_reward_models
from nemo_aligner.core.errors import ConfigError, ServerRequestError, UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers import schema
from nemo_aligner.servers.fingerprint import tokenizer_fingerprint
from nemo_aligner.servers.fleet import Fleet, PendingRewards
from nemo_aligner.servers.futures import FutureResult
from nemo_aligner.servers.http_communicator import HTTPCommunicator, ServerUnreachableError
from nemo_aligner.servers.source_rank import (
    RankZeroFuture,
    await_on_source,
    get_future_result,
    outcome_or_error,
    try_on_source,
    wait_for_all,
)


class RMFutureResult(FutureResult):
    """Pending rewards of a rollout micro-batch.

    Args:
        rm_future: `PendingRewards`, or an exception of the attempt to send, on the source rank of
            the model-parallel group; ignored elsewhere.
        weights: of each reward model of an ensemble, by name; None for a single reward model.

    Attributes:
        reward_parts: after `result()`, the rewards float32 [b] of each reward model of an
            ensemble, by name, without their weights; empty for a single one.
    """

    def __init__(self, rm_future, weights: dict | None = None):
        self.rm_future, self.weights = rm_future, weights
        self.pending = () if rm_future is None else (rm_future,)
        self.reward_parts = {}

    def result(self) -> torch.Tensor:
        """Rewards float32 [b, 1] on this rank's device, on every rank of the model-parallel group.

        Raises:
            ServerRequestError: on every rank: of the model (with the remote traceback), an
                unusable answer, or no server left.
        """
        src, group = (
            parallel_state.get_model_parallel_src_rank(),
            parallel_state.get_model_parallel_group(),
        )
        answer = await_on_source(self.rm_future, src, group)
        parts = {
            name: torch.from_numpy(np.array(rewards)).to(get_device())
            for name, rewards in answer.items()
        }
        if self.weights is None:
            return next(iter(parts.values()))
        self.reward_parts = {name: rewards.flatten() for name, rewards in parts.items()}
        # Summed in float64, so that the order of the names does not show.
        return sum(weight * parts[name].double() for name, weight in self.weights.items()).float()


class RMCriticFutureResult(FutureResult):
    """Pending rewards [b] and values [b, S-1] of a rollout micro-batch.

    Args:
        critic_future: `PendingAnswer` of the critic, on the source rank of the model-parallel
            group.
        rm_future: `RMFutureResult` on every rank if the rewards come from other servers, else
        None.

    Attributes:
        reward_parts: as in `RMFutureResult`.
    """

    def __init__(
        self, critic_future, rm_future, combine_rm_and_critic_server: bool, og_seq_length: int
    ):
        self.critic_future = critic_future
        self.rm_future = rm_future
        self.combine_rm_and_critic_server = combine_rm_and_critic_server
        self.og_seq_length = og_seq_length
        self.pending = () if critic_future is None else (critic_future,)
        if rm_future is not None:
            self.pending += rm_future.pending
        self.reward_parts = {}

    def result(self) -> tuple:
        """(rewards float32 [b], values float32 [b, S-1]) on this rank's device; columns that were
        not sent are 0.
        """
        if self.combine_rm_and_critic_server:
            rewards, values = get_future_result(self.critic_future, "rewards", "values")
        else:
            rewards = self.rm_future.result()
            self.reward_parts = self.rm_future.reward_parts
            values = get_future_result(self.critic_future, "values")
        values = values[:, : self.og_seq_length - 1]
        values = torch.nn.functional.pad(values, (0, self.og_seq_length - 1 - values.shape[1]))
        return rewards.flatten(), values


class TrainFuture(RankZeroFuture):
    """A pending critic update."""

    def result(self) -> float:
        """The critic's mean loss over the update."""
        return float(super().result()["loss_mean"][0])


class SaveFuture(RankZeroFuture):
    """A pending critic checkpoint."""

    def result(self) -> int:
        """0 once the checkpoint is written."""
        return int(super().result()["status"][0])


def _scoring_payload(
    rollout_batch: dict, pad_to_length, setting: str, fingerprint: str | None = None
) -> dict:
    """Arrays of an infer request.

    Args:
        rollout_batch: `response_tokens` int64 [b, S], `response_lengths` [b] (prompt + response).
        pad_to_length: columns to send, the rest filled with 0; None sends the columns of the
            longest row.
        fingerprint: of the policy's tokenizer, for the server to compare; None leaves it out.

    Raises:
        UserError: S is above `pad_to_length`.
    """
    tokens = rollout_batch["response_tokens"].cpu()
    lengths = rollout_batch["response_lengths"].cpu().long()
    if pad_to_length is None:
        tokens = tokens[:, : int(lengths.max())]
    elif tokens.shape[1] > pad_to_length:
        raise UserError(
            f"a rollout of {tokens.shape[1]} tokens is longer than "
            f"{setting}.pad_to_length={pad_to_length}. "
            f"Raise {setting}.pad_to_length (up to the served model's encoder_seq_length) or set "
            "it to null, or "
            "shorten the prompts or length_params.max_length."
        )
    else:
        tokens = torch.nn.functional.pad(tokens, (0, pad_to_length - tokens.shape[1]))
    payload = {"tokens": tokens.long().numpy(), "sequence_lengths": lengths[:, None].numpy()}
    if fingerprint is not None:
        payload["tokenizer"] = np.full((len(lengths), 1), fingerprint.encode())
    return payload


def _used_values(rollout_batch: dict, columns: int) -> np.ndarray:
    """bool [b, columns]: True where a value of the response's transitions is (types.py)."""
    lengths = rollout_batch["response_lengths"].cpu()
    prompts = (
        rollout_batch["prompt_lengths"].cpu()
        if "prompt_lengths" in rollout_batch
        else torch.ones_like(lengths)
    )
    column = torch.arange(columns)
    return ((column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)).numpy()


class _Connecting:
    """The start of fleets as something to wait for on a source rank (see `wait_for_all`)."""

    def __init__(self, fleets: list):
        self._fleets = fleets

    def done(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        # A list, not a generator: each fleet says what it waits for, and that it has waited too
        # long.
        while not all([fleet.wait_until_ready(0.1) for fleet in self._fleets]):
            if time.monotonic() > deadline:
                return False
        return True

    def result(self) -> None:
        return None


class _RewardModels:
    """The reward models that `cfg` names. Every rank constructs one, together; source ranks hold
    the connections.

    Args:
        cfg: `remote_rm` or `remote_critic_rm` (see reward_models.py).
        communicator: its time limits are used, and closing it closes the connections.
        setting: name of the section.

    Raises:
        ConfigError: the section cannot work.
        ServerUnreachableError: on every rank of the job: no server of a reward model answers.
    """

    def __init__(self, cfg, communicator: HTTPCommunicator, setting: str):
        specs = read_reward_models(cfg, setting)
        self.weights = (
            None if specs[0].name is None else {spec.name: spec.weight for spec in specs}
        )
        self.fleets = {}
        if parallel_state.get_rank() == parallel_state.get_model_parallel_src_rank():
            self.fleets = {
                spec.name: Fleet(
                    spec,
                    schema.reward_model_endpoint(),
                    communicator.init_timeout_s,
                    communicator.inference_timeout_s,
                    first=parallel_state.get_data_parallel_rank(),
                )
                for spec in specs
            }
        for fleet in self.fleets.values():
            communicator.attach(fleet)
        try:
            wait_for_all([_Connecting(list(self.fleets.values()))] if self.fleets else [])
        except ServerRequestError as error:
            communicator.close()
            raise ServerUnreachableError(str(error)) from None

    def score(self, rollout_batch: dict, make_payload) -> RMFutureResult:
        """Send `make_payload()` (see `_scoring_payload`) to every reward model; returns at once.

        A reward that is code needs to know where the response starts: `prompt_lengths` go along
        when there are any.
        """

        def send():
            payload = make_payload()
            if "prompt_lengths" in rollout_batch:
                prompts = rollout_batch["prompt_lengths"].cpu().long()
                payload = {**payload, "prompt_lengths": prompts[:, None].numpy()}
            return PendingRewards(self.fleets, payload)

        return RMFutureResult(try_on_source(send), self.weights)


def _gather_rows(tensors: dict) -> dict | None:
    """Rows of all data-parallel ranks, in rank order, on global rank 0; None elsewhere.

    Args:
        tensors: name -> [b, width]; every rank of rank 0's data-parallel group calls it. Widths
            must be equal, b may differ.
    """
    group = parallel_state.get_data_parallel_group()
    size = parallel_state.get_data_parallel_world_size()
    if size == 1:
        return {name: tensor.cpu() for name, tensor in tensors.items()}
    rank = dist.get_rank()
    device = get_device()
    rows = torch.zeros(size, dtype=torch.int64, device=device)
    rows[parallel_state.get_data_parallel_rank()] = next(iter(tensors.values())).shape[0]
    dist.all_reduce(rows, group=group)
    most = int(rows.max())
    gathered = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(device)
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, most - tensor.shape[0])).contiguous()
        shares = [torch.empty_like(tensor) for _ in range(size)] if rank == 0 else None
        dist.gather(tensor, shares, dst=0, group=group)
        if rank == 0:
            gathered[name] = torch.cat(
                [share[:count] for share, count in zip(shares, rows.tolist())]
            ).cpu()
    return gathered if rank == 0 else None


def _training_payload(data: dict) -> dict | None:
    """Arrays of a train request for all data-parallel ranks on global rank 0; None elsewhere.

    Columns after the last response token of the whole batch are not sent. Data: `response_tokens`
    [b, S]; `returns`, `values` (of the rollout) and `mask` [b, S-1].
    """
    if parallel_state.get_data_parallel_src_rank() != 0:
        return None  # a model-parallel peer of a rank that sends the same rows
    mask = data["mask"]
    used = mask.bool().any(dim=0).nonzero()
    width = torch.tensor(
        [int(used.max()) + 2 if len(used) else 2], dtype=torch.int64, device=get_device()
    )
    if parallel_state.get_data_parallel_world_size() > 1:
        dist.all_reduce(
            width, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group()
        )
    width = int(width)
    rows = {
        "tokens": data["response_tokens"][:, :width].long(),
        "returns": data["returns"][:, : width - 1].float(),
        "prev_values": data["values"][:, : width - 1].float(),
        "mask": mask[:, : width - 1].float(),
    }
    if "sample_order" in data:
        rows["sample_order"] = data["sample_order"][:, None]
    gathered = _gather_rows(rows)
    if gathered is None:
        return None
    if "sample_order" in gathered:
        # The critic cuts its global batches from these rows: their order must not depend on the
        # number of actor ranks.
        order = gathered.pop("sample_order").flatten().argsort()
        gathered = {name: tensor[order] for name, tensor in gathered.items()}
    return {name: tensor.numpy() for name, tensor in gathered.items()}


class RemoteGPTRMCriticClient:
    """The remote critic, with the reward model on the same server or on one of its own.

    Args:
        cfg: `remote_critic_rm`: `pad_to_length`, `combine_rm_and_critic_server`,
            `critic.{name.{train,infer,save,status},ip,port}`; with separate servers
            `reward_model.{name,ip,port}` or `reward_models`; and optionally `init_timeout_s`,
            `inference_timeout_s`.
        tokenizer: of the policy; servers with another one refuse its texts. None has them not
        compare.

    Raises:
        ConfigError: the section cannot work.
        ServerUnreachableError: no server within `init_timeout_s`; progress is logged while
        waiting.
    """

    SETTING = "remote_critic_rm"

    def __init__(self, cfg, tokenizer=None):
        self.cfg = cfg
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.pad_to_length = cfg.get("pad_to_length", None)
        self.combine_rm_and_critic_server = cfg.get("combine_rm_and_critic_server", True)
        self.communicator = _communicator(cfg, self.SETTING)
        critic = cfg.critic
        names = critic.get("name", {})
        self.infer_name = names.get("infer", schema.CRITIC_INFER)
        self.train_name = names.get("train", schema.CRITIC_TRAIN)
        self.save_name = names.get("save", schema.CRITIC_SAVE)
        self.status_name = names.get("status", schema.CRITIC_STATUS)
        address = (critic.ip, critic.port)
        servers = dict.fromkeys((self.infer_name, self.train_name, self.save_name), address)
        endpoints = {
            self.infer_name: schema.critic_infer_endpoint(self.combine_rm_and_critic_server),
            self.train_name: schema.critic_train_endpoint(),
            self.save_name: schema.critic_save_endpoint(),
        }
        self.reward_models = None
        if not self.combine_rm_and_critic_server:
            self.reward_models = _RewardModels(cfg, self.communicator, self.SETTING)
        elif cfg.get("reward_models", None):
            raise ConfigError(
                f"{self.SETTING}.reward_models names servers of their own, but {self.SETTING}."
                "combine_rm_and_critic_server=True has the critic server score rewards; set it to "
                "False."
            )
        try:
            self.communicator.create_http_communicator_from_dict(servers, endpoints)
        except ServerUnreachableError:
            self.communicator.close()
            raise
        self.communicator.print_server_dict()

    def infer_rm_critic(self, rollout_batch: dict) -> RMCriticFutureResult:
        """Send a micro-batch (`response_tokens` [b, S], `response_lengths` [b]) to be scored;
        returns at once.

        An S above `pad_to_length`, as any error, is raised by the future's `result()`.
        """
        make_payload = functools.partial(
            _scoring_payload, rollout_batch, self.pad_to_length, self.SETTING, self.fingerprint
        )

        def send():
            payload = make_payload()
            check = functools.partial(
                schema.validate_response,
                schema.critic_infer_endpoint(self.combine_rm_and_critic_server),
                rows=payload["tokens"].shape[0],
                used=_used_values(rollout_batch, payload["tokens"].shape[1] - 1),
            )
            return self.communicator.send_data_to_server(self.infer_name, payload, check=check)

        rm_future = (
            None
            if self.reward_models is None
            else self.reward_models.score(rollout_batch, make_payload)
        )
        return RMCriticFutureResult(
            try_on_source(send),
            rm_future,
            self.combine_rm_and_critic_server,
            rollout_batch["response_tokens"].shape[1],
        )

    def train(self, rollout_batch: dict) -> TrainFuture:
        """Send this rank's rows, together with those of all data-parallel ranks, for a critic
        update.

        Args:
            rollout_batch: `response_tokens` int64 [b, S]; `returns`, `values`, `mask` [b, S-1];
                optionally `sample_order` int64 [b], each row's place among the rows of all ranks
                (else they go in rank order).
        """
        payload = _training_payload(rollout_batch)

        def send():
            request_id = np.array([uuid.uuid4().hex.encode()])
            return self.communicator.send_data_to_server(
                self.train_name, {**payload, "request_id": request_id}, batching=False
            )

        return TrainFuture(self._on_rank_zero(send))

    def save(self, actor_step: int | None = None) -> SaveFuture:
        """Have the critic write a checkpoint that belongs to `actor_step`."""
        data = {"dummy_var": np.zeros(1, dtype=np.int64)}
        if actor_step is not None:
            data["actor_step"] = np.array([actor_step], dtype=np.int64)
        return SaveFuture(
            self._on_rank_zero(
                lambda: self.communicator.send_data_to_server(self.save_name, data, batching=False)
            )
        )

    def status(self) -> dict:
        """{"actor_step", "critic_step", "saved_critic_step"} of the server, on every rank; and its
        "checkpoints", the folder of each by its actor step."""

        def ask():
            if self.status_name not in self.communicator.connections:
                self.communicator.add_server_by_name(
                    self.status_name,
                    self.cfg.critic.ip,
                    self.cfg.critic.port,
                    schema.critic_status_endpoint(),
                )
            data = {"dummy_var": np.zeros(1, dtype=np.int64)}
            return self.communicator.send_data_to_server(self.status_name, data, batching=False)

        answer = RankZeroFuture(self._on_rank_zero(ask)).result()
        checkpoints = json.loads(answer.pop("checkpoints")[0])
        numbers = {name: int(array[0]) for name, array in answer.items()}
        return {
            **numbers,
            "checkpoints": {int(step): folder for step, folder in checkpoints.items()},
        }

    def check_status(self, expected_actor_step: int, checkpoints: dict[int, str]) -> None:
        """Refuse to go on unless the critic's weights are those saved at `expected_actor_step` (0:
        a new run).

        Every rank calls it once, before the first rollout.

        Args:
            checkpoints: folder of each of the actor's complete checkpoints, by its step.

        Raises:
            UserError: on every rank; the message says how to bring the two jobs together.
        """
        status = self.status()
        have, step, saved = (
            status["actor_step"],
            status["critic_step"],
            status["saved_critic_step"],
        )
        where = f"{self.cfg.critic.ip}:{self.cfg.critic.port}"
        if have == schema.UNKNOWN_STEP and step == saved:
            logging.warning(
                f"the critic at {where} does not know which actor step its checkpoint belongs to; "
                f"going on from actor step {expected_actor_step} without that check"
            )
            return
        if have == expected_actor_step and step == saved:
            return
        last = f"the checkpoint of actor step {have}" if have > 0 else "its first weights"
        moved = (
            f", {step - saved} optimizer step(s) after {last}" if step != saved else f" at {last}"
        )
        remedy = mismatch_remedy(
            expected_actor_step, have, step != saved, checkpoints, status["checkpoints"]
        )
        raise UserError(
            f"actor and critic do not match: this actor is at step {expected_actor_step}, the "
            f"critic at {where} "
            f"is{moved}. {remedy}"
        )

    def _on_rank_zero(self, send):
        """`send()` on global rank 0, None elsewhere; an error is kept for `result()`, which all
        ranks call.
        """
        return outcome_or_error(send) if parallel_state.get_rank() == 0 else None

    def close(self) -> None:
        """End all connections."""
        self.communicator.close()


class RemoteGPTRMClient:
    """Remote reward models alone: one or several, each on one or several servers. Every rank
    constructs it, together.

    Args:
        cfg: `remote_rm`: `pad_to_length`, `reward_model.{name,ip,port}` or `reward_models`; `host`
            and `port` beside them win over those of `reward_model`; optionally `init_timeout_s`,
            `inference_timeout_s`.
        tokenizer: of the policy; servers with another one refuse its texts. None has them not
        compare.
        setting: name of the section, for messages.

    Raises:
        ConfigError: the section cannot work.
        ServerUnreachableError: no server within `init_timeout_s`; progress is logged while
        waiting.
    """

    def __init__(self, cfg, tokenizer=None, setting: str = "remote_rm"):
        self.cfg = cfg
        self.setting = setting
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.pad_to_length = cfg.get("pad_to_length", None)
        self.communicator = _communicator(cfg, setting)
        self.reward_models = _RewardModels(cfg, self.communicator, setting)

    def infer_rm(self, rollout_batch: dict) -> RMFutureResult:
        """Send a micro-batch (`response_tokens` [b, S], `response_lengths` [b], optionally
        `prompt_lengths` [b]) to be scored; returns at once. An S above `pad_to_length`, as any
        error, is raised by the future's `result()`.
        """
        make_payload = functools.partial(
            _scoring_payload, rollout_batch, self.pad_to_length, self.setting, self.fingerprint
        )
        return self.reward_models.score(rollout_batch, make_payload)

    def close(self) -> None:
        """End all connections."""
        self.communicator.close()


def _communicator(cfg, setting: str) -> HTTPCommunicator:
    timeouts = {
        name: cfg.get(name)
        for name in ("init_timeout_s", "inference_timeout_s")
        if cfg.get(name) is not None
    }
    return HTTPCommunicator(**timeouts, setting=setting)
