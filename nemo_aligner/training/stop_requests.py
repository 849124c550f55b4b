# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to end a job before its last step: SIGTERM, Ctrl-C (SIGINT), SIGUSR1 (pre-emption) and
the time limit. Imports nothing heavy.

A request in a step waits for its end, where all ranks agree on it, save and leave. One before the
first step, and a second SIGTERM or Ctrl-C, end the process at once. Servers have their own way
(`servers/server_loop.py`), with the same `caught`.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from nemo_aligner.core.endings import ExitCode, JobStopped, note_ending, progress
from nemo_aligner.parallel.environment import is_rank_zero

if TYPE_CHECKING:
    from nemo_aligner.training.schedule import Timer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One request may arrive twice: a launcher hands on what the process got with its group already.
REPEATED_S = 1.0
TIME_IS_OVER = 1  # as a request, below all signals
AGAIN = "The same command continues."


class StopRequests:
    """The requests to this process; there is one, `stop_requests`. `received` is the first signal,
    `step` the number of finished steps (None before the loop), `max_steps` that of the whole job.
    """

    def __init__(self) -> None:
        self._watching = self._in_loop = False
        self._clear()

    def _clear(self) -> None:
        self.received: signal.Signals | None = None
        self.step: int | None = None
        self.has_trained = False
        self.max_steps = 0
        self._saves = True
        self._has_left = False
        self._first: dict[signal.Signals, float] = {}  # when each came
        self._is_job = False
        self._exit: Callable[[ExitCode, int], object] = lambda _code, _number: None

    # ---- signals ----

    @contextlib.contextmanager
    def watching(
        self, end: Callable[[ExitCode, int], object], is_job: bool = True
    ) -> Iterator[None]:
        """Inside, `SIGNALS` are requests, except a Ctrl-C that a shell keeps from background jobs.
        A thread sees them: the main thread may be in a collective that never ends. `end(code,
        signal)` ends the process at once. `is_job`: the same command continues what a Ctrl-C ends.
        """
        if self._watching or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._clear()
        self._exit, self._is_job, self._watching = end, is_job, True
        with caught(SIGNALS) as read_end:
            thread = threading.Thread(
                target=self._watch, args=(read_end,), daemon=True, name="stop requests"
            )
            thread.start()
            try:
                yield
            finally:
                self._watching = False
                thread.join()

    def _watch(self, read_end: int) -> None:
        while self._watching:
            if select.select([read_end], [], [], 0.3)[0]:
                for number in os.read(read_end, 64):
                    if number in SIGNALS:
                        self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._has_left or signal.getsignal(number) == signal.default_int_handler:
            return  # a conversation in the terminal takes it itself
        if not self._in_loop:
            when = "before the first step" if self.step is None else "at the end of the job"
            self._end_at_once(number, f"{_name(number)} {when}")
        if now > self._first.setdefault(number, now) + REPEATED_S and number != signal.SIGUSR1:
            self._end_at_once(number, f"a second {_name(number)}")
        if self.received is None:
            self.received = number
            if is_rank_zero():
                _say(self._announcement(number))

    def _announcement(self, number: signal.Signals) -> str:
        name = _name(number)
        if self.step == self.max_steps:
            return f"{name}: the job has made its last step and ends by itself."
        what = "saves" if self._saves else "does not save (save_interval)"
        again = name if number == signal.SIGINT else signal.SIGTERM.name
        text = f"{name}: the job {what} and ends after the running step."
        return f"{text} A second {again} ends it at once."

    def _end_at_once(self, number: signal.Signals, reason: str) -> None:
        code, text = ExitCode.PRE_EMPTED, f"the job ends at once, without saving. {AGAIN}"
        if not self._is_job and self.step is None:
            reason, text = _name(number), "the command has ended."
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else code
        if is_rank_zero():
            _say(f"{reason}: {text}")
        note_ending(code, reason, self.step)
        self._exit(code, number)

    # ---- the loop over the steps; every rank calls these ----

    @contextlib.contextmanager
    def in_loop(self, step: int, max_steps: int, saves: bool) -> Iterator[None]:
        """Inside, a request waits for the end of the running step; `step` are finished."""
        self.step, self.max_steps, self._saves = step, max_steps, saves
        self._in_loop = True
        try:
            with progress.expected():
                yield
        finally:
            self._in_loop = False

    def after_step(self, step: int, run_timer: "Timer") -> JobStopped | None:
        """Why the job ends after `step` finished steps, equal on every rank; None: it does not."""
        self.has_trained, self.step = True, step
        return self._stop(self.received or (TIME_IS_OVER if run_timer.is_finished() else 0))

    def signalled(self) -> JobStopped | None:
        """As `after_step`, without the time limit: for after a save, which may take long."""
        return self._stop(self.received or 0)

    def _stop(self, request: int) -> JobStopped | None:
        """What the requests of all ranks (a signal, `TIME_IS_OVER` or 0) lead to."""
        number = _largest_of_ranks(request)
        if not number or self.step == self.max_steps:
            return None
        if number == TIME_IS_OVER:
            return JobStopped(ExitCode.TIME, "time limit (max_time_per_run)")
        return JobStopped(ExitCode.PRE_EMPTED, _name(number))

    def leave(self, stop: JobStopped) -> None:
        """End the job, which has saved, by raising `stop`, once `ending.json` is there."""
        self._has_left = True  # launchers repeat signals while the ranks leave one by one
        note_ending(stop.code, stop.reason, self.step)
        if is_rank_zero():
            _say(
                f"{stop.reason}: the job ends after step {self.step} of {self.max_steps}, with "
                f"exit code {stop.code:d} ({stop.code.name}). {AGAIN}"
            )
        _largest_of_ranks(0)
        raise stop


def ignore_signals(_worker: int = 0) -> None:
    """In a worker process that its job ends by other means: signals to the group are the job's."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _largest_of_ranks(number: int) -> int:
    """A collective of all ranks."""
    from nemo_aligner.parallel.collectives import largest  # by now torch is imported

    return largest(number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


stop_requests = StopRequests()


# ---------------------------------------------------------------------- signals as bytes in a pipe


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
