# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a server job scores a request on all its ranks: shared by the critic and reward servers.

A request is decoded, checked, tokenized and padded on a thread of rank 0 (`Scorer.reply_to`), its
samples are shared out to the data-parallel ranks, scored, and gathered in their order
(`Scorer.forward`), a large request in slices. None of this changes a score. N is the number of
samples of a request, n that of one data-parallel rank, S the padded token length.

A *slice* is a part of the samples of a scoring request that is scored in one operation of all
ranks; between two of them the server works on other requests. How a request is cut depends on that
request alone, and a slice has whole micro-batches of it, with the same samples in each: so a score
has the same bits as if the request had been scored in one go. (Exceptions: docs/jobs.md.)

A *piece* is a part of the rows of a train request that is too large for one body: a request of its
own with the same `request_id` and with `piece` = [its first row, rows of the whole]. The server
trains when the last has come; the reply to that one is the reply to the whole.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gather_tensor
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.control_group import ControlGroup, ServerSignal
from nemo_aligner.servers.schema import (
    MOST_ROWS,
    Arrays,
    RequestError,
    validate_scoring_inputs,
    validate_tokenizer,
)
from nemo_aligner.servers.server_loop import OperationFailedError, ServerLoop

# Arrays of a request by wire name; optional inputs that were not sent are absent or None.
Inputs = Mapping[str, np.ndarray | None]
ScoreRows = Callable[[Tensor, Tensor, Tensor | None], dict[str, Tensor]]  # see `Scorer`
_PASS = "pass"  # name of the number of its pass, among the arrays of a slice


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
    """The pieces of one request until all have come, or the first one of another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request_id: str | None = None
        self._arrays: Arrays = {}
        self._rows = 0  # that have come

    def add(self, request_id: str, first: int, rows: int, arrays: Arrays) -> Arrays | None:
        """Keep a piece, arrays [n, ...]; returns those of the whole request with the last one,
        else None. Pieces come in order; the first one starts the request anew. The last one that
        came may come again, if its sender did not get the reply. `RequestError`: it does not
        continue the request, or the memory cannot hold the whole; what had come is dropped.
        """
        count = len(next(iter(arrays.values())))
        with self._lock:
            again = request_id == self._request_id and 0 < first + count == self._rows
            try:
                if first == 0:
                    self._start(request_id, rows, arrays)
                elif again:
                    self._rows = first
                self._check(request_id, first, count, rows, arrays)
            except RequestError:
                self._forget()
                raise
            for name, array in arrays.items():
                self._arrays[name][first : first + count] = array
            self._rows += count
            if self._rows == rows:
                whole = self._arrays
                self._forget()
                return whole
        return None

    def drop(self) -> None:
        with self._lock:
            self._forget()

    # ---- callers hold the lock ----

    def _start(self, request_id: str, rows: int, arrays: Arrays) -> None:
        self._forget()
        count = len(next(iter(arrays.values())))
        needed = rows * sum(array.nbytes for array in arrays.values()) // max(count, 1)
        free = psutil.virtual_memory().available
        if needed > free:
            raise RequestError(
                f"the request has {rows} rows, {needed / 2**30:.1f} GiB, but the server's machine "
                f"has {free / 2**30:.1f} GiB left. Use smaller rollouts "
                "(model.ppo.num_rollout_samples), or a machine with more memory."
            )
        self._request_id = request_id
        self._arrays = {
            name: np.empty((rows, *array.shape[1:]), array.dtype) for name, array in arrays.items()
        }

    def _check(self, request_id: str, first: int, count: int, rows: int, arrays: Arrays) -> None:
        if request_id != self._request_id or first != self._rows:
            came = "its first rows have not come, or were dropped since"
            if request_id == self._request_id:
                came = f"{self._rows} rows of it have come"
            begins = f"a piece of request {request_id} begins with row {first}, but {came}"
            raise RequestError(f"{begins}. Send all pieces in order, one after the other.")
        piece = f"a piece of request {request_id} has"
        for name, whole in self._arrays.items():
            if arrays[name].shape[1:] != whole.shape[1:] or len(whole) != rows:
                has = f"{piece} '{name}' {list(arrays[name].shape)} of {rows} rows"
                promised = f"the first piece promised {list(whole.shape)} in all"
                raise RequestError(f"{has}, but {promised}.")
        if count == 0 or first + count > rows:
            raise RequestError(f"{piece} the rows {first} to {first + count} of {rows}.")

    def _forget(self) -> None:
        self._request_id, self._arrays, self._rows = None, {}, 0


def share_of_rank(start: int, count: int) -> slice:
    """This rank's share of the `count` samples, a multiple of DP, that begin at `start`."""
    share = count // parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    return slice(start + rank * share, start + (rank + 1) * share)


