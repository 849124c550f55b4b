# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The pending answer of a server."""

from abc import ABC, abstractmethod


class FutureResult(ABC):
    """The pending answer of a server. Every rank that holds one calls `result()`: it communicates.

    Attributes:
        pending: what this rank itself waits for: objects with `done(timeout_s)` and `result()`, or
            the exception of an attempt to send. Empty on a rank that gets the answer from another.
    """

    pending: tuple = ()

    @abstractmethod
    def result(self):
        """Wait for the answer and return it on every rank; a failure is raised on every rank."""
