# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How ranks meet, ranks, sizes and groups: a thin layer over `megatron.core.parallel_state`.
Without a process group every function returns what holds for a single process (rank 0, size 1,
group None).
"""

import functools
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as _mcore
from megatron.core import tensor_parallel as _tensor_parallel
from torch.distributed import ProcessGroup, Store, distributed_c10d, is_gloo_available

from nemo_aligner.config.parallel_rules import check_expert_ranks, data_parallel_size
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel.device import get_backend, keep_freed_memory, take_products_from_mkl
from nemo_aligner.parallel.megatron_adaptation import adapt_megatron_core

T = TypeVar("T")
# Keys of a model, and arguments of `initialize`.
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_replica_group: ProcessGroup | None = None  # TP x PP x CP, with context parallelism


def is_initialized() -> bool:
    return dist.is_initialized() and _mcore.is_initialized()


def initialize(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    seed: int = 1234,
    timeout: timedelta = timedelta(minutes=30),
) -> None:
    """Adapt Megatron Core and PyTorch, create the process groups and seed the random-number
    tracker. Every rank calls it once, before it builds a model. A process without
    `torch.distributed` becomes a world of its own, without a port. `ConfigError`: TP x PP x CP
    does not divide the number of ranks, or EP does not divide the ranks that share a model's work.
    """
    adapt_megatron_core()
    keep_freed_memory()
    take_products_from_mkl()
    share_gloo_devices()
    if not dist.is_initialized():
        _join_world(timeout)
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    cp, ep = context_parallel_size, expert_model_parallel_size
    check_expert_ranks(ep, data_parallel_size(dist.get_world_size(), tp, pp, cp), cp)
    global _replica_group
    if _mcore.is_initialized():
        present = (
            _mcore.get_tensor_model_parallel_world_size(),
            _mcore.get_pipeline_model_parallel_world_size(),
            _mcore.get_context_parallel_world_size(),
            _mcore.get_expert_model_parallel_world_size(),
        )
        if present != (tp, pp, cp, ep):
            sizes = "TP={}, PP={}, CP={}, EP={}"
            raise ConfigError(
                f"this process already runs with {sizes.format(*present)}; a second model cannot "
                f"use {sizes.format(tp, pp, cp, ep)}."
            )
    else:
        _replica_group = None  # of groups that were destroyed since
        _mcore.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=None
            if virtual_pipeline_model_parallel_size == 1
            else virtual_pipeline_model_parallel_size,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            # Gloo groups serve checkpoints and control messages beside NCCL.
            create_gloo_process_groups=True,
        )
    if cp > 1 and _replica_group is None:
        _replica_group = _new_replica_group(timeout)
    seed_generators(seed)


def _join_world(timeout: timedelta) -> None:
    env = os.environ
    address, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", 0))
    rank, world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    if world_size == 1:
        rank = 0  # a process of a larger job that is to be a world of its own
    if not join_on_loopback(get_backend(), rank, world_size, address, port, timeout):
        torch.distributed.init_process_group(get_backend(), timeout=timeout)


def _new_replica_group(timeout: timedelta) -> ProcessGroup:
    """The ranks of this rank's TP x PP x CP, of which Megatron Core has no group; all call it."""
    replicas = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(replicas, _mcore.get_data_parallel_rank())
    groups = [
        # A collective of all ranks, members or not.
        torch.distributed.new_group(
            [rank for rank, other in enumerate(replicas) if other == replica], timeout
        )
        for replica in range(_mcore.get_data_parallel_world_size())
    ]
    return groups[_mcore.get_data_parallel_rank()]


def seed_generators(seed: int, by_context_rank: bool = False) -> None:
    """Seed Megatron's random-number tracker and the device's generator; with `by_context_rank`
    (for dropout) differently on context-parallel ranks, else alike (for initial weights).
    """
    # Pipeline stages hold other layers: they must not draw the same weights and dropout masks.
    stream = _mcore.get_pipeline_model_parallel_rank()
    if by_context_rank:
        stages = _mcore.get_pipeline_model_parallel_world_size()
        stream += stages * _mcore.get_context_parallel_rank()
    _tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * stream)


