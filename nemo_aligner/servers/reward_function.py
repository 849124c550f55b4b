# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's Python function as a reward: `function(prompts, responses, lengths) -> scores`, run in
worker processes.

The server decodes a rollout into text and shares its samples out to the workers
(`reward_worker.py`); each sample is a call of its own with a time limit of its own. Each worker is
driven by one thread, which starts it, feeds it chunks of samples, reads the scores as they come,
and kills and replaces it when a sample takes too long or brings it down. N is the number of rows
of a request, S its padded token length, P a prompt's length, R that of prompt and response.

Why not a process pool of a library: concurrent.futures has no time limits and breaks as a whole
when a worker dies; Pebble 5.2 (measured) lost a sample's answer in one of three runs with crashing
functions, blocks all workers for three seconds behind one that ignores SIGTERM, and starts workers
by importing the server's script, seconds with torch in it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.servers import reward_worker
from nemo_aligner.servers.schema import RequestError

# Samples that a worker gets at once: they share the cost of a message, and are stuck together
# behind a slow one.
MAX_CHUNK = 32
# How long the function's file may take to load.
LOAD_TIMEOUT_S = 120.0
# A worker that has died without closing its pipe (a process that it started has it, too) is
# noticed this fast.
PROBE_INTERVAL_S = 0.5
# Characters of a prompt or response in a message.
SHOWN_CHARACTERS = 200


class RewardFunctionError(RuntimeError):
    """The function gave no usable score; the message holds the sample and the function's
    traceback.
    """


