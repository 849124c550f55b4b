# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Time limits that stop what hangs and spare what is slow.

A limit is given in seconds of a quiet machine. It is stretched by the number of processes that
share a core (the mean of the last minute), by what the host of a virtual machine gives to others
(the "stolen" time of the last seconds), and by `TEST_PATIENCE` if that is set (3 for a slow
machine).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")  # Linux
_SPAN_S = 5.0  # over which stolen time is measured


class _StolenTime:
    """How many times longer a computation takes because the host does not run this machine."""

    def __init__(self) -> None:
        self._last = (0.0, 0, 0)  # when; ticks that were worked or stolen; those stolen of them
        self._factor = 1.0

    def factor(self) -> float:
        """From ticks that were worked and stolen since the call before, or `_SPAN_S` ago."""
        now = time.monotonic()
        if _STAT.exists() and now - self._last[0] > _SPAN_S:
            ticks = [int(word) for word in _STAT.read_text().split("\n")[0].split()[1:]]
            idle, stolen = ticks[3] + ticks[4], ticks[7]
            used = sum(ticks[:8]) - idle
            wanted, taken = used - self._last[1], stolen - self._last[2]
            busy = wanted > os.sysconf("SC_CLK_TCK") * (now - self._last[0]) / 4
            self._factor = wanted / max(wanted - taken, 1) if busy else 1.0
            self._last = now, used, stolen
        # At least 1: a machine that was moved or paused may count its stolen time backwards.
        return min(max(self._factor, 1.0), 4.0)


_stolen_time = _StolenTime()


def slowness() -> float:
    """How many times longer than on a quiet machine a computation takes now; at least 1."""
    factor = float(os.environ.get("TEST_PATIENCE", 1)) * _stolen_time.factor()
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) * factor


def patience(seconds: float) -> float:
    """`seconds` of a quiet machine, as this machine is now."""
    return seconds * slowness()


class Deadline:
    """Runs out after `seconds` of a quiet machine; a busy machine slows its clock down."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        self._left, self._last = self.seconds, time.monotonic()

    def passed(self) -> bool:
        """Whether the time is over. Call it often: the load counts as it is at the call."""
        now = time.monotonic()
        self._left -= (now - self._last) / slowness()
        self._last = now
        return self._left < 0


def wait_until(
    condition: Callable[[], object],
    limit_s: float = 60.0,
    what: str | Callable[[], str] = "the condition",
    interval_s: float = 0.02,
) -> None:
    """Return once `condition()` is true.

    Raises:
        AssertionError: it is still false after `limit_s` seconds of a quiet machine; the message
        holds `what`, or the result of `what()`.
    """
    deadline = Deadline(limit_s)
    while not condition():
        if deadline.passed():
            text = what() if callable(what) else what
            raise AssertionError(f"limit of {limit_s:g} s (quiet machine) waiting for: {text}")
        time.sleep(interval_s)
