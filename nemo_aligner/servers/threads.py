# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Threads of servers and clients. Imports nothing heavy."""

import threading
from collections.abc import Callable


def in_thread(name: str, call: Callable[..., object], *args: object) -> threading.Thread:
    """Start a thread that does not keep the process from ending."""
    thread = threading.Thread(target=call, args=args, daemon=True, name=name)
    thread.start()
    return thread
