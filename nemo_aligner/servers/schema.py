# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire format between an actor job and the critic and reward servers, for both sides.

An `Endpoint` lists its tensors by name, dtype and shape; client and server check requests and
replies against it (validation.py). N is the number of samples, S the padded token length;
per-transition tensors have width S-1, and column t belongs to the prediction of token t+1.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.config.server_rules import REWARD_MODEL
from nemo_aligner.core.errors import UserError

if TYPE_CHECKING:
    from pytriton.model_config import Tensor

# Most samples of a scoring request: between two requests of a client others have their turn.
MOST_ROWS = 512

# Names of the critic's endpoints; those of another server are in `remote_critic_rm.critic.name`.
CRITIC_INFER = "critic_infer"
CRITIC_TRAIN = "critic_train"
CRITIC_SAVE = "critic_save"
CRITIC_RESUME = "critic_resume"
CRITIC_STATUS = "critic_status"
TEACHER_LOGITS = "teacher_logits"  # of a teacher; `remote_teacher.name`

# `actor_step` of a critic that does not know which actor step its weights belong to.
UNKNOWN_STEP = -1

Array = np.ndarray[Any, Any]  # of a request or a reply
Arrays = dict[str, Array]  # by wire name

Handler = Callable[..., Arrays]  # of the requests to an endpoint: arrays by wire name, both ways


class RequestError(UserError):
    """A request that does not fit its endpoint: names the tensor, its fault, what is expected."""


class ReplyError(UserError):
    """A reply that cannot be used: names the tensor, what came, what is expected, the remedy."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request or reply."""

    name: str  # its name on the wire
    dtype: type  # numpy dtype; `np.bytes_` for strings
    shape: tuple[int, ...]  # without the batch dimension for a batching endpoint; -1 is any size
    meaning: str = ""  # what it holds, for error messages
    optional: bool = False  # a request may leave it out

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for got, want in zip(shape, self.shape)
        )

    def describe(self, batching: bool) -> str:
        sizes = ["any" if size == -1 else size for size in self.shape]
        dtype = np.dtype(self.dtype).name
        return f"{self.name}: {dtype} {['N', *sizes] if batching else sizes}"


@dataclass(frozen=True)
class Endpoint:
    """A served model: default name, tensors, and whether Triton merges requests of clients."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: bool

    @property
    def is_exclusive(self) -> bool:
        """Whether its requests change the server's state: one client at a time may send them."""
        return not self.batching and self.name != CRITIC_STATUS

    @property
    def has_fixed_size(self) -> bool:
        """Whether its requests hold a few numbers, never samples."""
        return not self.batching and not any(-1 in spec.shape for spec in self.inputs)

    def empty_request(self, rows: int) -> Arrays:
        """Zeros in the form of a request of `rows` samples, with no more than Triton asks for."""
        required = [spec for spec in self.inputs if not spec.optional]
        numbers = [spec for spec in self.inputs if spec.dtype is not np.bytes_]
        return self._zeros(required or numbers[:1], rows)

    def empty_reply(self, rows: int) -> Arrays:
        """Zeros in the form of the reply to a request of `rows` samples."""
        return self._zeros(self.outputs, rows)

    def _zeros(self, specs: Iterable[TensorSpec], rows: int) -> Arrays:
        first = (rows,) if self.batching else ()
        return {
            spec.name: np.zeros((*first, *(max(size, 1) for size in spec.shape)), spec.dtype)
            for spec in specs
        }


_optional = functools.partial(TensorSpec, optional=True)
_SCORING_INPUTS = (
    _optional("sentences", np.bytes_, (-1,), "text, UTF-8; wins over `tokens`"),
    _optional("tokens", np.int64, (-1,), "token ids, right-padded [N, S]"),
    _optional("sequence_lengths", np.int64, (-1,), "number of real tokens of each row [N, 1]"),
)
# The same ids mean other tokens to another tokenizer; one per sample, as Triton merges requests.
_FINGERPRINT = "fingerprint of the sender's tokenizer (`tokenizer_fingerprint`) [N, 1]"
_TOKENIZER = _optional("tokenizer", np.bytes_, (1,), _FINGERPRINT)
# Where the response starts: a reward that is a function gets prompt and response apart.
_PROMPTS = "number of prompt tokens of each row [N, 1]; models do without"
_PROMPT_LENGTHS = _optional("prompt_lengths", np.int64, (1,), _PROMPTS)
_DUMMY = TensorSpec("dummy_var", np.int64, (1,), "any number (Triton needs an input)")
_STATUS = (
    TensorSpec("actor_step", np.int64, (1,), "actor step of the last checkpoint; -1 unknown"),
    TensorSpec("critic_step", np.int64, (1,), "optimizer steps of the weights in memory"),
    TensorSpec("saved_critic_step", np.int64, (1,), "optimizer steps of the last checkpoint"),
    TensorSpec(
        "checkpoints", np.bytes_, (1,), "JSON: folder of each checkpoint, by its actor step"
    ),
)
# Its sum over the tokens is the reward of the sample.
TOKEN_REWARDS = TensorSpec(
    "token_rewards", np.float32, (-1,), "reward of each token, NaN where there is none [N, S]"
)
ATTRIBUTES = TensorSpec("rewards", np.float32, (-1,), "attributes of each sample [N, A]")


