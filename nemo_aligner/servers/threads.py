# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Threads of servers and clients. Imports nothing heavy."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any


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
