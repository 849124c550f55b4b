# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire format between an actor job and the critic and reward servers, defined once for both
sides.

An `Endpoint` lists its tensors by name, dtype and shape. The client checks a request against it
before it sends (`validate_request`), the server binds it to Triton (`triton_tensors`) and then
checks what Triton cannot know (`validate_scoring_inputs`, `validate_training_inputs`), and the
client checks the answer (`validate_response`). N is the number of samples, S the padded token
length; per-transition tensors have width S-1 and column t belongs to the prediction of token t+1.
"""

from dataclasses import dataclass

import numpy as np

from nemo_aligner.config.reward_models import REWARD_MODEL
from nemo_aligner.core.errors import UserError

# Default ports and endpoint names.
CRITIC_PORT = 5556
CRITIC_INFER = "critic_infer"
CRITIC_TRAIN = "critic_train"
CRITIC_SAVE = "critic_save"
CRITIC_STATUS = "critic_status"

# `actor_step` of a critic that does not know which actor step its weights belong to.
UNKNOWN_STEP = -1


_NOT_COMBINED = (
    "The critic server gives no rewards: its job has "
    "trainer.ppo.combine_rm_and_critic_server=False, this one "
    "remote_critic_rm.combine_rm_and_critic_server=True. Set both alike; with False the reward "
    "model has a server of "
    "its own."
)


class RequestError(UserError):
    """A request that does not fit its endpoint: the message names the tensor, what was sent and
    what is expected.
    """


class ResponseError(UserError):
    """An answer that cannot be used: the message names the tensor, what came, what is expected and
    the remedy.
    """


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request or response.

    Attributes:
        name: its name on the wire.
        dtype: numpy dtype; `np.bytes_` for strings.
        shape: without the batch dimension for a batching endpoint; -1 is any size.
        optional: a request may leave it out.
        meaning: what it holds, for error messages.
    """

    name: str
    dtype: type
    shape: tuple
    optional: bool = False
    meaning: str = ""

    def describe(self, batching: bool) -> str:
        shape = (("N",) if batching else ()) + tuple(
            "any" if size == -1 else size for size in self.shape
        )
        return f"{self.name}: {np.dtype(self.dtype).name if self.dtype is not np.bytes_ else 'bytes'} {list(shape)}"


@dataclass(frozen=True)
class Endpoint:
    """A served model: its default name, its tensors, and whether Triton merges the requests of
    several clients.
    """

    name: str
    inputs: tuple
    outputs: tuple
    batching: bool


_SCORING_INPUTS = (
    TensorSpec("sentences", np.bytes_, (-1,), True, "text, UTF-8; wins over `tokens`"),
    TensorSpec("tokens", np.int64, (-1,), True, "token ids, right-padded [N, S]"),
    TensorSpec(
        "sequence_lengths", np.int64, (-1,), True, "number of real tokens of each row [N, 1]"
    ),
)
# A server that has another tokenizer refuses: the same ids would stand for other texts. It comes
# for each row, as all inputs of requests that Triton may merge.
_TOKENIZER = TensorSpec(
    "tokenizer",
    np.bytes_,
    (1,),
    True,
    "fingerprint of the sender's tokenizer (`tokenizer_fingerprint`) [N, 1]",
)

# Where the answer starts: a reward that is code, not a model, scores the text behind the prompt.
_PROMPT_LENGTHS = TensorSpec(
    "prompt_lengths",
    np.int64,
    (1,),
    True,
    "number of prompt tokens of each row [N, 1]; models do without",
)


def critic_infer_endpoint(combined: bool) -> Endpoint:
    """Values [N, S] of each token position; with `combined` also the reward [N, 1] of each
    sample.
    """
    outputs = (
        TensorSpec("values", np.float32, (-1,), meaning="value at each token position [N, S]"),
    )
    if combined:
        outputs += (
            TensorSpec("rewards", np.float32, (-1,), meaning="reward of each sample [N, 1]"),
        )
    return Endpoint(CRITIC_INFER, (*_SCORING_INPUTS, _TOKENIZER), outputs, batching=True)


