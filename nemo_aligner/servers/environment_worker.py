# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The program that runs a user's environment, one process per worker of `environment.py`.

    python environment_worker.py FILE CLASS REQUESTS_FD REPLIES_FD PARENT_PID

Lines of JSON go through the two pipes:

    worker -> job    ["ready", null] or ["error", text] once, after loading
    job -> worker    [ended, conversation, seed, prompt, responses]
    worker -> job    ["reply", [observation, reward, done]] or ["error", text]

A message has all responses of its conversation so far, and asks for the reply to the last one. The
state of a conversation is kept from one message to the next; a worker that does not have it, since
its predecessor was killed, plays the conversation again. `ended` lists conversations whose state
may be dropped.

Python's `random` has a stream of its own in each conversation, so that a run can be repeated.
"""

import inspect
import random
from collections.abc import Iterable
from typing import Any

from nemo_aligner.servers.worker import (
    BadScoreError,
    LoadError,
    Outcome,
    brief,
    finite_number,
    format_error,
    load_named,
    run,
)

METHODS = {"reset": ("prompt",), "step": ("state", "response")}


def main() -> None:
    """Load the class, then reply until the job closes the pipe."""
    run(load_environment, lambda played, path, message: played.respond(path, *message))


def load_environment(path: str, name: str) -> "Conversations":
    """An object of the class `name` of the file at `path`, ready to play.

    Raises:
        LoadError: the file cannot be run, holds no such class, or the class lacks a method or
            cannot be constructed without arguments.
    """
    cls = load_named(path, name, "class", inspect.isclass)
    if not inspect.isclass(cls):
        raise LoadError(f"'{name}' is a {type(cls).__name__}, not a class")
    for method, arguments in METHODS.items():
        wanted = f"{method}(self, {', '.join(arguments)})"
        function = getattr(cls, method, None)
        if not callable(function):
            raise LoadError(f"the class '{name}' has no method {wanted}")
        if inspect.iscoroutinefunction(function):
            raise LoadError(f"{name}.{method} is an async method; write it as a plain one")
        try:
            inspect.signature(function).bind(None, *arguments)
        except TypeError as error:
            raise LoadError(f"{name}.{method} cannot be called as {wanted}: {error}") from None
    try:
        return Conversations(cls())
    except BaseException as error:
        raise LoadError(f"{name}() raised:\n{format_error(error, path)}") from None


class BadReplyError(Exception):
    """The environment did not return what it should; the message shows what it returned."""


class Conversations:
    """The conversations with `environment`, an object with the methods of `METHODS`."""

    def __init__(self, environment: Any):
        self._environment = environment
        # By conversation: its state, that of `random`, and how many responses it has seen.
        self._open: dict[int, tuple[Any, Any, int]] = {}

    def respond(
        self,
        path: str,
        ended: list[int],
        conversation: int,
        seed: int,
        prompt: str,
        responses: list[str],
    ) -> Iterable[Outcome]:
        """Yield the outcome of a message, see above."""
        for number in ended:
            self._open.pop(number, None)
        try:
            yield "reply", self._reply(conversation, seed, prompt, responses)
        except (BadReplyError, BadScoreError) as error:
            yield "error", str(error)
        except BaseException as error:  # sys.exit() in a method fails its conversation
            yield "error", f"it raised:\n{format_error(error, path)}"

    def _reply(
        self, conversation: int, seed: int, prompt: str, responses: list[str]
    ) -> tuple[str, float, bool]:
        known = self._open.pop(conversation, None)
        if known is None or known[2] != len(responses) - 1:
            random.seed(seed % 2**64)
            state, seen = self._environment.reset(prompt), 0
        else:
            state, stream, seen = known
            random.setstate(stream)
        for number, response in enumerate(responses[seen:], seen + 1):
            observation, reward, done = checked_reply(self._environment.step(state, response))
            if done and number < len(responses):
                raise BadReplyError(
                    f"it ended a conversation after {number} responses that it had continued when "
                    "it was played first: its replies must depend on prompt, responses and "
                    "Python's random alone"
                )
        if not done:
            self._open[conversation] = state, random.getstate(), len(responses)
        return observation, reward, done


def checked_reply(returned: Any) -> tuple[str, float, bool]:
    """What `step` returned: an observation, a reward and whether the conversation is over.

    Raises:
        BadReplyError, BadScoreError: it is something else, or the reward is not finite in float32.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise BadReplyError(
            f"step returned {brief(returned)}, not (observation, reward, done): a text, a number, "
            "True or False"
        )
    observation, reward, done = returned
    if not hasattr(done, "__bool__") or str(done) not in ("True", "False"):
        raise BadReplyError(f"step returned {brief(returned)}, whose done is not True or False")
    done = bool(done)
    if observation is None and done:
        observation = ""
    if not isinstance(observation, str):
        raise BadReplyError(
            f"step returned {brief(returned)}, whose observation is a "
            f"{type(observation).__name__}, not a text"
        )
    if not observation and not done:
        raise BadReplyError(
            f"step returned {brief(returned)}: an empty observation, though the conversation goes "
            "on; the policy would have nothing to read"
        )
    return observation, finite_number(reward, returned), done


if __name__ == "__main__":
    main()
