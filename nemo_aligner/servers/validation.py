# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of requests and replies; every message names the tensor, the fault and the remedy.

The client checks the form of a request before it sends it and the numbers of a reply before they
are trained on; the server checks the numbers of a request. N is the number of samples, S the
padded token length (see schema.py).
"""

from collections.abc import Mapping

import numpy as np

from nemo_aligner.servers.schema import (
    ATTRIBUTES,
    CRITIC_INFER,
    Arrays,
    Endpoint,
    ReplyError,
    RequestError,
    TensorSpec,
)

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
    "Training on it would destroy the model: look for NaN or infinity in the weights of the "
    "served one (a diverged training, a damaged checkpoint), or in what the function returns."
)


# ---- requests ----


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
    if not isinstance(array, np.ndarray):
        raise RequestError(
            f"input tensor '{spec.name}' is a {type(array).__name__}, not a numpy array. {remedy}"
        )
    is_text = spec.dtype is np.bytes_
    if not (array.dtype.kind in "OS" if is_text else array.dtype == spec.dtype):
        problem = f"dtype {array.dtype}; send {spec.describe(batching)}. {remedy}"
        raise RequestError(f"input tensor '{spec.name}' has {problem}")
    shape = array.shape[1:] if batching else array.shape
    if not spec.fits(shape):
        problem = f"shape {list(array.shape)}; send {spec.describe(batching)}. {remedy}"
        raise RequestError(f"input tensor '{spec.name}' has {problem}")
    if array.size == 0:
        problem = f"shape {list(array.shape)}: send at least one row and one column."
        raise RequestError(f"input tensor '{spec.name}' has {problem}")


def _validate_tokens(tokens: np.ndarray, vocab_size: int | None, max_length: int | None) -> None:
    if tokens.size == 0:
        raise RequestError(
            f"'tokens' has shape {list(tokens.shape)}: send at least one row of at least one "
            "token."
        )
    if max_length is not None and tokens.shape[1] > max_length:
        raise RequestError(
            f"'tokens' has {tokens.shape[1]} columns, but the served model takes at most "
            f"{max_length} (model.encoder_seq_length). Send shorter rows, or serve a model with a "
            "longer context."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = low if low < 0 else high
        raise RequestError(
            f"'tokens' holds the id {bad}, outside the served model's vocabulary [0, "
            f"{vocab_size}). Actor and server must use the same tokenizer; pad with 0."
        )


def validate_tokenizer(sent: np.ndarray | None, own: str | None) -> None:
    """Refuse an infer request with a row of a policy whose tokenizer is not the server's.

    Args:
        sent: the request's `tokenizer`, bytes [N, 1]; None if the client sent none.
        own: `tokenizer_fingerprint` of the server's tokenizer; None if it has none.
    """
    if sent is None or own is None:
        return
    others = {bytes(fingerprint) for fingerprint in sent.reshape(-1)} - {own.encode()}
    if others:
        theirs = "; ".join(sorted(other[:80].decode(errors="replace") for other in others)[:3])
        raise RequestError(
            f"the policy's tokenizer ({theirs}) is not this server's ({own}): token ids do not "
            "mean the same to both, and training on such scores would be nonsense. Serve a reward "
            "model or critic that was trained with the policy's tokenizer; for a reward that is a "
            "function, name in rm_model_file a .nemo with the policy's tokenizer (the policy's "
            "own), or give that tokenizer in model.tokenizer."
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
        raise RequestError(
            f"'sequence_lengths' holds {bad}, but every length must be in [1, {tokens.shape[1]}], "
            "the columns of 'tokens'."
        )
    if prompt_lengths is None:
        return
    prompts = _one_per_row("prompt_lengths", prompt_lengths, tokens)
    wrong = np.flatnonzero((prompts < 0) | (prompts > lengths))
    if wrong.size:
        raise RequestError(
            f"'prompt_lengths' holds {prompts[wrong[0]]} in sample {wrong[0]}, whose "
            f"'sequence_lengths' (prompt + response) is {lengths[wrong[0]]}: the prompt must lie "
            f"in [0, {lengths[wrong[0]]}]."
        )


def _one_per_row(name: str, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    flat = lengths.reshape(-1)
    if flat.shape[0] != tokens.shape[0]:
        raise RequestError(
            f"'{name}' has shape {list(lengths.shape)}, but 'tokens' has {tokens.shape[0]} rows: "
            "send one length per row, [N, 1]."
        )
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
            raise RequestError(
                f"'{name}' has shape {list(array.shape)}, but 'tokens' has shape "
                f"{list(tokens.shape)}: send [N, S-1] = {list(transitions)}, column t for the "
                "prediction of token t+1."
            )
    if not np.isin(mask, (0.0, 1.0)).all():
        raise RequestError(
            "'mask' holds values other than 0 and 1: send 1 on transitions into response tokens, "
            "else 0."
        )
    for name, array in (("returns", returns), ("prev_values", prev_values)):
        with np.errstate(invalid="ignore"):  # a comparison with NaN is False
            bad = ~(np.abs(array) <= LARGEST_NUMBER) & (mask > 0)
        if bad.any():
            row, column = (int(i[0]) for i in np.nonzero(bad))
            raise RequestError(
                f"'{name}' is {array[row, column]} in sample {row}, column {column}, where 'mask' "
                f"is 1: send finite numbers there, at most {LARGEST_NUMBER:.0e} (an update with "
                "this batch would destroy the critic). Scale rewards that are larger."
            )


def read_request_id(sent: np.ndarray) -> str:
    """The id of a train request, bytes [1]; `RequestError`: too long, or no ASCII text."""
    request_id = bytes(np.asarray(sent).reshape(-1)[0])
    if not 0 < len(request_id) <= LONGEST_ID or not request_id.isascii():
        raise RequestError(
            f"'request_id' has {len(request_id)} bytes and begins with {request_id[:16]!r}: send "
            f"1 to {LONGEST_ID} ASCII characters."
        )
    return request_id.decode()


# ---- replies ----


def validate_reply(
    endpoint: Endpoint, reply: Arrays, samples: int, used: np.ndarray | None = None
) -> None:
    """Check the reply to an infer request before its numbers are trained on.

    Args:
        endpoint: a scoring endpoint (`critic_infer_endpoint`, `reward_model_endpoint`).
        used: bool [samples, columns], True where a value is used; it may be NaN or missing
            elsewhere. None checks only the number of rows of `values`.

    Raises:
        ReplyError: naming the tensor, the row, what came, and the remedy.
    """
    other = (
        "Is another kind of server running at this address? The client expects "
        f"'{endpoint.name}' there."
    )
    for spec in endpoint.outputs:
        array = reply.get(spec.name)
        if array is None:
            if endpoint.name == CRITIC_INFER:
                other = f"The critic server gives no rewards: {NOT_COMBINED}."
            raise ReplyError(
                f"the reply has no tensor '{spec.name}' ({spec.meaning}), only {sorted(reply)}. "
                f"{other}"
            )
        if array.dtype.kind != np.dtype(spec.dtype).kind:
            raise ReplyError(
                f"'{spec.name}' came as {array.dtype}, not {spec.describe(True)}. {other}"
            )
        if spec.name == "values":
            _validate_values(array, samples, used, other)
            continue
        fits = array.ndim == 1 + len(spec.shape) and len(array) == samples and array.size
        merged = spec.name != "rewards" or spec == ATTRIBUTES or array.shape[1:] == (1,)
        if not fits or not merged:
            needed = spec.meaning.replace("[N", f"[{samples}")
            remedy = _NOT_MERGED if fits else other
            raise _wrong_shape(spec.name, array, samples, needed, remedy)
        _check_numbers(spec.name, array, ~np.isfinite(array), _NAN)
    if "token_rewards" in reply and endpoint.name != CRITIC_INFER:
        rewards = reply["token_rewards"]
        if rewards.dtype.kind != "f" or rewards.ndim != 2 or rewards.shape[0] != samples:
            needed = "float32 [N, S], NaN at tokens without a reward"
            raise _wrong_shape("token_rewards", rewards, samples, needed, other)
        _check_numbers("token_rewards", rewards, np.isinf(rewards), _NAN)


def _wrong_shape(
    name: str, array: np.ndarray, samples: int, needed: str, remedy: str
) -> ReplyError:
    return ReplyError(
        f"'{name}' came as {array.dtype} of shape {list(array.shape)} for {samples} sample(s) "
        f"sent; {needed} is needed. {remedy}"
    )


def _check_numbers(name: str, array: np.ndarray, bad: np.ndarray, remedy: str) -> None:
    """Raise if there are `bad` numbers, of the shape of `array` or its first columns."""
    places = np.argwhere(bad)
    if len(places):
        row, *rest = places[0]
        column = f", column {rest[0]}" if array.shape[1:] != (1,) and rest else ""
        raise ReplyError(
            f"'{name}' is {array[tuple(places[0])]} in sample {row}{column} "
            f"({len(set(places[:, 0]))} of {len(array)} have such numbers). {remedy}"
        )


def _validate_values(
    values: np.ndarray, samples: int, used: np.ndarray | None, other: str
) -> None:
    needed_columns = np.flatnonzero(False if used is None else used.any(axis=0))
    columns = int(needed_columns[-1]) + 1 if len(needed_columns) else 0
    if values.ndim != 2 or values.shape[0] != samples or values.shape[1] < columns:
        needed = f"[{samples}, at least {columns}], one value per token,"
        raise _wrong_shape("values", values, samples, needed, other)
    if used is not None:
        bad = used[:, :columns] & ~np.isfinite(values[:, :columns])
        remedy = (
            "Look for NaN in the critic's weights (a diverged training: lower model.optim.lr) and "
            "restart it from a good checkpoint."
        )
        _check_numbers("values", values, bad, remedy)


def validate_outcome(endpoint: Endpoint, reply: Arrays) -> None:
    """Check the reply to a request that changes the server's state: an update or a checkpoint.
    `ReplyError`: a tensor is missing or empty, a loss is not finite, or a status is not 0.
    """
    for spec in endpoint.outputs:
        array = reply.get(spec.name)
        if array is None or array.size == 0 or array.dtype.kind not in "fiub":
            raise ReplyError(
                f"the reply has no number '{spec.name}' ({spec.meaning}), only {sorted(reply)}: "
                f"whether '{endpoint.name}' was carried out is unknown. Is another kind of server "
                "running at this address?"
            )
        if not np.isfinite(array).all():
            raise ReplyError(
                f"'{spec.name}' is {array.reshape(-1)[0]}: the critic's weights are of no use any "
                "more. Look into the server job's log, lower model.optim.lr, and restart both "
                "jobs from their checkpoints."
            )
        if spec.name == "status" and array.any():
            raise ReplyError(
                f"'{endpoint.name}' replied with status {array.reshape(-1).tolist()}, not 0: the "
                "checkpoint was not written. Look into the server job's log."
            )
