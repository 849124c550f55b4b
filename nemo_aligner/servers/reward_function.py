# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's Python function as a reward: `function(prompts, responses, lengths) -> scores`, run in
worker processes (`user_code.py`); or a web server in its place (`web.py`).

N is the number of samples of a request, S their padded token length, P a prompt's length, R that
of prompt and response.
"""

import bisect
import collections
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core.errors import UserError, cause_in
from nemo_aligner.core.tokenizer import (
    Tokenizer,
    decode_with_special_tokens,
    response_text,
    special_ids,
)
from nemo_aligner.servers.futures import then
from nemo_aligner.servers.threads import settle
from nemo_aligner.servers.user_code import Pool, Task, WorkerProcess, split_spec
from nemo_aligner.servers.web import RewardServers
from nemo_aligner.servers.worker import ALL_COLUMNS, Sample

# Samples that a worker gets at once: they share the cost of a message, and wait behind a slow one.
MAX_CHUNK = 32
SHOWN_CHARACTERS = 200  # of a prompt or response in a message


class RewardFunctionError(UserError):
    """The function gave no usable score; the message has the sample and the cause."""


class RewardFunction:
    """Scores rollouts with the function `spec`; call `close()` or use it in a `with` block.
    `UserError`, `ConfigError`: there is no such function, or it cannot be called so.

    Args:
        spec: "path/to/file.py:function", or the web servers that score in its place.
        tokenizer: of the policy whose responses are scored.
        timeout_s: per sample; one that takes longer fails, and its worker is killed.
        fallback: score of a sample for which the function failed; None makes the request fail.
        per: what a reward is for: a "response", or each "step" or "token" of it (then a list).
        gives_columns: whether columns of the prompts' records come with the samples.
    """

    def __init__(
        self,
        spec: "str | RewardServers",
        tokenizer: Any,
        workers: int = 2,
        timeout_s: float = 10.0,
        fallback: float | None = None,
        per: str = "response",
        step_end: str | None = None,
        section: str = "inference",
        gives_columns: bool = False,
    ):
        self.tokenizer, self.section = tokenizer, section
        key = f"{section}.reward_fn"
        self.is_served = isinstance(spec, RewardServers)
        make: Callable[[], Any]
        self._most = MAX_CHUNK
        if isinstance(spec, RewardServers):
            self.title, self._most = str(spec.spec), spec.kind.most
            make = functools.partial(spec.kind, spec)
        else:
            self.title = f"the reward function {spec}"
            example = "examples/rewards/arithmetic.py:exact_answer"
            path, name = split_spec(spec, key, "function", example)
            make = functools.partial(WorkerProcess, path, "function", name, f"{key}={spec}")
        self.per, self.step_end = per, step_end
        self.workers, self.timeout_s, self.fallback = workers, timeout_s, fallback
        self._chunks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._requests: set[_Request] = set()
        limit = f"{timeout_s:g} s ({section}.reward_fn_timeout_s)"
        self._pool = Pool(make, [self._chunks] * workers, limit)
        # The parameter that gets the lengths, and the columns that it asks for (`columns_of`).
        self.third, *self.columns = self._pool.told
        asked = [name for name in self.columns if name != ALL_COLUMNS]
        if asked and not gives_columns:
            self.close()
            raise UserError(
                f"{key}={spec} asks for columns of the records ({', '.join(asked)}), which come "
                "only in evaluate and in trainer.<algorithm>.reward_fn; or give these a default."
            )
        logging.info(f"{self.title}: {self.workers} worker(s), {self.timeout_s:g} s per sample")

    def __enter__(self) -> "RewardFunction":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; requests in progress fail. Any thread may call it, more than once."""
        with self._lock:
            self._closed = True
            requests = list(self._requests)
        for request in requests:
            request.fail(RewardFunctionError(f"{self.title} is shutting down"))
        self._pool.close()

    def infer(
        self,
        tokens: np.ndarray | Tensor,
        sequence_lengths: np.ndarray | Tensor,
        prompt_lengths: np.ndarray | Tensor,
    ) -> np.ndarray:
        """As `submit`, but waits, and raises `RewardFunctionError`."""
        return self.submit(tokens, sequence_lengths, prompt_lengths).result()

    def submit(
        self,
        tokens: np.ndarray | Tensor,
        sequence_lengths: np.ndarray | Tensor,
        prompt_lengths: np.ndarray | Tensor,
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> "concurrent.futures.Future[np.ndarray]":
        """The future of the rewards of samples: float32 [N, 1], or per step or token [N, S], NaN
        at tokens without one.

        Args:
            tokens: int64 [N, S], prompt and response, right-padded.
            sequence_lengths, prompt_lengths: int64 [N] or [N, 1], R and P.
            columns: of the samples' records, by name.
        """
        tokens, ends, starts = map(_to_numpy, (tokens, sequence_lengths, prompt_lengths))
        ends, starts = ends.reshape(-1), starts.reshape(-1)
        prompts, responses, lengths = self.decode(tokens, ends, starts)
        places = [list(range(length)) for length in lengths]
        if self.step_end is not None:
            steps = [
                steps_of(self.tokenizer, row[start:end].tolist(), self.step_end)
                for row, start, end in zip(tokens, starts.tolist(), ends.tolist())
            ]
            responses, places = [each.text for each in steps], [each.places for each in steps]
        counts = [None if self.per == "response" else len(each) for each in places]
        records = columns or [{}] * len(counts)
        samples = list(zip(prompts, responses, lengths, counts, records, strict=True))

        def rewards(scores: _Scores) -> np.ndarray:
            if self.per == "response":
                return np.array(scores, dtype=np.float32)[:, None]
            found = np.full(tokens.shape, np.nan, dtype=np.float32)
            for row, start, end, at, values in zip(found, starts, ends, places, scores):
                if isinstance(values, list):
                    where = start + np.array(at, dtype=np.int64)
                    row[where] = 0.0
                    np.add.at(row, where, values)  # a token may end several steps
                else:  # the fallback score of the response
                    row[end - 1] = values
            return found

        return then(self._submit(samples), rewards)

    def decode(
        self, tokens: np.ndarray, ends: np.ndarray, starts: np.ndarray
    ) -> tuple[list[str], list[str], list[int]]:
        """Prompts, responses (without end token) and lengths (R - P, with it), N each."""
        prompts, responses, lengths = [], [], []
        for row, start, end in zip(tokens, starts.tolist(), ends.tolist()):
            ids = row[:end].tolist()
            prompts.append(self.tokenizer.ids_to_text(ids[:start]) if start else "")
            lengths.append(len(ids) - start)
            responses.append(response_text(self.tokenizer, ids[start:]))
        return prompts, responses, lengths

    def score(
        self, prompts: list[str], responses: list[str], lengths: list[int], columns: Any = None
    ) -> np.ndarray:
        """The scores float32 [N] of N samples, from any thread; raises `RewardFunctionError`."""
        more = [None] * len(prompts), columns or [{}] * len(prompts)
        samples: list[Any] = list(zip(prompts, responses, lengths, *more))
        return np.array(self._submit(samples).result(), dtype=np.float32)

    def _submit(self, samples: list[Sample]) -> "concurrent.futures.Future[_Scores]":
        request = _Request(self, samples)
        with self._lock:
            if self._closed:
                raise RewardFunctionError(f"{self.title} is shut down")
            self._requests.add(request)
        request.future.add_done_callback(lambda _: self._requests.discard(request))
        # A few chunks per process, so that they finish together; a server has more at once.
        chunks = self.workers * (1 if self.is_served else 4)
        size = min(max(len(samples) // chunks, 1), self._most)

        def message(_worker: Any, left: Sequence[int]) -> tuple[list[Any], float]:
            return [samples[index] for index in left], self.timeout_s

        for start in range(0, len(samples), size):
            chunk = collections.deque(range(start, min(start + size, len(samples))))
            self._chunks.put(
                Task(chunk, message, request.record, request.fail, request.future.done)
            )
        return request.future


def _to_numpy(array: np.ndarray | Tensor) -> np.ndarray:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


# Of each sample a number, or a list where it needs several (a number there is the fallback).
_Scores = list[float | list[float]]


@dataclasses.dataclass(eq=False)
class _Request:
    owner: RewardFunction
    samples: list[Sample]

    def __post_init__(self) -> None:
        self.future: concurrent.futures.Future[_Scores] = concurrent.futures.Future()
        self._scores: _Scores = [0.0] * len(self.samples)
        self._left = len(self.samples)
        self._failures: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        if not self.samples:
            self.future.set_result(self._scores)

    def fail(self, error: Exception) -> None:
        settle(self.future, error)

    def record(self, index: int, kind: str, value: Any) -> None:
        fallback = self.owner.fallback
        if kind == "error" and fallback is None:
            remedy = f"Correct it, or set {self.owner.section}.reward_fn_fallback to its score."
            self.fail(RewardFunctionError(f"{self._describe(index, value)}. {remedy}"))
            return
        with self._lock:
            if kind == "error":
                self._failures.append((index, value))
                value = fallback
            self._scores[index] = value
            self._left -= 1
            last = self._left == 0
        if last:
            if self._failures:
                logging.warning(
                    f"{len(self._failures)} of {len(self.samples)} samples got the fallback score "
                    f"{fallback:g} ({self.owner.section}.reward_fn_fallback). The first: "
                    f"{self._describe(*min(self._failures))}"
                )
            # It may have failed meanwhile: the server is shutting down.
            settle(self.future, self._scores)

    def _describe(self, index: int, why: str) -> str:
        prompt, response, length, _, columns = self.samples[index]
        failed = f"{self.owner.title} failed on sample {index} of {len(self.samples)}"
        if "\n" in why:
            logging.error(f"{failed}: {why}")
        return (
            f"{failed}: {cause_in(why)}; prompt {shown(prompt)}, response {shown(response)}, "
            f"length {length}" + "".join(f", {name} {shown(columns[name])}" for name in columns)
        )


def shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}[... {len(text)} characters]"


class Steps(NamedTuple):
    """The steps of a response."""

    text: str  # with special tokens, but for those behind the last step
    places: list[int]  # of the tokens that end them; one that ends several stands there as often


def step_ends(tokenizer: Tokenizer, response: Sequence[int], step_end: str) -> list[int]:
    """Places in `response`, token ids, of the tokens that complete a `step_end`, ascending."""
    response = list(response)

    def completed(tokens: int) -> int:
        return decode_with_special_tokens(tokenizer, response[:tokens]).count(step_end)

    # The count grows with the tokens, so each place is found by bisection.
    return [
        bisect.bisect_left(range(len(response)), number, key=lambda place: completed(place + 1))
        for number in range(1, completed(len(response)) + 1)
    ]


def steps_of(tokenizer: Tokenizer, response: Sequence[int], step_end: str) -> Steps:
    """The steps of `response`, token ids: as many as `step_end` occurs in the text, and one more
    if text that is not blank follows the last, or if there is none.
    """
    places = step_ends(tokenizer, response, step_end)
    kept, special = list(response), special_ids(tokenizer)
    while len(kept) > (places[-1] + 1 if places else 0) and kept[-1] in special:
        kept.pop()
    text = decode_with_special_tokens(tokenizer, kept)
    if response and (not places or text.split(step_end)[-1].strip()):
        places.append(len(response) - 1)
    return Steps(text, places)


def scores_of_places(
    scores: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    tokenizer: Tokenizer,
    per: str,
    step_end: str | None,
) -> Tensor:
    """A reward model's `scores`, float32 [N, S], at the response tokens that `per` says ("token":
    all, "step": those that complete a `step_end`), NaN elsewhere. `tokens`: int64 [N, S];
    `lengths`, `prompt_lengths`: int64 [N]; of a row that fills up a batch the latter is 0.
    `RuntimeError`: a score at such a token is not finite.
    """
    has_reward = torch.zeros(scores.shape, dtype=torch.bool)
    bounds = zip(tokens.tolist(), prompt_lengths.tolist(), lengths.tolist(), strict=True)
    for row, (ids, start, end) in zip(has_reward, bounds):
        if per == "token":
            row[start:end] = True
        else:
            assert step_end is not None
            row[[start + place for place in step_ends(tokenizer, ids[start:end], step_end)]] = True
    has_reward = has_reward.to(scores.device)
    bad = (has_reward & ~scores.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        raise RuntimeError(
            f"the reward model's scores of the tokens of row {bad[0]} are not finite: look for "
            "NaN in its weights."
        )
    return scores.masked_fill(~has_reward, float("nan"))
