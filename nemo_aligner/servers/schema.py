# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire format between an actor job and the critic and reward servers, for both sides.

An `Endpoint` lists its tensors by name, dtype and shape; client and server check requests and
replies against it; every message names the tensor, the fault and the remedy. N is the number of
samples, S the padded token length; per-transition tensors have width S-1, and column t belongs to
the prediction of token t+1.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
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


# ---- checks: a client's of a request's form and a reply's numbers, a server's of its numbers ----

# Returns and values beyond are nobody's; an update with them would destroy the critic.
LARGEST_NUMBER = 1e6
LONGEST_ID = 64

NOT_COMBINED = (
    "its job has trainer.ppo.combine_rm_and_critic_server=False, this one "
    "remote_critic_rm.combine_rm_and_critic_server=True. Set both alike; with False the reward "
    "model has its own server"
)
_NOT_MERGED = (
    "A reward model with several attributes must merge them into one number per sample "
    "(model.regression.merge_attributes=True with model.regression.attribute_weights)."
)
_NAN = (
    "Look for NaN or infinity in the weights of the served one, or in what the function returns."
)


def validate_request(endpoint: Endpoint, data: Mapping[str, np.ndarray]) -> None:
    """Check names, dtypes and shapes of a request, in batched form for a batching endpoint."""
    expected = "; ".join(
        spec.describe(endpoint.batching) + (" (optional)" if spec.optional else "")
        for spec in endpoint.inputs
    )
    remedy = f"Endpoint '{endpoint.name}' takes {expected}."
    names = {spec.name for spec in endpoint.inputs}
    for name in data:
        if name not in names:
            raise RequestError(f"unknown input tensor '{name}'. {remedy}")
    for spec in endpoint.inputs:
        if spec.name in data:
            _validate_tensor(spec, data[spec.name], endpoint.batching, remedy)
        elif not spec.optional:
            raise RequestError(f"input tensor '{spec.name}' ({spec.meaning}) is missing. {remedy}")
    if endpoint.batching and len({array.shape[0] for array in data.values()}) > 1:
        shapes = {name: list(array.shape) for name, array in data.items()}
        raise RequestError(f"the input tensors have different numbers of rows: {shapes}. {remedy}")


def _validate_tensor(spec: TensorSpec, array: object, batching: bool, remedy: str) -> None:
    named, problem = f"input tensor '{spec.name}'", None
    if not isinstance(array, np.ndarray):
        raise RequestError(f"{named} is a {type(array).__name__}, not a numpy array. {remedy}")
    is_text = spec.dtype is np.bytes_
    if not (array.dtype.kind in "OS" if is_text else array.dtype == spec.dtype):
        problem = f"dtype {array.dtype}"
    elif not spec.fits(array.shape[1:] if batching else array.shape):
        problem = f"shape {list(array.shape)}"
    if problem is not None:
        raise RequestError(f"{named} has {problem}; send {spec.describe(batching)}. {remedy}")
    if array.size == 0:
        shape = list(array.shape)
        raise RequestError(f"{named} has shape {shape}: send at least one row and one column.")