def critic_train_endpoint() -> Endpoint:
    """One pass of critic updates over the rows sent.

    `request_id` (up to 64 characters) makes a repeated request harmless: the same id is applied
    once.
    """
    return Endpoint(
        CRITIC_TRAIN,
        (
            TensorSpec("tokens", np.int64, (-1, -1), meaning="token ids, right-padded [N, S]"),
            TensorSpec(
                "returns",
                np.float32,
                (-1, -1),
                meaning="regression target of each transition [N, S-1]",
            ),
            TensorSpec(
                "prev_values", np.float32, (-1, -1), meaning="values at rollout time [N, S-1]"
            ),
            TensorSpec(
                "mask",
                np.float32,
                (-1, -1),
                meaning="1 on transitions into response tokens [N, S-1]",
            ),
            TensorSpec("request_id", np.bytes_, (1,), True, "the sender's id of this update"),
        ),
        (
            TensorSpec(
                "loss_mean",
                np.float32,
                (1,),
                meaning="mean loss over the optimizer steps of this request",
            ),
        ),
        batching=False,
    )


def critic_save_endpoint() -> Endpoint:
    """Write a checkpoint; `actor_step` is stored with it and checked when both jobs resume."""
    return Endpoint(
        CRITIC_SAVE,
        (
            TensorSpec("dummy_var", np.int64, (1,), meaning="any number (Triton needs an input)"),
            TensorSpec(
                "actor_step", np.int64, (1,), True, "the actor's step this checkpoint belongs to"
            ),
        ),
        (TensorSpec("status", np.int64, (1,), meaning="0"),),
        batching=False,
    )


def critic_status_endpoint() -> Endpoint:
    """Which step the critic's weights stand at, their last checkpoint's actor step, and all
    checkpoints.
    """
    return Endpoint(
        CRITIC_STATUS,
        (TensorSpec("dummy_var", np.int64, (1,), meaning="any number (Triton needs an input)"),),
        (
            TensorSpec(
                "actor_step",
                np.int64,
                (1,),
                meaning="actor step of the last checkpoint; -1 unknown",
            ),
            TensorSpec(
                "critic_step", np.int64, (1,), meaning="optimizer steps of the weights in memory"
            ),
            TensorSpec(
                "saved_critic_step",
                np.int64,
                (1,),
                meaning="optimizer steps of the last checkpoint",
            ),
            TensorSpec(
                "checkpoints",
                np.bytes_,
                (1,),
                meaning="JSON: folder of each checkpoint, by its actor step",
            ),
        ),
        batching=False,
    )


def reward_model_endpoint() -> Endpoint:
    """The reward [N, 1] of each sample."""
    outputs = (TensorSpec("rewards", np.float32, (1,), meaning="reward of each sample [N, 1]"),)
    return Endpoint(
        REWARD_MODEL, (*_SCORING_INPUTS, _PROMPT_LENGTHS, _TOKENIZER), outputs, batching=True
    )


def triton_tensors(specs) -> list:
    """`specs` in the form that `Triton.bind` takes."""
    from pytriton.model_config import Tensor

    return [Tensor(name=s.name, dtype=s.dtype, shape=s.shape, optional=s.optional) for s in specs]


def validate_request(endpoint: Endpoint, data: dict) -> None:
    """Check names, dtypes and shapes of a request (batched form for a batching endpoint).

    Raises:
        RequestError: naming the tensor, what it is, what is expected and the whole list of inputs.
    """
    specs = {spec.name: spec for spec in endpoint.inputs}
    expected = "; ".join(
        spec.describe(endpoint.batching) + (" (optional)" if spec.optional else "")
        for spec in endpoint.inputs
    )
    remedy = f"Endpoint '{endpoint.name}' takes {expected}."
    for name in data:
        if name not in specs:
            raise RequestError(f"unknown input tensor '{name}'. {remedy}")
    for spec in endpoint.inputs:
        if spec.name not in data:
            if not spec.optional:
                raise RequestError(
                    f"input tensor '{spec.name}' ({spec.meaning}) is missing. {remedy}"
                )
            continue
        array = data[spec.name]
        if not isinstance(array, np.ndarray):
            raise RequestError(
                f"input tensor '{spec.name}' is a {type(array).__name__}, not a numpy array. "
                f"{remedy}"
            )
        right_dtype = (
            array.dtype.kind in "OS" if spec.dtype is np.bytes_ else array.dtype == spec.dtype
        )
        if not right_dtype:
            raise RequestError(
                f"input tensor '{spec.name}' has dtype {array.dtype}; send "
                f"{spec.describe(endpoint.batching)}. "
                f"{remedy}"
            )
        shape = array.shape[1:] if endpoint.batching else array.shape
        if len(shape) != len(spec.shape) or any(
            want not in (-1, got) for got, want in zip(shape, spec.shape)
        ):
            raise RequestError(
                f"input tensor '{spec.name}' has shape {list(array.shape)}; send "
                f"{spec.describe(endpoint.batching)}. "
                f"{remedy}"
            )
    if endpoint.batching and len({array.shape[0] for array in data.values()}) > 1:
        shapes = {name: list(array.shape) for name, array in data.items()}
        raise RequestError(f"the input tensors have different numbers of rows: {shapes}. {remedy}")


