# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The served reward models as objects of the job that trains.

A model may be served by several servers (fleet.py), and several reward models may be combined:
reward = sum of weight * reward of each. Every rank of the job constructs a client and calls the
same methods; only the source rank of each model-parallel group talks to the servers. b is the
number of samples of a data-parallel rank, S their padded length.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.access import client_tls, read_token
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.server_rules import RewardModelSpec, read_reward_models
from nemo_aligner.core.advantages import add_token_rewards, reward_at_last_token
from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.core.types import PPOTrainBatch, Rollout, Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers import schema
from nemo_aligner.servers.fleet import Fleet, ServerUnreachableError
from nemo_aligner.servers.futures import (
    FutureResult,
    FutureScores,
    PendingReply,
    SentRequest,
    await_on_model_source,
    then,
    try_on_source,
    wait_for_all,
)
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import Array, Arrays, RequestError

if TYPE_CHECKING:
    from nemo_aligner.servers.reward_function import RewardFunction

# The YAML file (conf/) that holds the defaults of a section.
_JOB_OF_SECTION = {
    "remote_rm": "gpt_rs_actor",
    "remote_critic_rm": "gpt_ppo_actor",
    "remote_teacher": "gpt_knowledge_distillation",
}


@dataclass(eq=False)
class RMFutureResult(FutureScores):
    """Pending rewards of a rollout micro-batch."""

    # replies by name of the reward model, on the source rank of the model-parallel group
    rm_future: PendingReply | Exception | None
    rollout: Rollout | None = None  # None, as in NeMo-Aligner: rewards of tokens are an error
    weights: Mapping[str, float] | None = None  # of an ensemble's reward models, by name

    def __post_init__(self) -> None:
        self.pending = () if self.rm_future is None else (self.rm_future,)

    def scores(self) -> Scores:
        reply = await_on_model_source(self.rm_future)
        parts = {name: _on_device(arrays["rewards"]).flatten() for name, arrays in reply.items()}
        of_tokens = {n: a["token_rewards"] for n, a in reply.items() if "token_rewards" in a}
        token_rewards = {name: self._of_transitions(a) for name, a in of_tokens.items()}
        if self.weights is None:
            (name,) = parts
            return Scores(parts[name], token_rewards=token_rewards.get(name))
        # Summed in float64, so that the order of the names makes no difference.
        weighted = [weight * parts[name].double() for name, weight in self.weights.items()]
        total = functools.reduce(torch.add, weighted).float()
        if not token_rewards:
            return Scores(total, parts=parts)
        assert self.rollout is not None  # as there are rewards of tokens
        lengths = self.rollout["response_lengths"]
        width = self.rollout["response_tokens"].shape[1]
        for name in parts.keys() - token_rewards.keys():
            token_rewards[name] = reward_at_last_token(parts[name], lengths, width)
        of_all = add_token_rewards(token_rewards, self.weights)
        return Scores(total, parts=parts, token_rewards=of_all)

    def _of_transitions(self, token_rewards: Array) -> Tensor:
        """[b, S-1], the reward of token t+1 in column t; NaN in columns that were not sent."""
        if self.rollout is None:
            raise ValueError("rewards of tokens need rollout, the micro-batch that was scored")
        width = self.rollout["response_tokens"].shape[1]
        rewards = _on_device(token_rewards)[:, 1:width]
        return torch.nn.functional.pad(rewards, (0, width - 1 - rewards.shape[1]), value=np.nan)


def _on_device(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array)).to(get_device())


class RewardModels:
    """The reward models that the section `setting` of `client` names (config/server_rules.py).
    Every rank constructs one, together; source ranks hold the connections. `ConfigError`: the
    section cannot work. `ServerUnreachableError`: see `RemoteClient.connect`.
    """

    def __init__(self, client: "RemoteClient", setting: str):
        specs = read_reward_models(client.cfg, setting)
        self.weights = {spec.name: spec.weight for spec in specs if spec.name is not None} or None
        self.fleets = client.connect(specs, schema.reward_model_endpoint())

    def score(self, rollout_batch: Rollout, make_payload: Callable[[], Arrays]) -> RMFutureResult:
        """Send `make_payload()`, and `prompt_lengths` if given, to each; returns at once."""

        def send() -> PendingReply:
            payload = make_payload()
            if "prompt_lengths" in rollout_batch:
                prompts = rollout_batch["prompt_lengths"].cpu().long()
                payload = {**payload, "prompt_lengths": prompts[:, None].numpy()}
            return send_to_fleets(self.fleets, dict.fromkeys(self.fleets, payload))

        return RMFutureResult(try_on_source(send), rollout_batch, self.weights)