class RewardFunction:
    """Scores rollouts with the function `spec`; call `close()` or use it in a `with` block.

    Args:
        spec: "path/to/file.py:function"; a relative path counts from the current folder. The file
            may import modules that lie beside it.
        tokenizer: NeMo tokenizer of the policy whose answers are scored.
        workers: processes.
        timeout_s: per sample; a sample that takes longer fails, and its worker is killed.
        fallback: score of a sample for which the function failed; None makes the request fail.

    Raises:
        ConfigError: a value that cannot work.
        UserError: no such file or function, it cannot be imported, or it does not take three
        arguments.
    """

    def __init__(
        self,
        spec: str,
        tokenizer,
        workers: int = 2,
        timeout_s: float = 10.0,
        fallback: float | None = None,
    ):
        self.spec, self.tokenizer = spec, tokenizer
        self.path, self.name = _split_spec(spec)
        _check_options(workers, timeout_s, fallback)
        self.workers, self.timeout_s, self.fallback = int(workers), float(timeout_s), fallback
        self._chunks = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[_Worker] = set()
        self._requests: set[_Request] = set()
        ready = [concurrent.futures.Future() for _ in range(self.workers)]
        self._threads = [
            threading.Thread(target=self._drive, args=(future,), daemon=True) for future in ready
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in ready:
                future.result()
        except BaseException:
            self.close()
            raise
        logging.info(
            f"reward function {spec}: {self.workers} worker(s), {self.timeout_s:g} s per sample"
        )

    def __enter__(self) -> "RewardFunction":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; requests in progress fail. Any thread may call it, more than once."""
        with self._lock:
            self._closed = True
            workers, requests = list(self._running), list(self._requests)
        for request in requests:
            request.fail(RewardFunctionError(f"the reward function {self.spec} is shutting down"))
        for worker in workers:
            worker.kill()
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join(5.0)

    # ---- scoring ----

    def infer(self, tokens, sequence_lengths, prompt_lengths) -> np.ndarray:
        """Rewards float32 [N, 1] of rollouts; the arguments are arrays or tensors.

        Args:
            tokens: int64 [N, S], prompt and response, right-padded.
            sequence_lengths: int64 [N] or [N, 1], R.
            prompt_lengths: int64 [N] or [N, 1], P.

        Raises:
            RequestError: no `prompt_lengths`.
            RewardFunctionError: the function failed on a sample and there is no fallback.
        """
        if prompt_lengths is None:
            raise RequestError(
                "'prompt_lengths' is missing: a reward function is given prompt and response "
                "apart; send the number "
                "of prompt tokens of each row, [N, 1]."
            )
        tokens, ends, starts = (
            _to_numpy(array) for array in (tokens, sequence_lengths, prompt_lengths)
        )
        prompts, responses, lengths = self.decode(tokens, ends.reshape(-1), starts.reshape(-1))
        return self.score(prompts, responses, lengths)[:, None]

    def decode(self, tokens: np.ndarray, ends: np.ndarray, starts: np.ndarray) -> tuple:
        """Prompts, responses and lengths (R - P, the end token included), lists of N; see `infer`.

        The response's text has no end token; special tokens of a Hugging Face tokenizer are left
        out as in the tables of samples.
        """
        prompts, responses, lengths = [], [], []
        for row, start, end in zip(tokens, starts.tolist(), ends.tolist()):
            ids = row[:end].tolist()
            prompts.append(self._text(ids[:start]))
            answer = ids[start:]
            lengths.append(len(answer))
            responses.append(
                self._text(answer[:-1] if answer[-1:] == [self.tokenizer.eos_id] else answer)
            )
        return prompts, responses, lengths

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.ids_to_text(ids) if ids else ""

    def no_sentences(self, sentences: list[str]):
        """Stands where a served model's `tokenize` does: texts cannot be scored.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{len(sentences)} 'sentences' came, but the reward function {self.spec} is given "
            "prompt and response "
            "apart: send 'tokens', 'sequence_lengths' and 'prompt_lengths'."
        )

    def score(self, prompts: list[str], responses: list[str], lengths: list[int]) -> np.ndarray:
        """Scores float32 [N] of N samples, in their order. Several threads may call it at once.

        Raises:
            RewardFunctionError: the function failed on a sample and there is no fallback, or it is
                shutting down.
        """
        samples = list(zip(prompts, responses, lengths))
        request = _Request(self, samples)
        with self._lock:
            if self._closed:
                raise RewardFunctionError(f"the reward function {self.spec} is shut down")
            self._requests.add(request)
        try:
            # A few chunks per worker, so that they finish together.
            size = min(max(len(samples) // (4 * self.workers), 1), MAX_CHUNK)
            for start in range(0, len(samples), size):
                self._chunks.put((request, range(start, min(start + size, len(samples)))))
            return request.future.result()
        finally:
            with self._lock:
                self._requests.discard(request)

    # ---- one thread per worker ----

    def _drive(self, ready: concurrent.futures.Future) -> None:
        """Life of a thread. It must outlive its worker: the kernel kills that with the thread that
        started it.
        """
        worker = None
        try:
            worker = self._start_worker()
            ready.set_result(None)
            while (chunk := self._chunks.get()) is not None:
                worker = self._work_off(worker, *chunk)
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            self._end_worker(worker)

    def _work_off(
        self, worker: "_Worker | None", request: "_Request", rows: range
    ) -> "_Worker | None":
        """Score `rows` of a request; returns the worker, a new one where the given one did not
        survive.
        """
        left = collections.deque(rows)
        try:
            while left and not request.future.done():
                if worker is None or not worker.is_alive():
                    self._end_worker(worker)
                    worker = None
                    worker = self._start_worker()
                why = self._feed(worker, request, left)
                if why is not None:
                    self._end_worker(worker)
                    worker = None
                    request.record(left.popleft(), "error", why)
        except Exception as error:  # no new worker: not the fault of a sample
            request.fail(error)
        if left:  # the worker still has samples of a request that failed
            self._end_worker(worker)
            return None
        return worker

    def _feed(self, worker: "_Worker", request: "_Request", left: collections.deque) -> str | None:
        """Have `worker` score the rows in `left`, which go as their scores come.

        Returns:
            None, or what the first row in `left` did to the worker.
        """
        try:
            worker.send([request.samples[row] for row in left], self.timeout_s)
            while left and not request.future.done():
                kind, value = worker.receive(self.timeout_s)
                request.record(left.popleft(), kind, value)
        except TimeoutError:
            return f"it took longer than {self.timeout_s:g} s (inference.reward_fn_timeout_s) and was stopped"
        except _WorkerEndedError as error:
            return f"it ended its process ({error})"
        return None

    def _start_worker(self) -> "_Worker":
        """A worker that has loaded the function.

        Raises:
            UserError: it cannot be loaded.
        """
        worker = _Worker(self.path, self.name)
        with self._lock:
            self._running.add(worker)
            closed = self._closed
        try:
            if closed:
                raise RewardFunctionError(f"the reward function {self.spec} is shut down")
            kind, text = worker.receive(LOAD_TIMEOUT_S)
        except TimeoutError:
            kind, text = "error", f"loading the file took longer than {LOAD_TIMEOUT_S:g} s"
        except _WorkerEndedError as error:
            kind, text = "error", f"loading the file ended the process ({error})"
        except BaseException:
            self._end_worker(worker)
            raise
        if kind == "error":
            self._end_worker(worker)
            raise UserError(f"inference.reward_fn={self.spec} ({self.path}): {text}")
        return worker

    def _end_worker(self, worker: "_Worker | None") -> None:
        if worker is not None:
            worker.kill()
            worker.release()
            with self._lock:
                self._running.discard(worker)


def _split_spec(spec: str) -> tuple[str, str]:
    """(absolute path, function name) of "path/to/file.py:function"."""
    path, _, name = str(spec).rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"inference.reward_fn={spec} does not name a function; write "
            "path/to/file.py:function, such as "
            "examples/rewards/arithmetic.py:exact_answer."
        )
    absolute = Path(path).expanduser().absolute()
    if not absolute.is_file():
        raise UserError(
            f"inference.reward_fn={spec}: the file {absolute} does not exist; a relative path "
            "counts from the folder "
            "in which the server is started."
        )
    return str(absolute), name


def _check_options(workers, timeout_s, fallback) -> None:
    if workers != int(workers) or workers < 1:
        raise ConfigError(
            f"inference.reward_fn_workers={workers} must be a whole number, 1 or more."
        )
    if not timeout_s > 0:
        raise ConfigError(
            f"inference.reward_fn_timeout_s={timeout_s} must be a number of seconds above 0."
        )
    if fallback is not None and not math.isfinite(fallback):
        raise ConfigError(
            f"inference.reward_fn_fallback={fallback} must be null or a finite number."
        )


def _to_numpy(array) -> np.ndarray:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


@dataclasses.dataclass(eq=False)
class _Request:
    """Samples on their way through the workers; `future` gets their scores float32 [N], or an
    error.
    """

    owner: RewardFunction
    samples: list[tuple]

    def __post_init__(self):
        self.future = concurrent.futures.Future()
        self._scores = np.zeros(len(self.samples), dtype=np.float32)
        self._left = len(self.samples)
        self._failures = []
        self._lock = threading.Lock()
        if not self.samples:
            self.future.set_result(self._scores)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(
            concurrent.futures.InvalidStateError
        ):  # another sample was faster
            self.future.set_exception(error)

    def record(self, row: int, kind: str, value) -> None:
        """The outcome of one sample: its score, or with kind "error" why there is none."""
        fallback = self.owner.fallback
        if kind == "error" and fallback is None:
            self.fail(
                RewardFunctionError(
                    f"{self._describe(row, value)}\nMend the function, or set "
                    "inference.reward_fn_fallback to the "
                    "score that such a sample gets."
                )
            )
            return
        with self._lock:
            self._scores[row] = fallback if kind == "error" else value
            if kind == "error":
                self._failures.append((row, value))
            self._left -= 1
            last = self._left == 0
        if last:
            self._warn()
            with contextlib.suppress(
                concurrent.futures.InvalidStateError
            ):  # the server is shutting down
                self.future.set_result(self._scores)

    def _warn(self) -> None:
        """One warning for all samples of the request that got the fallback score."""
        if self._failures:
            logging.warning(
                f"{len(self._failures)} of {len(self.samples)} samples got the fallback score "
                f"{self.owner.fallback:g}"
                " (inference.reward_fn_fallback). The first: "
                f"{self._describe(*min(self._failures))}"
            )

    def _describe(self, row: int, why: str) -> str:
        prompt, response, length = self.samples[row]
        return (
            f"the reward function {self.owner.spec} failed on sample {row} of {len(self.samples)} "
            f"(prompt {_shown(prompt)}, response {_shown(response)}, length {length}): {why}"
        )


def _shown(text: str) -> str:
    text = repr(text)
    return (
        text
        if len(text) <= SHOWN_CHARACTERS
        else f"{text[:SHOWN_CHARACTERS]}[... {len(text)} characters]"
    )


class _WorkerEndedError(Exception):
    """The worker's process is gone; the message says how it ended."""


class _Worker:
    """A worker process and the two pipes to it. One thread uses it; any may kill it.

    It has a process group of its own: what the function starts is killed with it, and a Ctrl-C on
    the server's terminal does not reach it.
    """

    def __init__(self, path: str, name: str):
        requests_end, self._requests = os.pipe()
        self._answers, answers_end = os.pipe()
        command = [sys.executable, "-X", "faulthandler", reward_worker.__file__, path, name]
        try:
            self.process = subprocess.Popen(
                command + [str(number) for number in (requests_end, answers_end, os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(requests_end, answers_end),
                start_new_session=True,
            )
        except BaseException:
            self.release()
            raise
        finally:
            os.close(requests_end)
            os.close(answers_end)
        os.set_blocking(self._requests, False)
        self._reader, self._writer = select.poll(), select.poll()
        self._reader.register(self._answers, select.POLLIN)
        self._writer.register(self._requests, select.POLLOUT)
        self._buffer = b""

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, samples: list, timeout_s: float) -> None:
        """Raises: TimeoutError, _WorkerEndedError."""
        data = memoryview(json.dumps(samples).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while data:
            self._wait(self._writer, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise _WorkerEndedError(self._how_it_ended()) from None

    def receive(self, timeout_s: float) -> list:
        """The next answer, [kind, value]. Raises: TimeoutError, _WorkerEndedError."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._wait(self._reader, deadline)
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise _WorkerEndedError(self._how_it_ended())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _wait(self, poller, deadline: float) -> None:
        """Return when a pipe is ready. What has arrived counts, even if this thread looks at it
        after the deadline.
        """
        while True:
            alive = self.is_alive()  # before the last look: an answer given before the end is read
            left = deadline - time.monotonic()
            if poller.poll(1000 * max(min(left, PROBE_INTERVAL_S), 0.0)):
                return
            if not alive:
                raise _WorkerEndedError(self._how_it_ended())
            if left <= 0:
                raise TimeoutError

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its pipe only
            self.process.wait(1.0)
        code = self.process.poll()
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """End the process and all that it has started, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # the kernel does not let it go: leave it behind
            self.process.wait(5.0)

    def release(self) -> None:
        """Close the pipes (the thread that uses them)."""
        os.close(self._requests)
        os.close(self._answers)
