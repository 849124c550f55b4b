# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Replies that are still to come: on the rank that sent the request, and on all ranks."""

import concurrent.futures
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.core.types import Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.schema import Arrays

# Ranks that wait for another rank's reply hear from it this often, so no collective times out;
# when all wait for replies of their own, a failure of one should end the others soon.
HEARTBEAT_S, JOINT_HEARTBEAT_S = 30.0, 10.0

T = TypeVar("T")
U = TypeVar("U")


class SentRequest(NamedTuple):
    """A request on its way: the future of its reply, and where it is, for progress lines."""

    future: "concurrent.futures.Future[Arrays]"
    describe: Callable[[], str]


class PendingReply:
    """The reply to a request that this rank sent; with `by_name` those to any number of them."""

    def __init__(self, sent: Mapping[str, SentRequest], by_name: bool = False):
        self._sent, self._by_name = dict(sent), by_name
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
        """Wait for the reply, or the replies `by_name`, or raise the error; logs the wait."""
        while not self.done(heartbeat_s):
            pass
        for sent in self._sent.values():
            if sent.future.done() and (error := sent.future.exception()) is not None:
                raise error
        replies = {name: sent.future.result() for name, sent in self._sent.items()}
        return replies if self._by_name else next(iter(replies.values()))


class FutureResult(ABC, Generic[T]):
    """The outcome of a request, on every rank. All ranks that hold one call `result()` together.
    `pending`: what this rank itself waits for (`Awaitable`), or the exception of an attempt to
    send; empty on a rank that gets the outcome from another.
    """

    pending: tuple[Any, ...] = ()

    @abstractmethod
    def result(self) -> T:
        """Wait for the outcome and return it on every rank; a failure is raised on every rank."""


class FutureScores(FutureResult[Any]):
    """The pending scores of a micro-batch."""

    @abstractmethod
    def scores(self) -> Scores:
        """Wait for the scores or the error; each model-parallel rank has them on its device."""

    def result(self) -> Any:
        """The rewards float32 `[b, 1]`, as NeMo-Aligner's clients give them."""
        return self.scores().rewards[:, None]


class Awaitable(Protocol):
    """What one rank waits for, such as a `PendingReply`."""

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; True once there is a result or an error."""

    def result(self) -> Any:
        """Return the result, or raise the error."""


def await_on_source(
    pending: Awaitable | Exception | None, src: int, group: dist.ProcessGroup | None
) -> Any:
    """Return the result that rank `src` waits for, `pending` there, on every rank of `group`;
    `ServerRequestError`, on every rank: the cause, or the exception of the attempt to send.
    """
    alone = group is None or dist.get_world_size(group) == 1
    is_source = alone or dist.get_rank() == src
    result: Any
    while True:
        state, result = _poll(pending, HEARTBEAT_S) if is_source else ("pending", None)
        if not alone:
            box = [(state, result)]
            dist.broadcast_object_list(box, src=src, group=group)
            state, result = box[0]
        if state == "done":
            return result
        if state == "failed":
            raise result


def _poll(pending: Awaitable | Exception | None, timeout_s: float) -> tuple[str, Any]:
    """Return ("done", result), ("failed", error) or, after `timeout_s`, ("pending", None)."""
    progress.made()  # the peer has a time limit of its own
    try:
        if pending is None:
            raise RuntimeError("nothing was sent on the rank that sends")
        if isinstance(pending, Exception):
            raise pending
        return ("done", pending.result()) if pending.done(timeout_s) else ("pending", None)
    except Exception as error:  # of any kind: the other ranks must not wait forever
        # One that can be sent to them, of the same kind as far as a job's end depends on it.
        text = str(error) if isinstance(error, (ServerRequestError, UserError)) else repr(error)
        kind = LostPeerError if isinstance(error, LostPeerError) else ServerRequestError
        return "failed", kind(text)


def wait_for_all(pending: Iterable[Awaitable | Exception]) -> None:
    """Return once every rank has its replies, the `pending` of its futures, if any; every rank of
    the job calls it. `ServerRequestError`: on all ranks that of the lowest rank whose request
    failed. So no rank goes on to a collective, which has a time limit, before all can.
    """
    left = list(pending)
    while True:
        deadline = time.monotonic() + JOINT_HEARTBEAT_S
        failure = None
        while left and failure is None:
            state, result = _poll(left[0], max(deadline - time.monotonic(), 0.0))
            if state == "pending":
                left.append(left.pop(0))  # another one's failure does not wait for it
                break
            if state == "failed":
                failure = result
            left.pop(0)
        outcomes = gathered((failure, not left))
        for error, _ in outcomes:
            if error is not None:
                raise error
        if all(finished for _, finished in outcomes):
            return


def await_on_model_source(pending: Awaitable | Exception | None) -> Any:
    """`await_on_source` of the source rank of the model-parallel group."""
    src = parallel_state.get_model_parallel_src_rank()
    return await_on_source(pending, src, parallel_state.get_model_parallel_group())


def get_future_result(future: Awaitable | Exception | None, *keys: str) -> list[Tensor]:
    """Arrays `keys` of `await_on_model_source`, on this rank's device; all its group calls it."""
    reply = await_on_model_source(future)
    return [torch.from_numpy(np.array(reply[key])).to(get_device()) for key in keys]


def try_on_source(send: Callable[[], T], source: int | None = None) -> T | Exception | None:
    """`send()`, or the exception it raises, on rank `source`, by default the model-parallel one;
    None elsewhere. The others learn of the exception when all ask for the result.
    """
    if source is None:
        source = parallel_state.get_model_parallel_src_rank()
    if parallel_state.get_rank() != source:
        return None
    try:
        return send()
    except Exception as error:
        return error


class RankZeroFuture(FutureResult[T]):
    """The outcome of a request that rank 0 has `pending`; `result()` ends on all together."""

    def __init__(self, pending: Awaitable | Exception | None):
        self._pending = pending
        self.pending = () if pending is None else (pending,)

    def reply(self) -> Arrays:
        """Wait for the reply and return its arrays by wire name."""
        world = dist.group.WORLD if dist.is_initialized() else None
        return await_on_source(self._pending, 0, world)


def result_of_future(future: Any, *keys: str) -> Tensor | list[Tensor]:
    """NeMo-Aligner's form: of one key a tensor, of several a list; any future with `result()`."""
    if not (future is None or isinstance(future, (Exception, PendingReply))):
        future = OtherFuture(future)
    results = get_future_result(future, *keys)
    return results[0] if len(keys) == 1 else results


class OtherFuture(FutureResult[Any]):
    """A future of others as an `Awaitable`; `read` gets its result, None without a future."""

    def __init__(self, future: Any, read: Callable[[Any], Any] = lambda got: got) -> None:
        self._read = functools.cache(lambda: read(None if future is None else future.result()))
        self.pending = (self,)

    def done(self, timeout_s: float) -> bool:
        return True

    def result(self) -> Any:
        return self._read()

    scores = result


def then(
    future: "concurrent.futures.Future[T]", make: Callable[[T], U]
) -> "concurrent.futures.Future[U]":
    """The future of `make` of a future's result; errors pass."""
    made: concurrent.futures.Future[U] = concurrent.futures.Future()

    def finish(done: "concurrent.futures.Future[T]") -> None:
        try:
            made.set_result(make(done.result()))
        except Exception as error:
            made.set_exception(error)

    future.add_done_callback(finish)
    return made
