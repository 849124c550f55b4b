# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Signals as bytes in a pipe, which a thread reads: the main thread may be in a collective."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

_caught: frozenset[int] = frozenset()  # what `caught` has handlers for now
_forking = threading.local()  # `mask`: of the thread that forks, from before it


@contextlib.contextmanager
def caught(
    numbers: Iterable[int],
    ignored: Iterable[int] = (),
    restore: Callable[[], bool] = lambda: True,
) -> Iterator[int]:
    """Yield the end of a pipe from which the numbers of these signals can be read. They do nothing
    else inside; a Ctrl-C that a shell keeps from jobs in its background stays ignored. Outside of
    the main thread no signal is caught or ignored. Processes that start inside ignore `ignored`
    too. `restore` is asked at the end; False leaves the signals without any effect. A process that
    is forked inside is ended by SIGTERM and ignores the others.
    """
    global _caught
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before, handlers = _caught, {}
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in numbers
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
        }
        old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        _caught = before | handlers.keys()
        handlers |= {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        yield read_end
    finally:
        if handlers:
            signal.set_wakeup_fd(-1)
            if restore():
                _caught = before
                signal.set_wakeup_fd(old_fd)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _before_fork() -> None:
    """Hold back what reaches the child before `_in_child`: its pipe is still the parent's."""
    if _caught:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _caught)


def _after_fork() -> None:
    if hasattr(_forking, "mask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
        del _forking.mask


def _in_child() -> None:
    global _caught
    if _caught:
        signal.set_wakeup_fd(-1)
        for number in _caught:
            is_end = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if is_end else signal.SIG_IGN)
        _caught = frozenset()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
