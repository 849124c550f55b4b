# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A server's view of a request: decoded, tokenized and padded for the model; a large one cut into
slices, or put together from pieces.

A *slice* is a part of the samples of a scoring request that is scored in one operation of all
ranks; between two of them the server works on other requests. How a request is cut depends on that
request alone, and a slice has whole micro-batches of it, with the same samples in each: so a score
has the same bits as if the request had been scored in one go. (Exceptions: docs/jobs.md.)

A *piece* is a part of the rows of a train request that is too large for one body: a request of its
own with the same `request_id` and with `piece` = [its first row, rows of the whole]. The server
trains when the last has come; the reply to that one is the reply to the whole.

N is the number of samples of a request, S their padded token length.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers.schema import Arrays, RequestError

# A client sends one piece after the other: without the next one for this long it is gone.
PIECE_TIMEOUT_S = 120.0

# Tokens of a slice per data-parallel rank, padding included, unless one micro-batch has more.
SLICE_TOKENS = 2**14
# Micro-batches of a slice per pipeline stage, if several: stages wait at the ends of slices.
SLICE_MICRO_BATCHES_PER_STAGE = 4


def decode_bytes_ndarray(str_ndarray: np.ndarray) -> np.ndarray:
    """Decode UTF-8 bytes of any shape to a flat array of str."""
    return np.char.decode(np.asarray(str_ndarray).astype("bytes"), "utf-8").reshape(-1)


def pad_input(
    value: np.ndarray | torch.Tensor | Sequence[Any] | None, size: int, pad_value: Any = 0
) -> tuple[list[Any] | None, int]:
    """The rows of `value`, padded by `pad_value` to a multiple of `size`, and the number added."""
    if value is None:
        return None, 0
    rows = value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else list(value)
    extra = -len(rows) % size
    row = [pad_value] * len(rows[0]) if rows and isinstance(rows[0], list) else pad_value
    return rows + [row] * extra, extra


def pad_rows(array: np.ndarray, multiple: int) -> np.ndarray:
    """Append rows of zeros up to a multiple of `multiple` rows; without need it is not copied."""
    extra = -array.shape[0] % multiple
    return np.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1)) if extra else array


def calculate_inference_batch_padding_multiple(
    current_size: int, model_forward_micro_batch_size: int
) -> int:
    """The multiple to which a batch is padded, so that every data-parallel rank gets whole
    micro-batches: DP for a small batch (one shorter micro-batch each), else micro-batch size * DP.
    """
    dp_size = parallel_state.get_data_parallel_world_size()
    full = model_forward_micro_batch_size * dp_size
    return dp_size if current_size <= full else full


def _decode_sentences(sentences: np.ndarray) -> list[str]:
    if sentences.ndim > 1 and sentences.shape[1:] != (1,):
        shape = list(sentences.shape)
        raise UserError(f"'sentences' has shape {shape}: send one text per row, [N, 1].")
    texts = []
    # One by one: an array of texts drops the zeros at their ends.
    for row, text in enumerate(sentences.reshape(-1)):
        try:
            texts.append(bytes(text).decode())
        except UnicodeDecodeError as error:
            why = f"'sentences' holds bytes in sample {row} that are not UTF-8 ({error.reason})."
            raise UserError(why) from error
    return texts


def process_inputs(
    inputs: Mapping[str, np.ndarray | None], tokenize_func: Callable[[list[str]], tuple]
) -> dict[str, np.ndarray]:
    """The {"inputs": int64 [N, S], "sequence_length": int64 [N]} of an infer request, of whose
    `sentences` `tokenize_func` makes (tokens [N, S], lengths [N]); they win over `tokens`.
    """
    sentences = inputs.get("sentences")
    if sentences is not None:
        tokens, lengths = tokenize_func(_decode_sentences(np.asarray(sentences)))
    else:
        tokens, lengths = inputs.get("tokens"), inputs.get("sequence_lengths")
        if tokens is None or lengths is None:
            missing = "tokens" if tokens is None else "sequence_lengths"
            both = "'tokens' together with 'sequence_lengths'"
            raise UserError(f"'{missing}' is missing: send 'sentences', or {both}.")
    return {
        "inputs": np.asarray(tokens).astype(np.int64, copy=False),
        "sequence_length": np.asarray(lengths).astype(np.int64, copy=False).reshape(-1),
    }


def no_sentences(sentences: list[str]) -> tuple:
    """In place of a function that tokenizes, where the tokens matter: raise `RequestError`."""
    raise RequestError(
        f"{len(sentences)} 'sentences' came, but send 'tokens' and 'sequence_lengths' to this "
        "server, and to a reward function 'prompt_lengths'."
    )