def _validate_tokens(tokens: np.ndarray, vocab_size: int | None, max_length: int | None) -> None:
    if tokens.size == 0:
        raise RequestError(f"'tokens' has shape {list(tokens.shape)}: send at least one token.")
    if max_length is not None and tokens.shape[1] > max_length:
        raise RequestError(
            f"'tokens' has {tokens.shape[1]} columns, but the served model takes at most "
            f"{max_length} (model.encoder_seq_length). Send shorter rows, or serve another model."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = f"the id {low if low < 0 else high}, outside the served model's vocabulary"
        same = "Actor and server must use the same tokenizer; pad with 0"
        raise RequestError(f"'tokens' holds {bad} [0, {vocab_size}). {same}.")


def validate_tokenizer(sent: np.ndarray | None, own: str | None) -> None:
    """Refuse `sent`, fingerprints bytes [N, 1], if one is not `own`; None is not compared."""
    if sent is None or own is None:
        return
    others = {bytes(fingerprint) for fingerprint in sent.reshape(-1)} - {own.encode()}
    if others:
        theirs = "; ".join(sorted(other[:80].decode(errors="replace") for other in others)[:3])
        raise RequestError(
            f"the policy's tokenizer ({theirs}) is not this server's ({own}): the same ids mean "
            "other tokens. Serve a reward model or critic that was trained with the policy's "
            "tokenizer; for a function, give that in model.tokenizer, or the policy's .nemo in "
            "rm_model_file."
        )


def validate_scoring_inputs(
    tokens: np.ndarray,
    sequence_lengths: np.ndarray,
    vocab_size: int | None = None,
    max_length: int | None = None,
    prompt_lengths: np.ndarray | None = None,
) -> None:
    """Check the content of an infer request: tokens int64 [N, S]; lengths int64 [N] or [N, 1]."""
    _validate_tokens(tokens, vocab_size, max_length)
    lengths = _one_per_row("sequence_lengths", sequence_lengths, tokens)
    if lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        bad = int(lengths.min()) if lengths.min() < 1 else int(lengths.max())
        within = f"[1, {tokens.shape[1]}], the columns of 'tokens'"
        raise RequestError(
            f"'sequence_lengths' holds {bad}, but every length must be in {within}."
        )
    if prompt_lengths is None:
        return
    prompts = _one_per_row("prompt_lengths", prompt_lengths, tokens)
    for row in np.flatnonzero((prompts < 0) | (prompts > lengths))[:1]:
        raise RequestError(
            f"'prompt_lengths' holds {prompts[row]} in sample {row}, whose 'sequence_lengths' "
            f"(prompt + response) is {lengths[row]}: it must lie in [0, {lengths[row]}]."
        )


def _one_per_row(name: str, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    flat = lengths.reshape(-1)
    if flat.shape[0] != tokens.shape[0]:
        rows = f"'tokens' has {tokens.shape[0]} rows: send one length per row, [N, 1]"
        raise RequestError(f"'{name}' has shape {list(lengths.shape)}, but {rows}.")
    return flat


def validate_training_inputs(
    tokens: np.ndarray,
    returns: np.ndarray,
    prev_values: np.ndarray,
    mask: np.ndarray,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> None:
    """Check the content of a train request: tokens int64 [N, S], the others float32 [N, S-1]."""
    _validate_tokens(tokens, vocab_size, max_length)
    transitions = (tokens.shape[0], tokens.shape[1] - 1)
    for name, array in (("returns", returns), ("prev_values", prev_values), ("mask", mask)):
        if array.shape != transitions:
            shapes = f"{list(array.shape)}, but 'tokens' has shape {list(tokens.shape)}"
            needed = f"[N, S-1] = {list(transitions)}, column t for the prediction of token t+1"
            raise RequestError(f"'{name}' has shape {shapes}: send {needed}.")
    if not np.isin(mask, (0.0, 1.0)).all():
        raise RequestError(
            "'mask' holds values other than 0 and 1: send 1 on transitions into responses, else 0."
        )
    for name, array in (("returns", returns), ("prev_values", prev_values)):
        with np.errstate(invalid="ignore"):  # a comparison with NaN is False
            bad = ~(np.abs(array) <= LARGEST_NUMBER) & (mask > 0)
        if bad.any():
            row, column = (int(i[0]) for i in np.nonzero(bad))
            raise RequestError(
                f"'{name}' is {array[row, column]} in sample {row}, column {column}, where 'mask' "
                f"is 1: send finite numbers, at most {LARGEST_NUMBER:.0e}; scale larger rewards."
            )


def read_request_id(sent: np.ndarray) -> str:
    """The id of a train request, bytes [1]; `RequestError`: too long, or no ASCII text."""
    request_id = bytes(np.asarray(sent).reshape(-1)[0])
    if not 0 < len(request_id) <= LONGEST_ID or not request_id.isascii():
        has = f"'request_id' has {len(request_id)} bytes and begins with {request_id[:16]!r}"
        raise RequestError(f"{has}: send 1 to {LONGEST_ID} ASCII characters.")
    return request_id.decode()


def validate_reply(
    endpoint: Endpoint, reply: Arrays, samples: int, used: np.ndarray | None = None
) -> None:
    """Check the reply to an infer request before its numbers are trained on; else `ReplyError`.
    `used`: bool [samples, columns], True where a value is used; others may be NaN or missing.
    None checks only the number of rows of `values`.
    """
    other = f"Is another kind of server running at this address, not '{endpoint.name}'?"
    is_critic = endpoint.name == CRITIC_INFER
    of_tokens = [] if is_critic or "token_rewards" not in reply else [TOKEN_REWARDS]
    for spec in (*endpoint.outputs, *of_tokens):
        name, array = spec.name, reply.get(spec.name)
        if array is None:
            if is_critic:
                other = f"The critic server gives no rewards: {NOT_COMBINED}."
            lacks = f"the reply has no tensor '{name}' ({spec.meaning})"
            raise ReplyError(f"{lacks}, only {sorted(reply)}. {other}")
        if array.dtype.kind != np.dtype(spec.dtype).kind:
            raise ReplyError(f"'{name}' came as {array.dtype}, not {spec.describe(True)}. {other}")
        needed, remedy = spec.meaning.replace("[N", f"[{samples}"), _NAN
        fits = array.ndim == 1 + len(spec.shape) and len(array) == samples
        if name == "values":
            columns = 1 + max(np.flatnonzero(False if used is None else used.any(0)), default=-1)
            fits = fits and array.shape[1] >= columns
            needed = f"[{samples}, at least {columns}], one value per token,"
            remedy = "Restart the critic from a good checkpoint, with a lower model.optim.lr."
        elif fits and name == "rewards" and spec != ATTRIBUTES and array.shape[1] != 1:
            fits, other = False, _NOT_MERGED
        if not fits or not (array.size or name == "values"):
            raise ReplyError(
                f"'{name}' came as {array.dtype} of shape {list(array.shape)} for {samples} "
                f"sample(s) sent; {needed} is needed. {other}"
            )
        bad = np.isinf(array) if spec == TOKEN_REWARDS else ~np.isfinite(array)
        if name == "values":
            bad = bad[:, :columns] & (used is not None and used[:, :columns])
        places = np.argwhere(bad)
        if len(places):
            row, *rest = places[0]
            column = f", column {rest[0]}" if array.shape[1:] != (1,) and rest else ""
            raise ReplyError(
                f"'{name}' is {array[tuple(places[0])]} in sample {row}{column} "
                f"({len(set(places[:, 0]))} of {samples} have such numbers). {remedy}"
            )


def validate_outcome(endpoint: Endpoint, reply: Arrays) -> None:
    """Check the reply to a request about the critic's state: finite numbers, a status of 0; else
    `ReplyError`.
    """
    for spec in endpoint.outputs:
        if spec.dtype is np.bytes_:
            continue
        array = reply.get(spec.name)
        if array is None or array.size == 0 or array.dtype.kind not in "fiub":
            raise ReplyError(
                f"the reply has no number '{spec.name}' ({spec.meaning}), only {sorted(reply)}: "
                f"whether '{endpoint.name}' was carried out is unknown. Is that another server?"
            )
        if not np.isfinite(array).all():
            raise ReplyError(
                f"'{spec.name}' is {array.reshape(-1)[0]}: the critic's weights are of no use any "
                "more. Lower model.optim.lr, and restart both jobs from their checkpoints."
            )
        if spec.name == "status" and array.any():
            status = f"'{endpoint.name}' replied with status {array.reshape(-1).tolist()}, not 0"
            raise ReplyError(f"{status}: the checkpoint was not written. See the server's log.")
