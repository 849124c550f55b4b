# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Replies that are still to come: on the rank that sent the request, and on all ranks."""

import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from nemo.utils import logging

from nemo_aligner.core.types import Scores
from nemo_aligner.servers.schema import Arrays

T = TypeVar("T")


class SentRequest(NamedTuple):
    """A request on its way: the future of its reply, and where it is, for progress lines."""

    future: "concurrent.futures.Future[Arrays]"
    describe: Callable[[], str]


def only_reply(replies: Mapping[str, Arrays]) -> Arrays:
    (reply,) = replies.values()
    return reply


class PendingReply:
    """The reply to requests that this rank sent; `combine` makes it from those by name."""

    def __init__(
        self,
        sent: Mapping[str, SentRequest],
        combine: Callable[[Mapping[str, Arrays]], Any] = only_reply,
    ):
        self._sent, self._combine = dict(sent), combine
        self._started = time.monotonic()

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all replies or the first error; log a wait in vain."""
        done, pending = concurrent.futures.wait(
            [sent.future for sent in self._sent.values()],
            timeout_s,
            return_when=concurrent.futures.FIRST_EXCEPTION,
        )
        if not pending or any(future.exception() for future in done):
            return True
        waited = time.monotonic() - self._started
        for sent in self._sent.values():
            if sent.future in pending:
                logging.info(f"waiting for {sent.describe()} ({waited:.0f} s)")
        return False

    def result(self, heartbeat_s: float = 30.0) -> Any:
        """Wait for the reply and return its arrays by name, or what `combine` makes of several; a
        line is logged every `heartbeat_s`.

        Raises:
            ServerRequestError: with the cause, or saying why the reply cannot be used.
        """
        while not self.done(heartbeat_s):
            pass
        for sent in self._sent.values():
            if sent.future.done() and (error := sent.future.exception()) is not None:
                raise error
        return self._combine({name: sent.future.result() for name, sent in self._sent.items()})


class FutureResult(ABC, Generic[T]):
    """The outcome of a request, on every rank. All ranks that hold one call `result()` together.

    Attributes:
        pending: what this rank itself waits for: objects with `done(timeout_s)` and `result()`, or
            the exception of an attempt to send. Empty on a rank that gets the outcome from
            another.
    """

    pending: tuple[Any, ...] = ()

    @abstractmethod
    def result(self) -> T:
        """Wait for the outcome and return it on every rank; a failure is raised on every rank."""


class FutureScores(FutureResult[Any]):
    """The pending scores of a micro-batch."""

    @abstractmethod
    def scores(self) -> Scores:
        """Wait for the scores and return them on every rank of the model-parallel group, on its
        device; a failure is raised on every rank.
        """

    def result(self) -> Any:
        """The rewards float32 `[b, 1]`, as NeMo-Aligner's clients give them."""
        return self.scores().rewards[:, None]
