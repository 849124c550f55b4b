# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's Python class as the environment of conversations (docs/rewards.md), run in worker
processes (`user_code.py`). A conversation stays with one worker, which keeps its state.
"""

import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo.utils import logging
from typing_extensions import Self

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import UserError, cause_in
from nemo_aligner.core.tokenizer import response_text
from nemo_aligner.core.types import Rollout, Scores
from nemo_aligner.generation.interface import Details, Reply
from nemo_aligner.servers.futures import FutureScores
from nemo_aligner.servers.reward_function import shown
from nemo_aligner.servers.schema import Arrays
from nemo_aligner.servers.user_code import Pool, Task, WorkerProcess, split_spec

if TYPE_CHECKING:
    from nemo_aligner.core.tokenizer import Tokenizer

LOOK_S = 1.0  # between signs of life while nothing but replies is waited for


class EnvironmentFailedError(UserError):
    """The environment gave no usable reply; the message has the conversation and the cause."""


class _Request(NamedTuple):
    number: int
    seed: int
    prompt: str
    responses: list[str]


def _cannot_start(error: Exception) -> UserError:
    return UserError(
        f"a worker of the environment cannot be started ({error!r}); are there too many "
        "processes, or too little memory?"
    )


class RewardingEnvironment:
    """An `Environment` (`generation/interface.py`) that gives its rewards; `close()` it."""

    section: str  # of its keys
    fallback: float | None  # reward of a response without reply, which is the last; None: an error
    outcomes: queue.SimpleQueue[tuple[int, Any]]  # with their conversations' numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that it has started. Any thread may call it, more than once."""

    def look(self) -> None:
        """Called every LOOK_S at least while replies are waited for."""

    def reply_of(self, outcome: Any) -> Reply:
        return outcome

    def replies(self, wait: bool) -> dict[int, Reply]:
        """See `Environment.replies`."""
        found: dict[int, Reply] = {}
        while True:
            self.look()
            progress.made()
            with contextlib.suppress(queue.Empty):
                while True:
                    number, outcome = self.outcomes.get(wait and not found, LOOK_S)
                    found[number] = self.reply_of(outcome)
            if found or not wait:
                return found

    def score(
        self, rollout_batch: Rollout, make_payload: Callable[[], Arrays] | None = None
    ) -> "EnvironmentScores":
        """The rewards that came with the replies, as `RewardModels.score` gives others."""
        return EnvironmentScores(rollout_batch)

    def reply_to_failure(self, message: str, remedy: str) -> Reply:
        """The end of a failed conversation. `EnvironmentFailedError`: there is no `fallback`."""
        if self.fallback is None:
            raise EnvironmentFailedError(
                f"{message}. {remedy}, or set {self.section}.fallback to the reward that it gets."
            )
        logging.warning(f"{message}. The conversation ends with {self.section}.fallback.")
        return Reply((), self.fallback, True)


class PythonEnvironment(RewardingEnvironment):
    """Replies to responses with the class `spec`; `UserError`, `ConfigError`: it cannot be used.

    Args:
        spec: "path/to/file.py:Class".
        max_turns: responses in a conversation, at most.
        timeout_s: per reply; one that takes longer fails, and its worker is killed.
        starts_workers: False on a rank that does not ask for replies.
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
        self.outcomes = queue.SimpleQueue()
        count = workers if starts_workers else 0
        self._requests = [queue.SimpleQueue[Task | None]() for _ in range(count)]
        self._ended = [queue.SimpleQueue[int]() for _ in range(count)]
        make = functools.partial(WorkerProcess, path, "class", name, f"{section}.path={spec}")
        try:
            self._pool = Pool(make, self._requests, f"{timeout_s:g} s ({section}.timeout_s)")
        except UserError:
            raise
        except Exception as error:
            raise _cannot_start(error) from error
        if starts_workers:
            logging.info(f"environment {spec}: {workers} worker(s), {timeout_s:g} s per reply")

    def close(self) -> None:
        self._pool.close()

    # --- conversations: one thread calls these --------------------------------------------------

    def submit(
        self,
        number: int,
        seed: int,
        prompt: tuple[int, ...],
        responses: tuple[tuple[int, ...], ...],
        details: Details | None = None,
    ) -> None:
        texts = [response_text(self.tokenizer, response) for response in responses]
        text = self.tokenizer.ids_to_text(list(prompt))
        request = _Request(number, seed, text, texts)
        place = number % len(self._requests)
        ended = self._ended[place]

        def message(worker: WorkerProcess, _left: Any) -> tuple[list[Any], float]:
            """A conversation that the worker does not know is repeated from its beginning."""
            over = []
            while not ended.empty():
                over.append(ended.get())
            worker.known.difference_update(over)
            repeated = 1 if number in worker.known else len(texts)
            worker.known.add(number)
            return [[over, *request]], self.timeout_s * repeated

        def note(_item: int, _kind: str, value: Any) -> None:
            self.outcomes.put((number, (request, value)))

        def fail(error: Exception) -> None:
            note(number, "error", str(error) if isinstance(error, UserError) else error)

        self._requests[place].put(Task(deque([number]), message, note, fail))

    def end(self, number: int) -> None:
        self._ended[number % len(self._ended)].put(number)

    def reply_of(self, outcome: Any) -> Reply:
        """`UserError`: no new worker, or a failure and no fallback."""
        request, outcome = outcome
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
        return self.reply_to_failure(message, "Correct the environment")


class EnvironmentScores(FutureScores):
    """The rewards of a rollout's conversations, there already: its `token_rewards`."""

    def __init__(self, rollout_batch: Rollout):
        self._token_rewards = rollout_batch["token_rewards"]

    def scores(self) -> Scores:
        rewards = self._token_rewards
        return Scores(rewards.double().nansum(1).float(), token_rewards=rewards)