def send_to_fleets(fleets: Mapping[str, Fleet], payloads: Mapping[str, Arrays]) -> PendingReply:
    """Send each fleet its arrays; the reply holds that of each by its name."""
    sent = {n: SentRequest(fleets[n].submit(p), fleets[n].describe) for n, p in payloads.items()}
    return PendingReply(sent, by_name=True)


def request_width(longest: int, pad_to_length: int | None, max_length: int | None) -> int:
    """Columns for `longest` tokens: `pad_to_length` or more, or rounded up to a limit."""
    if pad_to_length is not None:
        return max(longest, pad_to_length)
    if max_length is None:
        return longest
    # Triton hands over requests of equal width together, and shapes that come again are faster, so
    # widths should be few: eight per power of two (1/8 wider at most), multiples of 8 below 128.
    step = max(8, 1 << (longest.bit_length() - 4)) if longest >= 8 else 8
    return max(longest, min(-(-longest // step) * step, max_length))


def scoring_payload(
    rollout_batch: Rollout,
    pad_to_length: int | None,
    fingerprint: str | None = None,
    max_length: int | None = None,
) -> Arrays:
    """The arrays of an infer request, of `request_width`, padded with 0. They share no memory with
    the batch: `response_tokens` int64 [b, S], `response_lengths` [b] (prompt + response).
    `fingerprint`: of the policy's tokenizer. `RequestError`: no sample, or none has a token.
    """
    tokens = rollout_batch["response_tokens"].cpu()
    lengths = rollout_batch["response_lengths"].cpu().long()
    if not tokens.numel():
        raise RequestError(f"there is nothing to score in samples of shape {list(tokens.shape)}.")
    columns = request_width(int(lengths.max()), pad_to_length, max_length)
    # Cuts off columns where it is negative.
    tokens = torch.nn.functional.pad(tokens, (0, columns - tokens.shape[1]))
    sizes = lengths[:, None].clone().numpy()
    payload = {"tokens": tokens.long().numpy(), "sequence_lengths": sizes}
    if fingerprint is not None:
        payload["tokenizer"] = np.full((len(lengths), 1), fingerprint.encode())
    return payload


class ScoreSource(Protocol):
    """What gives the rewards of samples: `RewardModels`, `RewardsInJob` or an environment."""

    def score(self, rollout_batch: Rollout, make_payload: Callable[[], Arrays]) -> FutureScores:
        """The pending rewards of a micro-batch; see `RewardModels.score`."""


@dataclass(eq=False)
class RewardsInJob:
    """A `ScoreSource` for a reward of texts in the job that trains: each source rank scores."""

    function: "RewardFunction | None"  # what scores, on source ranks; None elsewhere
    # from the numbers of records, int64 [b], to their columns; None: they have none
    columns: Callable[[Tensor], Sequence[Mapping[str, Any]]] | None

    def score(
        self, rollout_batch: Rollout, make_payload: Callable[[], Arrays] | None = None
    ) -> RMFutureResult:
        def send() -> PendingReply:
            assert self.function is not None  # on a source rank
            rewards = self.function.submit(
                rollout_batch["response_tokens"],
                rollout_batch["response_lengths"],
                rollout_batch["prompt_lengths"],
                self.columns and self.columns(rollout_batch["record"]),
            )
            title = self.function.title
            sent = SentRequest(then(rewards, _as_reply), lambda: title)
            return PendingReply({title: sent}, by_name=True)

        return RMFutureResult(try_on_source(send), rollout_batch)


def _as_reply(rewards: np.ndarray) -> Arrays:
    if rewards.shape[1] == 1:
        return {"rewards": rewards}
    total = np.nansum(rewards.astype(np.float64), axis=1, keepdims=True).astype(np.float32)
    return {"rewards": total, "token_rewards": rewards}


class NoRewards(FutureScores):
    """A `ScoreSource` where nothing gives rewards, and what it gives: 0 for each sample."""

    def __init__(self, samples: int = 0):
        self._samples = samples

    def score(self, rollout_batch: Rollout, make_payload: Any = None) -> FutureScores:
        return NoRewards(len(rollout_batch["response_lengths"]))

    def scores(self) -> Scores:
        return Scores(torch.zeros(self._samples, device=get_device()))


class RemoteClient:
    """What the clients of all servers share. Every rank constructs one, together.

    Args:
        cfg: the section `setting`, else `ConfigError`. Missing keys have the YAML file's defaults.
        tokenizer: of the policy; servers with another one refuse its samples. None: no comparison.
        max_length: longest sample of the policy, for `request_width`; None: no rounding.
    """

    def __init__(
        self, cfg: DictConfig, setting: str, tokenizer: object | None, max_length: int | None
    ):
        known = setting if setting in _JOB_OF_SECTION else "remote_rm"
        cfg = self.cfg = complete(cfg, _JOB_OF_SECTION[known], known)
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.pad_to_length, self.max_length = cfg.get("pad_to_length"), max_length
        self._fleets: dict[str, Fleet] = {}
        self.communicator = HTTPCommunicator(
            cfg.init_timeout_s,
            cfg.inference_timeout_s,
            setting=setting,
            token=read_token(cfg.token_file, setting),
            tls=client_tls(cfg.tls_ca_file, setting),
        )

    def connect(
        self, specs: Sequence[RewardModelSpec], endpoint: schema.Endpoint
    ) -> dict[str, Fleet]:
        """The fleets of served models, by name, on the source rank of each model-parallel group;
        {} elsewhere. Every rank calls it, together. `ServerUnreachableError`, on every rank: no
        server of a model replies.
        """
        if parallel_state.get_rank() == parallel_state.get_model_parallel_src_rank():
            first = parallel_state.get_data_parallel_rank()
            for spec in specs:
                fleet = self.communicator.fleet(spec, endpoint, first)
                self._fleets[spec.name or spec.endpoint] = fleet
        try:
            wait_for_all(self._fleets.values())
        except ServerRequestError as error:
            self.close()
            raise ServerUnreachableError(str(error)) from None
        return self._fleets

    def payload(self, rollout_batch: Rollout) -> Arrays:
        """The arrays of the request for the scores of a micro-batch."""
        return scoring_payload(
            rollout_batch, self.pad_to_length, self.fingerprint, self.max_length
        )

    def close(self) -> None:
        for fleet in self._fleets.values():
            fleet.close()
        self.communicator.close()


class RemoteGPTRMClient(RemoteClient):
    """Remote reward models alone: one or several, each on one or several servers (a
    `RewardSource`). See `RemoteClient`; `score_source` gives the rewards in place of reward
    models. `ServerUnreachableError`: no server within `init_timeout_s`.
    """

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: object | None = None,
        setting: str = "remote_rm",
        max_length: int | None = None,
        score_source: ScoreSource | None = None,
    ):
        super().__init__(cfg, setting, tokenizer, max_length)
        self.reward_models: ScoreSource = score_source or RewardModels(self, setting)

    def infer_rm(self, rollout_batch: Rollout) -> FutureScores:
        """Send a micro-batch to be scored; returns at once. The future's `result()` gives the
        rewards float32 [b, 1], `scores()` all of the reply; both raise its error. `rollout_batch`:
        `response_tokens` [b, S], `response_lengths` [b], optionally `prompt_lengths` [b].
        """
        return self.reward_models.score(rollout_batch, lambda: self.payload(rollout_batch))


class NoCriticFuture(FutureResult[None]):
    """The outcome of an update or a checkpoint where there is no critic: None, at once."""

    def result(self) -> None:
        return None


class RewardsInPlaceOfCritic(RemoteGPTRMClient):
    """A `Critic` for estimators without one: reward models alone; `critic` of `cfg` is unread."""

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: object | None = None,
        max_length: int | None = None,
        score_source: ScoreSource | None = None,
    ):
        super().__init__(cfg, tokenizer, "remote_critic_rm", max_length, score_source)

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
