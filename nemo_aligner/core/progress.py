# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs of progress of this process, by which a watchdog tells slow work from none
(launch/watchdog.py). Imports nothing.

Where work comes in units that end soon (a micro-batch, a token of all samples, a block of a file,
a look at what is waited for), each of them counts.
"""

import contextlib
from collections.abc import Callable, Iterator


class Progress:
    """The progress of this process; there is one, `progress`.

    Attributes:
        count: units of work that have ended.
        is_expected: whether units are counted where the main thread is.
        before_exit: what a watchdog calls before it ends the process.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_expected = False
        self.before_exit: Callable[[], object] | None = None
        self._phases: list[str] = []

    @property
    def phase(self) -> str:
        """What the main thread is about, the innermost name; "start" before the first."""
        return self._phases[-1] if self._phases else "start"

    def made(self) -> None:
        """A unit of work has ended; any thread calls it."""
        self.count += 1

    @contextlib.contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Inside, the main thread is in the phase `name`."""
        self.count += 1
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()
            self.count += 1

    @contextlib.contextmanager
    def expected(self, is_expected: bool = True) -> Iterator[None]:
        """Inside, units of work are counted, or, with False, are not: a step may take long by
        itself.
        """
        before, self.is_expected = self.is_expected, is_expected
        self.count += 1
        try:
            yield
        finally:
            self.is_expected = before
            self.count += 1


progress = Progress()