def critic_infer_endpoint(combined: bool) -> Endpoint:
    """Values [N, S] of each token; with `combined` also the reward [N, 1] of each sample."""
    values = TensorSpec("values", np.float32, (-1,), "value at each token position [N, S]")
    rewards = TensorSpec("rewards", np.float32, (-1,), "reward of each sample [N, 1]")
    outputs = (values, rewards) if combined else (values,)
    return Endpoint(CRITIC_INFER, (*_SCORING_INPUTS, _TOKENIZER), outputs, batching=True)


def critic_train_endpoint() -> Endpoint:
    """One pass of critic updates over the samples sent; the same `request_id` (up to 64
    characters) is applied once. A request that is too large for one body comes in pieces of its
    rows (requests.py). The reply to the last is that of the whole; before, `loss_mean` is NaN.
    """
    piece = "first row of this piece, and the rows of all pieces together"
    loss = "mean loss over the optimizer steps of this request"
    returns = "regression target per transition [N, S-1]"
    return Endpoint(
        CRITIC_TRAIN,
        (
            TensorSpec("tokens", np.int64, (-1, -1), "token ids, right-padded [N, S]"),
            TensorSpec("returns", np.float32, (-1, -1), returns),
            TensorSpec("prev_values", np.float32, (-1, -1), "values at rollout time [N, S-1]"),
            TensorSpec("mask", np.float32, (-1, -1), "1 on transitions into a response [N, S-1]"),
            _optional("request_id", np.bytes_, (1,), "the sender's id of this update"),
            _optional("piece", np.int64, (2,), piece),
        ),
        (TensorSpec("loss_mean", np.float32, (1,), loss),),
        batching=False,
    )


def critic_save_endpoint() -> Endpoint:
    """Write a checkpoint; `actor_step` is stored with it and checked when both jobs resume."""
    meaning = "the actor's step this checkpoint belongs to"
    inputs = (_DUMMY, _optional("actor_step", np.int64, (1,), meaning))
    outputs = (TensorSpec("status", np.int64, (1,), "0"),)
    return Endpoint(CRITIC_SAVE, inputs, outputs, batching=False)


def critic_resume_endpoint() -> Endpoint:
    """Go back to the checkpoint of an actor step, if need be; the status after it."""
    inputs = (TensorSpec("actor_step", np.int64, (1,), "where the actor resumes"),)
    return Endpoint(CRITIC_RESUME, inputs, _STATUS, batching=False)


def critic_status_endpoint() -> Endpoint:
    """The critic's optimizer steps, the actor step of its last checkpoint, all checkpoints."""
    return Endpoint(CRITIC_STATUS, (_DUMMY,), _STATUS, batching=False)


def reward_model_endpoint(per_token: bool = False, attributes: int = 1) -> Endpoint:
    """The reward [N, 1] of each sample, and with `per_token` those of its tokens [N, S]; of a
    model that does not merge its A `attributes` these, [N, A]. Clients take the first two kinds.
    """
    rewards = TensorSpec("rewards", np.float32, (1,), "reward of each sample [N, 1]")
    if attributes > 1:
        rewards = dataclasses.replace(ATTRIBUTES, shape=(attributes,))
    outputs = (rewards, TOKEN_REWARDS) if per_token else (rewards,)
    inputs = (*_SCORING_INPUTS, _PROMPT_LENGTHS, _TOKENIZER)
    return Endpoint(REWARD_MODEL, inputs, outputs, batching=True)


def attributes_endpoint() -> Endpoint:
    """What a client of attributes sends and needs: sentences, any number of attributes of each."""
    return Endpoint(REWARD_MODEL, _SCORING_INPUTS[:1], (ATTRIBUTES,), batching=True)


def teacher_endpoint(wanted: Iterable[str] | None = None) -> Endpoint:
    """A teacher's K largest logits [N, S, K] and log-probs [N, S], or those that are `wanted`."""
    largest = "largest logits behind each token, less the largest [N, S, K]"
    total = "log-sum-exp of all logits less the largest [N, S]"
    outputs: tuple[TensorSpec, ...] = (
        TensorSpec("topk_logits", np.float32, (-1, -1), largest),
        TensorSpec("topk_token_ids", np.int32, (-1, -1), "their tokens [N, S, K]"),
        TensorSpec("log_sum_exp_logits", np.float32, (-1,), total),
        TensorSpec("log_probs", np.float32, (-1,), "log-prob of the token behind each [N, S]"),
    )
    if wanted is not None:
        outputs = tuple(spec for spec in outputs if spec.name in wanted)
    return Endpoint(TEACHER_LOGITS, (*_SCORING_INPUTS[1:], _TOKENIZER), outputs, batching=True)


def triton_tensors(specs: Iterable[TensorSpec]) -> list["Tensor"]:
    from pytriton.model_config import Tensor

    return [Tensor(name=s.name, dtype=s.dtype, shape=s.shape, optional=s.optional) for s in specs]
