# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Threads of servers and clients. Imports nothing heavy."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(name: str, call: Callable[..., object], *args: object) -> threading.Thread:
    """Start a thread that does not keep the process from ending."""
    thread = threading.Thread(target=call, args=args, daemon=True, name=name)
    thread.start()
    return thread


def settle(future: "concurrent.futures.Future[Any]", outcome: Any) -> None:
    """Give a future its result, or an `Exception`, unless it has one."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def future_of(name: str, call: Callable[..., T], *args: Any) -> "concurrent.futures.Future[T]":
    """The result of `call(*args)`, which runs in a thread of its own."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            settle(future, call(*args))
        except BaseException as error:  # whoever waits must hear of it
            settle(future, error if isinstance(error, Exception) else RuntimeError(repr(error)))

    in_thread(name, run)
    return future