def pad_batch_and_strip_sequence(
    tokens: np.ndarray,
    sequence_lengths: np.ndarray,
    pad_to_multiple: int,
    strip_sequence_length_to_multiple: int | None = None,
) -> tuple[dict[str, np.ndarray], int, int]:
    """Pad a batch, tokens int64 [N, S] and lengths int64 [N], with empty rows (0) to a multiple,
    and cut columns that no sample uses, down to another multiple; None keeps them. Returns
    ({"inputs": [N', S'], "sequence_length": [N']}, number of rows added, S).
    """
    rows, width = tokens.shape
    if strip_sequence_length_to_multiple is not None:
        longest = max(int(sequence_lengths.max()), 1)
        step = strip_sequence_length_to_multiple
        tokens = tokens[:, : min(width, -(-longest // step) * step)]
    tokens = pad_rows(tokens, pad_to_multiple)
    lengths = pad_rows(sequence_lengths, pad_to_multiple)
    return {"inputs": tokens, "sequence_length": lengths}, tokens.shape[0] - rows, width


def slice_size(width: int, micro_batch_size: int, pipeline_stages: int) -> int:
    """How many samples, of `width` tokens, a slice has of each data-parallel rank."""
    count = max(SLICE_TOKENS // (micro_batch_size * width), 1)
    if pipeline_stages > 1:
        count = max(count, SLICE_MICRO_BATCHES_PER_STAGE * pipeline_stages)
        count = -(-count // pipeline_stages) * pipeline_stages  # as virtual stages need it
    return count * micro_batch_size


def cut_rows(lengths: np.ndarray, shares: int, size: int, by_length: bool) -> list[np.ndarray]:
    """The places, int64 [n], of the samples of each slice: `size` of each of `shares` ranks, which
    get `lengths`, int64 [N], evenly, in order. `by_length`: the longest of a share come first.
    """
    own = lengths.reshape(shares, -1)
    if own.shape[1] <= size:
        return [np.arange(len(lengths))]
    places = np.arange(own.shape[1])[None].repeat(shares, 0)
    if by_length:
        places = np.argsort(-own, axis=1, kind="stable")
    places = places + np.arange(shares)[:, None] * own.shape[1]
    starts = range(0, own.shape[1], size)
    return [places[:, start : start + size].reshape(-1) for start in starts]


class PieceStore:
    """The pieces of one request until all have come, none for `timeout_s`, or another's first."""

    def __init__(self, timeout_s: float = PIECE_TIMEOUT_S):
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._request_id: str | None = None
        self._arrays: Arrays = {}
        self._rows = 0  # that have come
        self._timer: threading.Timer | None = None

    def add(self, request_id: str, first: int, rows: int, arrays: Arrays) -> Arrays | None:
        """Keep a piece, arrays [n, ...]; returns those of the whole request with the last one,
        else None. Pieces come in order; the first one starts the request anew. The last one that
        came may come again, if its sender did not get the reply. `RequestError`: it does not
        continue the request, or the memory cannot hold the whole; what had come is dropped.
        """
        count = len(next(iter(arrays.values())))
        end, piece = first + count, f"a piece of request {request_id}"
        with self._lock:
            is_known, whole, came = request_id == self._request_id, self._arrays, self._rows
            self._forget()  # it stays so after an error
            if first == 0:
                whole = _room_for(rows, arrays)
            elif not is_known or came not in (first, end):
                has = f"{came} rows of it have come"
                if not is_known:
                    has = "its first rows have not come, or were dropped since"
                raise RequestError(
                    f"{piece} begins with row {first}, but {has}. Send all pieces in order, one "
                    "after the other."
                )
            for name, array in whole.items():
                if arrays[name].shape[1:] != array.shape[1:] or len(array) != rows:
                    raise RequestError(
                        f"{piece} has '{name}' {list(arrays[name].shape)} of {rows} rows, but the "
                        f"first piece promised {list(array.shape)} in all."
                    )
            if count == 0 or end > rows:
                raise RequestError(f"{piece} has the rows {first} to {end} of {rows}.")
            for name, array in whole.items():
                array[first:end] = arrays[name]
            if end == rows:
                return whole
            self._request_id, self._arrays, self._rows = request_id, whole, end
            self._timer = threading.Timer(self.timeout_s, self._give_up, (request_id, end))
            self._timer.daemon = True
            self._timer.start()
        return None

    def drop(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._request_id, self._arrays, self._rows = None, {}, 0
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self, request_id: str, rows: int) -> None:
        """Called by the timer."""
        with self._lock:
            if (request_id, rows) != (self._request_id, self._rows):
                return  # a piece has come at this very moment
            self._forget()
        silent = f"no further piece of request {request_id} for {self.timeout_s:.0f} s"
        logging.warning(f"critic_train: {silent}; the {rows} row(s) that had come are dropped")


def _room_for(rows: int, arrays: Arrays) -> Arrays:
    """Arrays for the `rows` of a request, of which `arrays` are a piece; else `RequestError`."""
    count = len(next(iter(arrays.values())))
    needed = rows * sum(array.nbytes for array in arrays.values()) // max(count, 1)
    free = psutil.virtual_memory().available
    if needed > free:
        raise RequestError(
            f"the request has {rows} rows, {needed / 2**30:.1f} GiB, but the server's machine has "
            f"{free / 2**30:.1f} GiB left. Use smaller rollouts (model.ppo.num_rollout_samples), "
            "or a machine with more memory."
        )
    return {name: np.empty((rows, *a.shape[1:]), a.dtype) for name, a in arrays.items()}
