# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a server job talk to each other beside the model's process groups."""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.schema import Arrays


class ControlGroup:
    """All ranks of the job, joined by gloo for commands and request data (arrays on the CPU).

    Every rank constructs it and calls each of its methods in the same order. Without a process
    group, or with one rank, the methods concern that rank alone.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # An idle server may wait for days; a lost rank shows as a closed connection.
        self.group = (
            dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
            if self.size > 1
            else None
        )

    def exchange(self, signal_: ServerSignal | None, stop: bool) -> ServerSignal:
        """Return rank 0's `signal_` (others pass None), or STOP if any rank passes `stop`."""
        own = ServerSignal.STOP if stop else (signal_ or 0)
        if self.group is None:
            return ServerSignal(own)
        common = torch.tensor([own], dtype=torch.int64)
        # STOP is the largest signal
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self.group)
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
        """Return the `value` of every rank, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


class JobStore:
    """Notes to the other ranks through the store that the process group was built with."""

    def __init__(self, size: int, prefix: str):
        self._store = None
        if size > 1:
            store = dist.distributed_c10d._get_default_store()
            with contextlib.suppress(Exception):
                # A connection of its own: never behind a blocking call of another thread.
                store = store.clone()  # type: ignore[attr-defined]
            self._store = dist.PrefixStore(prefix, store)

    def put(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it; without other ranks that is always 0."""
        return 0 if self._store is None else self._store.add(key, amount)

    def delete(self, key: str) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):  # not every kind of store can delete
                self._store.delete_key(key)