def gather_outputs(tensor: Tensor) -> np.ndarray | None:
    """The outputs [n, ...] of all data-parallel ranks, float32 [N, ...], on global rank 0; None
    elsewhere. Every rank calls it, with equal shapes; data-parallel groups without rank 0 hold the
    same samples and send nothing.
    """
    tensor = tensor.detach().float().contiguous()
    several = parallel_state.get_data_parallel_world_size() > 1
    if several and parallel_state.get_data_parallel_src_rank() == 0:
        group = parallel_state.get_data_parallel_group()
        tensor = torch.cat(gather_tensor(tensor.to(get_device()), 0, group) or [tensor])
    return tensor.cpu().numpy() if parallel_state.get_rank() == 0 else None


def batcher_options(
    max_queue_delay_microseconds: float, inference_micro_batch_size: int | Sequence[int]
) -> dict[str, Any]:
    """The arguments of PyTriton's DynamicBatcher: how long Triton holds a request back for others
    to hand over with it, and at how many samples per data-parallel rank it waits no more.
    """
    sizes = inference_micro_batch_size
    sizes = [sizes] if isinstance(sizes, int) else sizes
    dp_size = parallel_state.get_data_parallel_world_size()
    return {
        "max_queue_delay_microseconds": int(max_queue_delay_microseconds),
        "preferred_batch_size": sorted({min(size * dp_size, MOST_ROWS) for size in sizes}),
    }


def model_limits(model: Any) -> tuple[int | None, int | None]:
    """Return (vocabulary size, longest sample in tokens) of a model; None for what it lacks."""
    vocab_size = getattr(getattr(model, "tokenizer", None), "vocab_size", None)
    return vocab_size, (getattr(model, "cfg", None) or {}).get("encoder_seq_length")


