# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The meeting of a job's ranks: on one machine, where no other machine can join; and one gloo
device for all process groups of a process.

Torch's store listens on every interface and knows no password. Ranks on one machine get a socket
on loopback alone; others, and those of torchrun, meet as torch has them.

PyTorch opens a gloo device for every group, about twenty with Megatron Core, with a thread that
wakes a hundred times a second: 3 % of a core of a virtual machine. It has no setting to share
them.
"""

import functools
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d, is_gloo_available

_LOOPBACK = ("127.0.0.1", "localhost")


def join_on_loopback(
    backend: str, rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> bool:
    """Initialise `torch.distributed` if all ranks (which call it) are on this machine; else
    False.
    """
    # torchrun has opened the store already.
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size > 1 and (address not in _LOOPBACK or has_agent_store):
        return False
    if sys.platform == "linux":
        # Gloo would listen on the address of this machine's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        listening = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            rank == 0,
            timeout=timeout,
            multi_tenant=False,
            master_listen_fd=listening,
        )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    return True


# By process, since threads do not live on in a fork, and by the interfaces that PyTorch was given.
# None is removed: a fork that freed a device of its parent would wait for the parent's thread.
_devices: dict[tuple[int, str | None], list[Any]] = {}
# With these gloo needs a device for each group: pairs are numbered by rank, or a group that ends
# shuts its device down.
_OWN_DEVICES = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")


def share_gloo_devices() -> None:
    """Let this process's gloo groups share the devices of its first, by replacing
    `ProcessGroupGloo.__init__`. A process whose group could not be created, because a rank did not
    come in time, should end: that rank may still connect.
    """
    if not is_gloo_available():
        return
    group = distributed_c10d.ProcessGroupGloo
    create: Any = group.__init__
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_on_shared_devices(
        self: Any, store: Store, rank: int, size: int, *args: Any, **kwargs: Any
    ) -> None:
        # As `torch.distributed` calls it; any other call chooses its devices itself.
        is_default = not args and kwargs.keys() == {"timeout"}
        if not is_default or any(name in os.environ for name in _OWN_DEVICES):
            create(self, store, rank, size, *args, **kwargs)
            return
        key = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME")
        if key not in _devices:
            create(self, store, rank, size, **kwargs)
            _devices[key] = self.options._devices
            return
        options: Any = group._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = _devices[key], kwargs["timeout"]
        options._threads = 2 * len(_devices[key])  # as PyTorch has it
        create(self, store, rank, size, options)

    group.__init__ = create_on_shared_devices  # type: ignore[method-assign]