def destroy() -> None:
    """Leave all groups; the process can initialise again with other sizes."""
    if torch.distributed.is_initialized():
        if _mcore.is_initialized():
            _mcore.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def get_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def get_world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _of_megatron(name: str, alone: T, **options: Any) -> Callable[..., T]:
    """Megatron Core's function `name`, called with `options`; `alone` without its groups."""

    def get(*given: Any, **more: Any) -> T:
        if not is_initialized():
            return alone
        return getattr(_mcore, name)(*given, **options, **more)

    get.__name__ = name
    return get


_Group = ProcessGroup | None
_no_group: _Group = None

# The first three take `with_context_parallel`: count the context-parallel ranks too.
get_data_parallel_world_size = _of_megatron("get_data_parallel_world_size", 1)
get_data_parallel_rank = _of_megatron("get_data_parallel_rank", 0)
get_data_parallel_group = _of_megatron("get_data_parallel_group", _no_group)
# Global rank of the first member of this rank's data-parallel group.
get_data_parallel_src_rank = _of_megatron("get_data_parallel_src_rank", 0)
get_tensor_model_parallel_group = _of_megatron("get_tensor_model_parallel_group", _no_group)
get_tensor_model_parallel_rank = _of_megatron("get_tensor_model_parallel_rank", 0)
get_tensor_model_parallel_world_size = _of_megatron("get_tensor_model_parallel_world_size", 1)
get_tensor_model_parallel_src_rank = _of_megatron("get_tensor_model_parallel_src_rank", 0)
get_pipeline_model_parallel_group = _of_megatron("get_pipeline_model_parallel_group", _no_group)
get_pipeline_model_parallel_world_size = _of_megatron("get_pipeline_model_parallel_world_size", 1)
get_pipeline_model_parallel_rank = _of_megatron("get_pipeline_model_parallel_rank", 0)
get_pipeline_model_parallel_first_rank = _of_megatron("get_pipeline_model_parallel_first_rank", 0)
get_pipeline_model_parallel_last_rank = _of_megatron("get_pipeline_model_parallel_last_rank", 0)
is_pipeline_first_stage = _of_megatron("is_pipeline_first_stage", True, ignore_virtual=True)
is_pipeline_last_stage = _of_megatron("is_pipeline_last_stage", True, ignore_virtual=True)
get_context_parallel_world_size = _of_megatron("get_context_parallel_world_size", 1)
get_context_parallel_rank = _of_megatron("get_context_parallel_rank", 0)
get_context_parallel_group = _of_megatron("get_context_parallel_group", _no_group)
# Ranks that share the experts of a layer. They have different samples, but must pass through every
# layer equally often: tokens travel between them.
get_expert_model_parallel_group = _of_megatron("get_expert_model_parallel_group", _no_group)
get_expert_model_parallel_world_size = _of_megatron("get_expert_model_parallel_world_size", 1)
get_expert_model_parallel_rank = _of_megatron("get_expert_model_parallel_rank", 0)
# The ranks that hold the same experts.
get_expert_data_parallel_group = _of_megatron("get_expert_data_parallel_group", _no_group)
# The ranks that hold one copy of the weights, TP x PP; the last TP of them are the last stage.
get_tensor_and_pipeline_parallel_group = _of_megatron("get_model_parallel_group", _no_group)


def get_model_parallel_group() -> ProcessGroup | None:
    """The ranks of one replica of the model, TP x PP x CP, which work on the same samples."""
    if get_context_parallel_world_size() > 1:
        return _replica_group
    return get_tensor_and_pipeline_parallel_group()


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's TP x PP x CP group."""
    if not is_initialized():
        return 0
    return torch.distributed.get_process_group_ranks(get_model_parallel_group())[0]


def is_trt_llm_reshard() -> bool:
    """False, by NeMo-Aligner's name (`generation.split` has the groups of generation)."""
    return False


def disable_trt_llm_reshard_calls() -> None:
    """Do nothing, by NeMo-Aligner's name."""


# -------------------------------------------------------------------- the meeting of a job's ranks

# Torch's store listens on every interface and knows no password. Ranks on one machine get a socket
# on loopback alone; others, and those of torchrun, meet as torch has them.
_LOOPBACK = ("127.0.0.1", "localhost")


def join_on_loopback(
    backend: str, rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> bool:
    """Initialise `torch.distributed` if all ranks, which call it, are here; whether it did."""
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


# PyTorch opens a gloo device for every group, about twenty with Megatron Core, with a thread that
# wakes a hundred times a second: 3 % of a core of a virtual machine. It has no setting to share
# them.
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
