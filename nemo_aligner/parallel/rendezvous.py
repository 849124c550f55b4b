# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The meeting of a job's ranks: on one machine, where no other machine can join.

Torch's store listens on every interface, whatever address its ranks are given, and knows no
password. For ranks on one machine it gets a socket that listens on loopback alone. Ranks of
several machines, and those of torchrun, whose own process holds the store, meet as torch has them.
"""

import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_LOOPBACK = ("127.0.0.1", "localhost")


def join_on_loopback(
    backend: str, rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> bool:
    """Initialise `torch.distributed` if all ranks are on this machine; every rank calls it.

    Returns:
        False if the ranks must meet as torch has them.
    """
    if world_size > 1 and (address not in _LOOPBACK or _has_agent_store(os.environ)):
        return False
    if sys.platform == "linux":
        # Gloo would listen on the address of this machine's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        listening = None
        if rank == 0:
            listening = socket.create_server(("127.0.0.1", port)).detach()
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


def _has_agent_store(env: Mapping[str, str]) -> bool:
    """Whether torchrun has opened the store already."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