@dataclass(eq=False)
class Scorer:
    """Scores requests; every rank of the job holds one. `turns`: for what changes the model."""

    # (tokens int64 [n, S], lengths int64 [n], prompt_lengths int64 [n] or None), on this rank's
    # device, -> {"rewards": [n, 1], "values": [n, S]} or one of them, or others with a column for
    # each token, [n, S, ...]. Every rank calls it with its share. A row that only fills up the
    # batch has length 1 and prompt length 0.
    score_rows: ScoreRows
    tokenize_func: Callable[[list[str]], tuple]  # -> (tokens int64 [N, S], lengths int64 [N])
    micro_batch_size: int
    # columns that no sample uses are cut, down to this multiple; None keeps them
    strip_sequence_length_to_multiple: int | None = None
    vocab_size: int | None = None  # bound of the served model for token ids; None: no bound
    max_length: int | None = None  # the same for S
    needs_prompt_lengths: bool = False  # refuse a request that does not say where responses start
    tokenizer: Any = None  # a request that names another one is refused; None refuses none
    # functions like `score_rows`, which together give what it gives. Each scores all slices before
    # the next, so that weights which take turns in one module are not swapped for each slice
    passes: Sequence[ScoreRows] = ()
    # samples per data-parallel rank that make a slice, in their order; None: `slice_size`
    slice_rows: int | None = None

    def __post_init__(self) -> None:
        self.passes = self.passes or (self.score_rows,)
        self.turns = Turns()
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        # Small and large requests have threads of their own, and a tokenizer is for one at a time.
        self._tokenizing = threading.Lock()

    @functools.cached_property
    def control(self) -> ControlGroup:
        """The group that carries request data; all ranks make it at their first operation."""
        return ControlGroup()

    def reply_to(self, inputs: Inputs, loop: ServerLoop | None) -> Arrays:
        """Score a request on a thread of rank 0; `loop` has all ranks run each slice."""
        assert loop is not None, "the server does not run"
        arrays, finish = self._prepare(inputs)

        def score(rows: np.ndarray, slice_: Arrays) -> Arrays:
            try:
                return loop.submit(ServerSignal.FORWARD, slice_)
            except OperationFailedError as error:
                if self.slice_rows is None or len(rows) == len(arrays["tokens"]):
                    raise
                # An error that counts samples counts those of the slice.
                where = f"in the slice of the samples {rows[0]} to {rows[-1]}"
                raise OperationFailedError(f"{where}: {error}") from error

        with self.turns.scoring():
            return finish(self._score_slices(arrays, score))

    def run(self, inputs: Inputs) -> Arrays:
        """Score rank 0's request without a server; every rank calls it. {} on ranks above 0."""
        finish = None

        def prepare() -> Arrays:
            nonlocal finish
            arrays, finish = self._prepare(inputs)
            return arrays

        arrays = self.control.from_rank_zero(prepare)
        outputs = self._score_slices(arrays, lambda _rows, slice_: self._score(slice_))
        return finish(outputs) if finish else outputs

    def forward(self, **arrays: np.ndarray) -> Arrays:
        """Run `ServerSignal.FORWARD`; every rank calls it, rank 0 with the arrays."""
        return self._score(self.control.from_rank_zero(lambda: arrays))

    def _prepare(self, inputs: Inputs) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
        """The checked, stripped, padded arrays of a request, and what undoes that on outputs."""
        validate_tokenizer(inputs.get("tokenizer"), self.fingerprint)
        prompt_lengths = inputs.get("prompt_lengths")
        with self._tokenizing:
            processed = process_inputs(inputs, self.tokenize_func)
        if self.needs_prompt_lengths and prompt_lengths is None:
            raise RequestError(
                "'prompt_lengths' is missing: this reward scores the response alone. Send the "
                "number of prompt tokens of each row, [N, 1], with 'tokens', 'sequence_lengths'."
            )
        tokens, lengths = processed["inputs"], processed["sequence_length"]
        validate_scoring_inputs(tokens, lengths, self.vocab_size, self.max_length, prompt_lengths)
        samples = tokens.shape[0]
        multiple = calculate_inference_batch_padding_multiple(samples, self.micro_batch_size)
        padded, _extra, width = pad_batch_and_strip_sequence(
            tokens, lengths, multiple, self.strip_sequence_length_to_multiple
        )
        # An empty row still needs one position to read a reward from.
        arrays = {
            "tokens": padded["inputs"],
            "sequence_lengths": np.maximum(padded["sequence_length"], 1),
        }
        if prompt_lengths is not None:
            arrays["prompt_lengths"] = pad_rows(
                prompt_lengths.reshape(-1).astype(np.int64, copy=False), multiple
            )

        def finish(outputs: Arrays) -> Arrays:
            finished = {name: array[:samples] for name, array in outputs.items()}
            for name in finished.keys() - {"rewards"}:  # those with a column for each token
                more = [(0, 0)] * finished[name].ndim
                more[1] = (0, width - finished[name].shape[1])
                filler = np.nan if name == "token_rewards" else 0
                finished[name] = np.pad(finished[name], more, constant_values=filler)
            return finished

        return arrays, finish

    def _score_slices(
        self, arrays: Arrays, score: Callable[[np.ndarray, Arrays], Arrays]
    ) -> Arrays:
        """`score` gets the places of a slice's samples and its arrays; {} where it returns {}."""
        outputs: Arrays = {}
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        width, shares = arrays["tokens"].shape[1], parallel_state.get_data_parallel_world_size()
        size = self.slice_rows or slice_size(max(width, 1), self.micro_batch_size, stages)
        slices = cut_rows(arrays["sequence_lengths"], shares, size, self.slice_rows is None)
        if len(slices) == 1:
            return score(slices[0], arrays)
        for number in range(len(self.passes)):
            for rows in slices:
                slice_ = {name: array[rows] for name, array in arrays.items()}
                for name, found in score(rows, {**slice_, _PASS: np.array([number])}).items():
                    if name not in outputs:
                        shape = len(arrays["tokens"]), *found.shape[1:]
                        outputs[name] = np.empty(shape, found.dtype)
                    outputs[name][rows] = found
        return outputs

    def _score(self, arrays: Arrays) -> Arrays:
        arrays = dict(arrays)
        number = arrays.pop(_PASS, None)
        score_rows = self.score_rows if number is None else self.passes[int(number[0])]
        own = share_of_rank(0, arrays["tokens"].shape[0])
        share = {
            name: torch.from_numpy(array[own]).to(get_device()) for name, array in arrays.items()
        }
        outputs = score_rows(
            share["tokens"], share["sequence_lengths"], share.get("prompt_lengths")
        )
        # Sorted: every rank must gather in the same order.
        gathered = {
            name: gather_outputs(torch.as_tensor(outputs[name])) for name in sorted(outputs)
        }
        return {name: array for name, array in gathered.items() if array is not None}


class Turns:
    """Several threads may score whole requests at once, but none while one changes the model."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._scoring = 0
        self._waiting = 0  # to change the model, or changing it

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """The model stays as it is; waits until nobody wants to change it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._scoring += 1
        try:
            yield
        finally:
            with self._changed:
                self._scoring -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the model; waits for what is scored. The queue of the server orders changes."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._scoring)
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()