def _validate_tokens(tokens: np.ndarray, vocab_size, max_length) -> None:
    if tokens.size == 0:
        raise RequestError(
            f"'tokens' has shape {list(tokens.shape)}: send at least one row of at least one "
            "token."
        )
    if max_length is not None and tokens.shape[1] > max_length:
        raise RequestError(
            f"'tokens' has {tokens.shape[1]} columns, but the served model takes at most "
            f"{max_length} "
            "(model.encoder_seq_length). Send shorter rows, or serve a model with a longer "
            "context."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = low if low < 0 else high
        raise RequestError(
            f"'tokens' holds the id {bad}, outside the served model's vocabulary [0, "
            f"{vocab_size}). "
            "Actor and server must use the same tokenizer; pad with 0."
        )


def validate_tokenizer(sent: np.ndarray | None, own: str | None) -> None:
    """Refuse an infer request of a policy whose tokenizer is not the server's.

    Requests that Triton merged are refused together, as with any other fault; each row is looked
    at.

    Args:
        sent: the request's `tokenizer`, bytes [N, 1]; None for a client that does not say.
        own: `tokenizer_fingerprint` of the server's tokenizer; None if it has none.

    Raises:
        RequestError: naming both fingerprints and the remedy.
    """
    if sent is None or own is None:
        return
    others = {bytes(fingerprint) for fingerprint in sent.reshape(-1)} - {own.encode()}
    if others:
        theirs = "; ".join(sorted(fingerprint.decode(errors="replace") for fingerprint in others))
        raise RequestError(
            f"the policy's tokenizer ({theirs}) is not this server's ({own}): token ids do not "
            "mean the same to both, "
            "and training on such scores would be nonsense. Serve a reward model or critic that "
            "was trained with the "
            "policy's tokenizer; for a reward that is a function, name in rm_model_file a .nemo "
            "with the policy's "
            "tokenizer (the policy's own), or give that tokenizer in model.tokenizer."
        )


def validate_scoring_inputs(
    tokens: np.ndarray,
    sequence_lengths: np.ndarray,
    vocab_size=None,
    max_length=None,
    prompt_lengths=None,
) -> None:
    """Check the content of an infer request: tokens int64 [N, S]; sequence_lengths and, if given,
    prompt_lengths int64 [N] or [N, 1]."""
    _validate_tokens(tokens, vocab_size, max_length)
    lengths = sequence_lengths.reshape(-1)
    if lengths.shape[0] != tokens.shape[0]:
        raise RequestError(
            f"'sequence_lengths' has shape {list(sequence_lengths.shape)}, but 'tokens' has "
            f"{tokens.shape[0]} rows: "
            "send one length per row, [N, 1]."
        )
    if lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        bad = int(lengths.min()) if lengths.min() < 1 else int(lengths.max())
        raise RequestError(
            f"'sequence_lengths' holds {bad}, but every length must be in [1, {tokens.shape[1]}], "
            "the columns of "
            "'tokens'."
        )
    if prompt_lengths is None:
        return
    prompts = prompt_lengths.reshape(-1)
    if prompts.shape[0] != tokens.shape[0]:
        raise RequestError(
            f"'prompt_lengths' has shape {list(prompt_lengths.shape)}, but 'tokens' has "
            f"{tokens.shape[0]} rows: "
            "send one length per row, [N, 1]."
        )
    wrong = np.flatnonzero((prompts < 0) | (prompts > lengths))
    if wrong.size:
        raise RequestError(
            f"'prompt_lengths' holds {prompts[wrong[0]]} in row {wrong[0]}, whose "
            "'sequence_lengths' (prompt + "
            f"response) is {lengths[wrong[0]]}: the prompt must lie in [0, {lengths[wrong[0]]}]."
        )


def validate_training_inputs(
    tokens: np.ndarray,
    returns: np.ndarray,
    prev_values: np.ndarray,
    mask: np.ndarray,
    vocab_size=None,
    max_length=None,
) -> None:
    """Check the content of a train request: tokens int64 [N, S], the others float32 [N, S-1]."""
    _validate_tokens(tokens, vocab_size, max_length)
    transitions = (tokens.shape[0], tokens.shape[1] - 1)
    for name, array in (("returns", returns), ("prev_values", prev_values), ("mask", mask)):
        if array.shape != transitions:
            raise RequestError(
                f"'{name}' has shape {list(array.shape)}, but 'tokens' has shape "
                f"{list(tokens.shape)}: "
                f"send [N, S-1] = {list(transitions)}, column t for the prediction of token t+1."
            )
    if not np.isin(mask, (0.0, 1.0)).all():
        raise RequestError(
            "'mask' holds values other than 0 and 1: send 1 on transitions into response tokens, "
            "else 0."
        )
    for name, array in (("returns", returns), ("prev_values", prev_values)):
        bad = ~np.isfinite(array) & (mask > 0)
        if bad.any():
            row, column = (int(i[0]) for i in np.nonzero(bad))
            raise RequestError(
                f"'{name}' is {array[row, column]} at row {row}, column {column}, where 'mask' is "
                "1: "
                "send finite numbers there (an update with this batch would destroy the critic)."
            )


def validate_response(
    endpoint: Endpoint, answer: dict, rows: int, used: np.ndarray | None = None
) -> None:
    """Check the answer to an infer request of `rows` rows before its numbers are trained on.

    Args:
        endpoint: a scoring endpoint (`critic_infer_endpoint`, `reward_model_endpoint`).
        answer: arrays by wire name.
        used: bool [rows, columns], True where a value is used; it may be NaN or missing elsewhere.
            None checks only the number of rows of `values`.

    Raises:
        ResponseError: naming the tensor, the row, what came, and the remedy.
    """
    for spec in endpoint.outputs:
        array = answer.get(spec.name)
        if array is None:
            raise ResponseError(
                f"the answer has no tensor '{spec.name}' ({spec.meaning}), only {sorted(answer)}. "
                + (_NOT_COMBINED if endpoint.name == CRITIC_INFER else _other_server(endpoint))
            )
        if array.dtype.kind != "f":
            raise ResponseError(
                f"'{spec.name}' came as {array.dtype}, not {spec.describe(True)}. "
                + _other_server(endpoint)
            )
        if spec.name == "rewards":
            _validate_rewards(endpoint, array, rows)
        else:
            _validate_values(endpoint, array, rows, used)


def _other_server(endpoint: Endpoint) -> str:
    return f"Is another kind of server running at this address? The client expects '{endpoint.name}' there."


def _validate_rewards(endpoint: Endpoint, rewards: np.ndarray, rows: int) -> None:
    if rewards.shape != (rows, 1):
        remedy = _other_server(endpoint)
        if rewards.ndim == 2 and rewards.shape[0] == rows:
            remedy = (
                "A reward model with several attributes must merge them into one number per "
                "sample "
                "(model.regression.merge_attributes=True with model.regression.attribute_weights)."
            )
        raise ResponseError(
            f"'rewards' has shape {list(rewards.shape)} for {rows} row(s) sent; [{rows}, 1] is "
            "needed, one reward per "
            f"sample. {remedy}"
        )
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise ResponseError(
            f"'rewards' is {rewards[bad[0], 0]} in row {bad[0]} ({bad.size} of {rows} row(s) are "
            "not finite). "
            "Training on it would destroy the policy: look for NaN in the weights of the served "
            "model (a diverged "
            "training, a damaged checkpoint) and serve a good one."
        )


def _validate_values(endpoint: Endpoint, values: np.ndarray, rows: int, used) -> None:
    columns = 0
    if used is not None and used.any():
        columns = int(np.flatnonzero(used.any(axis=0))[-1]) + 1
    if values.ndim != 2 or values.shape[0] != rows or values.shape[1] < columns:
        raise ResponseError(
            f"'values' has shape {list(values.shape)} for {rows} row(s) sent; [{rows}, at least "
            f"{columns}] is needed, "
            f"one value per token. {_other_server(endpoint)}"
        )
    if not columns:
        return
    bad = np.argwhere(used[:, :columns] & ~np.isfinite(values[:, :columns]))
    if bad.size:
        row, column = (int(i) for i in bad[0])
        raise ResponseError(
            f"'values' is {values[row, column]} in row {row}, column {column}, inside the "
            "response. Look for NaN in "
            "the critic's weights (a diverged training: lower model.optim.lr) and restart it from "
            "a good checkpoint."
        )
