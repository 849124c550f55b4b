# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank of this process before process groups exist. Imports nothing heavy."""

import os
import sys
import zlib
from collections.abc import Mapping, MutableMapping

from nemo_aligner.core.errors import ConfigError


def is_rank_zero() -> bool:
    """True in the process that writes files, also before `torch.distributed` is initialised."""
    dist = sys.modules.get("torch.distributed")  # not imported: not initialised either
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    env = os.environ
    if env.get("RANK") or env.get("SLURM_PROCID"):
        return int(env.get("RANK") or env["SLURM_PROCID"]) == 0
    return int(env.get("LOCAL_RANK") or 0) == 0 and int(env.get("NODE_RANK") or 0) == 0


def adopt_mpi_ranks(env: MutableMapping[str, str]) -> None:
    """In a process of Open MPI's `mpirun`, set in `env` what torchrun would have set; elsewhere do
    nothing. `ConfigError`: several nodes without MASTER_ADDR and MASTER_PORT.
    """
    if "RANK" in env or "OMPI_COMM_WORLD_RANK" not in env:
        return
    ranks, here = env["OMPI_COMM_WORLD_SIZE"], env["OMPI_COMM_WORLD_LOCAL_SIZE"]
    if ranks == here:
        # The same in all processes of a job, and another one in the next job.
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 10000))
    elif not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ConfigError(
            f"mpirun started {ranks} processes, {here} of them on this node, and they cannot know "
            "where rank 0 listens; start mpirun with -x MASTER_ADDR=<host of rank 0> and -x "
            "MASTER_PORT=29500."
        )
    local = env["OMPI_COMM_WORLD_LOCAL_RANK"]
    env["RANK"], env["WORLD_SIZE"] = env["OMPI_COMM_WORLD_RANK"], ranks
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = local, here
    env["NODE_RANK"] = str((int(env["RANK"]) - int(local)) // int(here))


def has_mpi_ranks(env: Mapping[str, str]) -> bool:
    """Whether `env` has ranks by `adopt_mpi_ranks`, and of no torchrun below mpirun."""
    adopted = env.get("RANK") is not None and env.get("RANK") == env.get("OMPI_COMM_WORLD_RANK")
    return adopted and "TORCHELASTIC_RUN_ID" not in env
