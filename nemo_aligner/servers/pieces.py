# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A train request that is too large for one body, in pieces that make one update.

The client cuts the rows of a request into pieces (served_model.py), each a request of its own with
the same `request_id` and with `piece` = [its first row, rows of the whole]. The server puts them
together (`PieceStore`) and trains when the last has come; the reply to that one is the reply to
the whole.
"""

import threading

import numpy as np
import psutil
from nemo.utils import logging

from nemo_aligner.servers.schema import Arrays, RequestError

# Body of one piece: at most half of what a server of this package takes by default.
PIECE_BYTES = 2**25
# Most samples of a scoring request: between two requests of a client others have their turn.
MOST_ROWS = 512
# Of a server that takes no pieces; the rest is left for the header of the body.
LARGEST_BODY = 2**31 - 2**20
# A client sends one piece after the other: without the next one for this long it is gone.
PIECE_TIMEOUT_S = 120.0


def piece_rows(arrays: Arrays, limit: int) -> int:
    """Return how many rows of `arrays`, [N, ...] each, have at most `limit` bytes; at least 1."""
    rows = len(next(iter(arrays.values())))
    size = sum(array.nbytes for array in arrays.values())
    return max(rows if size <= limit else rows * limit // size, 1)


class PieceStore:
    """The pieces of one request until all have come, none for `timeout_s`, or another's first."""

    def __init__(self, timeout_s: float = PIECE_TIMEOUT_S):
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._request_id: str | None = None
        self._arrays: Arrays = {}
        self._rows = 0  # that have come
        self._timer: threading.Timer | None = None

    def add(self, request_id: str, first: int, rows: int, arrays: Arrays) -> Arrays | None:
        """Keep a piece; returns the arrays of the whole request with the last one, else None.

        Pieces come in order; the first one starts the request anew. The last one that came may
        come again, if its sender did not get the reply.

        Args:
            arrays: of the piece, [n, ...] each, with content that has been checked.

        Raises:
            RequestError: the piece does not continue the request, or the memory of this machine
                cannot hold the whole. What had come is dropped.
        """
        count = len(next(iter(arrays.values())))
        with self._lock:
            self._stop_timer()
            again = request_id == self._request_id and 0 < first + count == self._rows
            try:
                if first == 0:
                    self._start(request_id, rows, arrays)
                elif again:
                    self._rows = first
                self._check(request_id, first, count, rows, arrays)
            except RequestError:
                self._forget()
                raise
            for name, array in arrays.items():
                self._arrays[name][first : first + count] = array
            self._rows += count
            if self._rows == rows:
                whole = self._arrays
                self._forget()
                return whole
            self._timer = threading.Timer(self.timeout_s, self._give_up, (request_id, self._rows))
            self._timer.daemon = True
            self._timer.start()
        return None

    def drop(self) -> None:
        with self._lock:
            self._stop_timer()
            self._forget()

    # ---- callers hold the lock ----

    def _start(self, request_id: str, rows: int, arrays: Arrays) -> None:
        self._forget()
        count = len(next(iter(arrays.values())))
        needed = rows * sum(array.nbytes for array in arrays.values()) // max(count, 1)
        free = psutil.virtual_memory().available
        if needed > free:
            raise RequestError(
                f"the request has {rows} rows, {needed / 2**30:.1f} GiB, but the memory of the "
                f"server's machine has {free / 2**30:.1f} GiB left. Use smaller rollouts "
                "(model.ppo.num_rollout_samples), or a machine with more memory."
            )
        self._request_id = request_id
        self._arrays = {
            name: np.empty((rows, *array.shape[1:]), array.dtype) for name, array in arrays.items()
        }

    def _check(self, request_id: str, first: int, count: int, rows: int, arrays: Arrays) -> None:
        if request_id != self._request_id or first != self._rows:
            came = (
                f"{self._rows} rows of it have come"
                if request_id == self._request_id
                else ("its first rows have not come, or were dropped since")
            )
            raise RequestError(
                f"a piece of request {request_id} begins with row {first}, but {came}. Send all "
                "pieces in order, one after the other."
            )
        for name, whole in self._arrays.items():
            if arrays[name].shape[1:] != whole.shape[1:] or len(whole) != rows:
                raise RequestError(
                    f"a piece of request {request_id} has '{name}' {list(arrays[name].shape)} of "
                    f"{rows} rows, but the first piece promised {list(whole.shape)} in all."
                )
        if count == 0 or first + count > rows:
            raise RequestError(
                f"a piece of request {request_id} has the rows {first} to {first + count} of "
                f"{rows}."
            )

    def _forget(self) -> None:
        self._request_id, self._arrays, self._rows = None, {}, 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- timer thread ----

    def _give_up(self, request_id: str, rows: int) -> None:
        with self._lock:
            if (request_id, rows) != (self._request_id, self._rows):
                return  # a piece has come at this very moment
            self._forget()
        logging.warning(
            f"critic_train: no further piece of request {request_id} for {self.timeout_s:.0f} s; "
            f"the {rows} row(s) that had come are dropped"
        )
