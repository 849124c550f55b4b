# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's Python class as the environment of conversations, run in worker processes.

    class Game:
        def reset(self, prompt: str) -> state
        def step(self, state, response: str) -> (observation: str, reward: float, done: bool)

The rank that generates starts the workers (`environment_worker.py`). Each is driven by one thread,
which starts it, asks it, and kills and replaces it when a reply takes too long or the environment
ends the process. A conversation stays with one worker, which keeps its state.
"""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo.utils import logging

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import UserError, cause_in
from nemo_aligner.core.tokenizer import response_text
from nemo_aligner.core.types import Rollout, Scores
from nemo_aligner.generation.interface import Reply
from nemo_aligner.servers import environment_worker
from nemo_aligner.servers.futures import FutureScores
from nemo_aligner.servers.reward_function import shown
from nemo_aligner.servers.schema import Arrays
from nemo_aligner.servers.user_code import (
    ClosedError,
    WorkerEndedError,
    WorkerProcess,
    Workers,
    split_spec,
)

if TYPE_CHECKING:
    from nemo_aligner.core.tokenizer import Tokenizer

WAIT_S = 10.0  # between signs of life while nothing but replies is waited for


class EnvironmentFailedError(UserError):
    """The environment gave no usable reply; the message has the conversation and the cause."""


class _Request(NamedTuple):
    number: int
    seed: int
    prompt: str
    responses: list[str]


def _cannot_start(error: Exception) -> UserError:
    """The error of all ranks after `error` of the one that starts workers."""
    return UserError(
        f"a worker of the environment cannot be started ({error!r}); are there too many "
        "processes, or too little memory?"
    )


class PythonEnvironment:
    """Replies to responses with the class `spec`; call `close()` or use it in a `with` block.

    It is an `Environment` (`generation/interface.py`), and gives trainers its rewards (`score`).

    Args:
        spec: "path/to/file.py:Class"; a relative path counts from the current folder. The file may
            import modules that lie beside it.
        max_turns: responses in a conversation, at most.
        timeout_s: per reply; one that takes longer fails, and its worker is killed.
        fallback: reward of a response to which the environment failed to reply, which ends its
            conversation; None makes generation fail.
        starts_workers: False on a rank that does not ask for replies.

    Raises:
        ConfigError: `spec` is not of that form.
        UserError: no such file or class, it cannot be imported or constructed, or lacks a method.
    """

    def __init__(
        self,
        spec: str,
        tokenizer: "Tokenizer",
        max_turns: int = 8,
        workers: int = 2,
        timeout_s: float = 10.0,
        fallback: float | None = None,
        section: str = "environment",
        starts_workers: bool = True,
    ):
        self.spec, self.tokenizer, self.section = spec, tokenizer, section
        self.max_turns, self.timeout_s, self.fallback = max_turns, timeout_s, fallback
        path, name = split_spec(
            spec, f"{section}.path", "class", "examples/environments/guessing.py:GuessingGame"
        )
        self._processes = Workers(
            path, name, environment_worker.__file__, f"{section}.path={spec}"
        )
        self._replies: queue.SimpleQueue[tuple[_Request, Any]] = queue.SimpleQueue()
        self._requests: list[queue.SimpleQueue[_Request | None]] = []
        self._ended: list[queue.SimpleQueue[int]] = []
        self._threads: list[threading.Thread] = []
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        for number in range(workers if starts_workers else 0):
            self._requests.append(queue.SimpleQueue())
            self._ended.append(queue.SimpleQueue())
            self._threads.append(
                threading.Thread(target=self._drive, args=(number, ready.put), daemon=True)
            )
        for thread in self._threads:
            thread.start()
        errors = [error for _ in self._threads if (error := ready.get()) is not None]
        if errors:
            self.close()
            error = errors[0]
            raise error if isinstance(error, UserError) else _cannot_start(error) from error
        if starts_workers:
            logging.info(f"environment {spec}: {workers} worker(s), {timeout_s:g} s per reply")

    def __enter__(self) -> "PythonEnvironment":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Any thread may call it, more than once."""
        self._processes.close()
        for requests in self._requests:
            requests.put(None)
        for thread in self._threads:
            thread.join(5.0)

    # --- conversations: one thread calls these --------------------------------------------------

    def submit(
        self,
        number: int,
        seed: int,
        prompt: tuple[int, ...],
        responses: tuple[tuple[int, ...], ...],
    ) -> None:
        texts = [response_text(self.tokenizer, response) for response in responses]
        request = _Request(number, seed, self.tokenizer.ids_to_text(list(prompt)), texts)
        self._requests[number % len(self._requests)].put(request)

    def end(self, number: int) -> None:
        self._ended[number % len(self._ended)].put(number)

    def replies(self, wait: bool) -> dict[int, Reply]:
        """See `Environment.replies`.

        Raises:
            EnvironmentFailedError: on the first conversation that failed, unless there is a
                fallback.
            UserError: no new worker could be started.
        """
        found: dict[int, Reply] = {}
        while True:
            try:
                request, outcome = self._replies.get(wait and not found, WAIT_S)
            except queue.Empty:
                progress.made()
                if found or not wait:
                    return found
                continue
            found[request.number] = self._reply(request, outcome)

    def _reply(self, request: _Request, outcome: Any) -> Reply:
        if isinstance(outcome, Exception):
            raise _cannot_start(outcome) from outcome
        why = outcome
        if not isinstance(outcome, str):
            observation, reward, done = outcome
            ids = () if done else tuple(self.tokenizer.text_to_ids(observation))
            if ids or done:
                return Reply(ids, reward, done)
            why = f"its observation {shown(observation)} has no token"
        message = (
            f"the environment {self.spec} failed on response {len(request.responses)} of a "
            f"conversation: {cause_in(why)}; prompt {shown(request.prompt)}, response "
            f"{shown(request.responses[-1])}"
        )
        if "\n" in why:
            logging.error(f"{message}\n{why}")
        if self.fallback is None:
            raise EnvironmentFailedError(
                f"{message}. Correct the environment, or set {self.section}.fallback to the "
                "reward that such a response gets."
            )
        logging.warning(f"{message}. The conversation ends with {self.section}.fallback.")
        return Reply((), self.fallback, True)

    # --- rewards --------------------------------------------------------------------------------

    def score(
        self, rollout_batch: Rollout, make_payload: Callable[[], Arrays] | None = None
    ) -> "EnvironmentScores":
        """The rewards that came with the replies, as `RewardModels.score` gives others."""
        return EnvironmentScores(rollout_batch)

    # --- one thread per worker ------------------------------------------------------------------

    def _drive(self, number: int, ready: Callable[[Exception | None], None]) -> None:
        """Thread of a worker; it outlives the worker, which the kernel kills with this thread."""
        worker: WorkerProcess | None = None
        try:
            worker = self._processes.start()
        except Exception as error:
            ready(error)
            return
        ready(None)
        known: set[int] = set()  # conversations of which this worker has the state
        while (request := self._requests[number].get()) is not None:
            try:
                if worker is None or not worker.is_alive():
                    self._processes.end(worker)
                    worker, known = None, set()
                    worker = self._processes.start()
                outcome = self._ask(worker, number, request, known)
            except ClosedError:
                break
            except (UserError, WorkerEndedError) as error:
                outcome = str(error)
                if isinstance(error, WorkerEndedError):
                    outcome = f"it ended its process ({error})"
            except TimeoutError:
                outcome = (
                    f"it took longer than {self.timeout_s:g} s ({self.section}.timeout_s) and was "
                    "stopped"
                )
                self._processes.end(worker)
                worker = None
            except Exception as error:  # no new worker could start: not the fault of a response
                outcome = error
            self._replies.put((request, outcome))
        self._processes.end(worker)

    def _ask(self, worker: WorkerProcess, number: int, request: _Request, known: set[int]) -> Any:
        """The outcome of a request: [observation, reward, done], or a text that says why there is
        none. A conversation that the worker does not know is repeated from its beginning.

        Raises:
            TimeoutError, WorkerEndedError: as `WorkerProcess`.
        """
        ended = []
        while not self._ended[number].empty():
            ended.append(self._ended[number].get())
        known.difference_update(ended)
        limit = self.timeout_s * (1 if request.number in known else len(request.responses))
        worker.send([ended, *request], limit)
        _, value = worker.receive(limit)
        known.add(request.number)
        return value


class EnvironmentScores(FutureScores):
    """The rewards of a rollout's conversations, there already: its `token_rewards`."""

    def __init__(self, rollout_batch: Rollout):
        self._token_rewards = rollout_batch["token_rewards"]

    def scores(self) -> Scores:
        """The rewards of the responses of each sample, and their sum."""
        rewards = self._token_rewards
        return Scores(rewards.double().nansum(1).float(), token_rewards=rewards)
