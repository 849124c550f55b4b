# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One gloo device for all process groups of a process.

PyTorch opens a device for every group. Each has a thread that wakes a hundred times a second for
as long as the group lives, with or without messages. Megatron Core makes about twenty groups, in a
job of one rank too: 2,000 wake-ups a second, 3 % of a core of a virtual machine. Gloo's devices
are made to be shared, but PyTorch has no setting for it.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed import Store, distributed_c10d

_PyTorchsGroup: type[Any] = distributed_c10d.ProcessGroupGloo
# By process, since threads do not live on in a fork, and by the interfaces that PyTorch was given.
# None is ever removed: a fork that freed a device would wait for its thread.
_devices: dict[tuple[int, str | None], list[Any]] = {}


class _GroupOnSharedDevices(_PyTorchsGroup):
    """A gloo group on the devices that PyTorch has chosen for the first one of this process."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        key = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME")
        if key not in _devices:
            super().__init__(store, rank, size, timeout=timeout)
            _devices[key] = self.options._devices
            return
        options = _PyTorchsGroup._Options()
        options._devices, options._timeout = _devices[key], timeout
        options._threads = 2 * len(_devices[key])  # as PyTorch has it
        super().__init__(store, rank, size, options)


def share_gloo_devices() -> None:
    """Let the gloo groups that `torch.distributed` creates from now on share their devices."""
    distributed_c10d.ProcessGroupGloo = _GroupOnSharedDevices  # type: ignore[misc]
