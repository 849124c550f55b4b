# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks, sizes and groups: a thin face over `megatron.core.parallel_state`.

Without an initialised process group every question has the answer of a single process (rank 0, size 1, group None), so
trainers and math can run in a plain Python process.
"""

import os
from datetime import timedelta

import torch

from nemo_aligner.utils.device import adapt_megatron_core, get_backend
from nemo_aligner.utils.errors import ConfigError

adapt_megatron_core()

from megatron.core import parallel_state as _mcore  # noqa: E402  (the adaptation comes first)
from megatron.core import tensor_parallel as _tensor_parallel  # noqa: E402


def is_initialized() -> bool:
    """True once Megatron's groups exist in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and _mcore.is_initialized()


def initialize(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    seed: int = 1234,
    timeout: timedelta = timedelta(minutes=30),
) -> None:
    """Create Megatron's process groups and seed its random-number tracker; every rank calls it once.

    A process without `torch.distributed` becomes a world of its own (size 1, through an in-process store: no port).

    Raises:
        ConfigError: TP x PP x CP does not divide the number of ranks.
    """
    if not torch.distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            torch.distributed.init_process_group(get_backend(), timeout=timeout)
        else:
            torch.distributed.init_process_group(
                get_backend(), store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    world_size = torch.distributed.get_world_size()
    model_size = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if world_size % model_size:
        raise ConfigError(
            f"tensor_model_parallel_size={tensor_model_parallel_size} x pipeline_model_parallel_size="
            f"{pipeline_model_parallel_size} x context_parallel_size={context_parallel_size} = {model_size} does not "
            "divide "
            f"the {world_size} rank(s) of this job. Change trainer.devices / trainer.num_nodes or the parallel sizes."
        )
    if not _mcore.is_initialized():
        _mcore.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            # Gloo groups serve checkpoints and control messages beside NCCL.
            create_gloo_process_groups=True,
        )
    else:
        have = (_mcore.get_tensor_model_parallel_world_size(), _mcore.get_pipeline_model_parallel_world_size())
        if have != (tensor_model_parallel_size, pipeline_model_parallel_size):
            raise ConfigError(
                f"this process already runs with TP={have[0]}, PP={have[1]}; a second model cannot use "
                f"TP={tensor_model_parallel_size}, PP={pipeline_model_parallel_size}."
            )
    # Pipeline stages hold other layers: they must not draw the same weights and dropout masks.
    _tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * _mcore.get_pipeline_model_parallel_rank())


def destroy() -> None:
    """Leave all groups; the process can initialise again with other sizes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if _mcore.is_initialized():
            _mcore.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def get_rank() -> int:
    """Global rank."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def get_world_size() -> int:
    """Number of ranks of this job."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    if not is_initialized():
        return 1
    return _mcore.get_data_parallel_world_size(with_context_parallel=with_context_parallel)


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    if not is_initialized():
        return 0
    return _mcore.get_data_parallel_rank(with_context_parallel=with_context_parallel)


def get_data_parallel_group(with_context_parallel: bool = False):
    return _mcore.get_data_parallel_group(with_context_parallel=with_context_parallel) if is_initialized() else None


def get_data_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's data-parallel group."""
    return _mcore.get_data_parallel_src_rank() if is_initialized() else 0


def get_model_parallel_group():
    if not is_initialized():
        return None
    return _mcore.get_model_parallel_group()


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's TP x PP group."""
    if not is_initialized():
        return 0
    return torch.distributed.get_process_group_ranks(get_model_parallel_group())[0]


def get_tensor_model_parallel_group():
    return _mcore.get_tensor_model_parallel_group() if is_initialized() else None


def get_tensor_model_parallel_rank() -> int:
    return _mcore.get_tensor_model_parallel_rank() if is_initialized() else 0


def get_tensor_model_parallel_world_size() -> int:
    return _mcore.get_tensor_model_parallel_world_size() if is_initialized() else 1


def get_tensor_model_parallel_src_rank() -> int:
    return _mcore.get_tensor_model_parallel_src_rank() if is_initialized() else 0


def get_pipeline_model_parallel_group():
    return _mcore.get_pipeline_model_parallel_group() if is_initialized() else None


def get_pipeline_model_parallel_world_size() -> int:
    return _mcore.get_pipeline_model_parallel_world_size() if is_initialized() else 1


def get_pipeline_model_parallel_rank() -> int:
    return _mcore.get_pipeline_model_parallel_rank() if is_initialized() else 0


def get_pipeline_model_parallel_first_rank() -> int:
    return _mcore.get_pipeline_model_parallel_first_rank() if is_initialized() else 0


def get_pipeline_model_parallel_last_rank() -> int:
    return _mcore.get_pipeline_model_parallel_last_rank() if is_initialized() else 0


def is_pipeline_first_stage() -> bool:
    return _mcore.is_pipeline_first_stage(ignore_virtual=True) if is_initialized() else True


def is_pipeline_last_stage() -> bool:
    return _mcore.is_pipeline_last_stage(ignore_virtual=True) if is_initialized() else True


def get_context_parallel_world_size() -> int:
    return _mcore.get_context_parallel_world_size() if is_initialized() else 1


def get_context_parallel_rank() -> int:
    return _mcore.get_context_parallel_rank() if is_initialized() else 0


def get_context_parallel_group():
    return _mcore.get_context_parallel_group() if is_initialized() else None
