# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a server job scores a request on all its ranks: shared by the critic and reward servers.

A request is checked, tokenized and padded on a Triton thread of rank 0 (`Scorer.reply_to`), its
samples are shared out to the data-parallel ranks, scored, and gathered in their order
(`Scorer.forward`), a large request in slices (requests.py). None of this changes a score. N is the
number of samples of a request, n that of one data-parallel rank, S the padded token length.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gather_tensor
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.control_group import ControlGroup
from nemo_aligner.servers.requests import (
    calculate_inference_batch_padding_multiple,
    cut_rows,
    pad_batch_and_strip_sequence,
    pad_rows,
    process_inputs,
    slice_size,
)
from nemo_aligner.servers.schema import (
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
    # samples per data-parallel rank that make a slice, in their order; None: as requests.py says
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
        outputs = self._score_slices(arrays, lambda _rows, slice_: self.forward(**slice_))
        return finish(outputs) if finish else outputs

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

    def forward(self, **arrays: np.ndarray) -> Arrays:
        """Run `ServerSignal.FORWARD`; every rank calls it with the arrays. {} on ranks above 0."""
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
