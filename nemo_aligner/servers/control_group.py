# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a server job talk to each other beside the model's process groups."""

import concurrent.futures
import contextlib
import datetime
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.schema import Arrays
from nemo_aligner.servers.threads import future_of


class ControlGroup:
    """All ranks of the job, joined by gloo for commands and request data (arrays on the CPU).

    Every rank constructs it and calls each of its methods in the same order. Without a process
    group, or with one rank, the methods concern that rank alone.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # An idle server may wait for days; a lost rank shows as a closed connection.
        days = datetime.timedelta(days=30)
        self.group = dist.new_group(backend="gloo", timeout=days) if self.size > 1 else None

    def exchange(self, signal_: ServerSignal | None, stop: bool) -> ServerSignal:
        """Return rank 0's `signal_` (others pass None), or STOP if any rank passes `stop`."""
        own = ServerSignal.STOP if stop else (signal_ or 0)
        if self.group is None:
            return ServerSignal(own)
        common = torch.tensor([own], dtype=torch.int64)
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self.group)  # STOP is the largest
        return ServerSignal(int(common))

    def from_rank_zero(self, make: Callable[[], Arrays]) -> Arrays:
        """Return rank 0's `make()` on every rank; if it raises there, all ranks raise."""
        if self.group is None:
            return make()
        arrays: Arrays = {}
        error: Exception | None = None
        header: dict[str, tuple[tuple[int, ...], str]] | str = {}  # shapes and dtypes, or an error
        if self.rank == 0:
            try:
                arrays = {name: np.ascontiguousarray(array) for name, array in make().items()}
                header = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
            except Exception as exception:
                error = exception
                header = f"{type(exception).__name__}: {exception}"
        box = [header]
        dist.broadcast_object_list(box, src=0, group=self.group)
        header = box[0]
        if isinstance(header, str):
            raise error or RuntimeError(f"on rank 0: {header}")
        if self.rank:
            arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in header.items()}
        for array in arrays.values():
            if array.size:
                dist.broadcast(torch.from_numpy(array), src=0, group=self.group)
        return arrays

    def gather_objects(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order, on every rank."""
        return gathered(value, self.group)


class StoreLostError(RuntimeError):
    """The store does not reply: the link to the machine that holds it is cut, or that is down."""


class JobStore:
    """Notes to the other ranks through the store that the process group was built with.

    Its own calls never return over a link that is cut, so threads make them. After a call that had
    no reply within `reply_s` each one raises `StoreLostError`, until that reply comes.
    """

    def __init__(self, size: int, prefix: str, reply_s: float = 10.0):
        self._store = None
        self._reply_s = reply_s
        self._late: Future[Any] | None = None  # a reply that had not come in time
        if size > 1:
            store = dist.distributed_c10d._get_default_store()
            with contextlib.suppress(Exception):
                # A connection of its own: never behind a blocking call of another thread.
                store = store.clone()  # type: ignore[attr-defined]
            self._store = dist.PrefixStore(prefix, store)

    def put(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(key, text))

    def get(self, key: str) -> str | None:
        found = self._ask(lambda store: store.get(key).decode() if store.check([key]) else None)
        return found or None

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it; without other ranks that is always 0."""
        return self._ask(lambda store: store.add(key, amount)) or 0

    def withdraw(self, key: str) -> None:
        """Have `get` return None. The key stays, empty: a rank that just found it would wait."""
        self.put(key, "")

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        if self._store is None:
            return None
        if self._late is None or self._late.done():
            reply = future_of("store", call, self._store)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return reply.result(self._reply_s)
            self._late = reply
        raise StoreLostError("the store of the job, on the machine of rank 0, does not reply")
