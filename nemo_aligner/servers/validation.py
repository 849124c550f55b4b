# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of requests and replies; every message names the tensor, the fault and the remedy.

The client checks the form of a request before it is sent and the numbers of a reply; the server
checks the numbers of a request. N is the number of samples, S the padded token length (schema.py).
"""

from collections.abc import Mapping

import numpy as np

from nemo_aligner.servers.schema import (
    ATTRIBUTES,
    CRITIC_INFER,
    TOKEN_REWARDS,
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
