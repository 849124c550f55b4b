# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A scoring request in slices, between which a server works on other requests.

A *slice* is a part of the samples that is scored in one operation of all ranks (server_loop.py).
How a request is cut depends on that request alone, never on who else waits, and a slice has whole
micro-batches of it, with the same samples in each: so a score has the same bits as if the request
had been scored in one go. (With context, sequence or virtual pipeline parallelism, or with
`dynamic_micro_batch_tokens`, micro-batches may be others; see docs/operations.md.) Three things
keep a small request from waiting for a large one:

* a large one is worked off in slices, and the queue of the server is first come, first served;
* large ones have a line of their own in front of that queue, one at a time (direct_replies.py);
* what changes the model waits for the end of the requests that have begun, and those that come
  later wait for it (`Turns`), so that all slices of a request are scored by the same weights.

N is the number of samples of a request, filled up to whole micro-batches, S their token length.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from nemo_aligner.servers.kserve import rows_of

# Tokens of a slice per data-parallel rank, padding included, unless one micro-batch has more.
SLICE_TOKENS = 2**14
# Micro-batches of a slice per pipeline stage, where there are several: the stages wait for each
# other at the ends of each slice.
SLICE_MICRO_BATCHES_PER_STAGE = 4
# A request is large above this number of samples, or bytes of its body.
SMALL_ROWS, SMALL_BYTES = 32, 2**17


def is_large(head: dict[str, Any], length: int) -> bool:
    """Whether a scoring request, with a body of `length` bytes, is for the large ones' line."""
    return rows_of(head) > SMALL_ROWS or length > SMALL_BYTES


def slice_size(width: int, micro_batch_size: int, pipeline_stages: int) -> int:
    """Return how many samples of each data-parallel rank make a slice: whole micro-batches.

    `width` is S, and a forward pass has `micro_batch_size` samples per data-parallel rank.
    """
    count = max(SLICE_TOKENS // (micro_batch_size * width), 1)
    if pipeline_stages > 1:
        count = max(count, SLICE_MICRO_BATCHES_PER_STAGE * pipeline_stages)
        count = -(-count // pipeline_stages) * pipeline_stages  # as virtual stages need it
    return count * micro_batch_size


def cut_rows(lengths: np.ndarray, shares: int, size: int, by_length: bool) -> list[np.ndarray]:
    """Return the places of the samples of each slice, int64 [n].

    A slice holds as many samples of each rank's share, and its own shares are those.

    Args:
        lengths: int64 [N], a multiple of `shares`.
        shares: the samples are shared out evenly to so many ranks, in their order.
        size: samples of each share that make a slice.
        by_length: the longest samples of each share come first, as in the micro-batches of a
            model (training/micro_batches.py); else they stay in their order.
    """
    own = lengths.reshape(shares, -1)
    if own.shape[1] <= size:
        return [np.arange(len(lengths))]
    places = np.arange(own.shape[1])[None].repeat(shares, 0)
    if by_length:
        places = np.argsort(-own, axis=1, kind="stable")
    places = places + np.arange(shares)[:, None] * own.shape[1]
    starts = range(0, own.shape[1], size)
    return [places[:, start : start + size].reshape(-1) for start in starts]


class Turns:
    """Several threads may score at once, but none while one changes the model."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._scoring = 0
        self._waiting = 0  # to change the model, or changing it

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """The model stays as it is; waits until nobody wants to change it. One client at a time
        changes it, and waits for each change.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._scoring += 1
        try:
            yield
        finally:
            with self._changed:
                self._scoring -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the model; waits for the end of what is scored. Several changes may wait for
        their turns in the queue of the server.
        """
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._scoring)
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()
