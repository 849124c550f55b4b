# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank of this process before process groups exist, and GPUs that it does not use. Imports
nothing heavy.
"""

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


# ---------------------------------------------------------------------------- GPUs that are hidden


_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = ("", "-1", "NoDevFiles")  # first entries that hide all; the last one is SLURM's
_NEED_A_GPU = ("transformer_engine", "apex")
_before: dict[str, str | None] = {}  # the variable as the user set it, once it was changed


def hide_gpus() -> None:
    """Let this process and its children run on the CPU, as `trainer.accelerator=cpu` asks. It acts
    only before PyTorch has looked for a GPU and before Megatron Core is imported.
    """
    _before.setdefault(_VARIABLE, os.environ.get(_VARIABLE))
    os.environ[_VARIABLE] = ""
    do_without_hidden_gpus()


def do_without_hidden_gpus() -> None:
    """Where the environment hides all GPUs, do as if packages that need one were not installed:
    Megatron Core uses their optimizers and norms if it can. What is imported already stays.
    """
    first = os.environ.get(_VARIABLE, "0").split(",")[0].strip()
    if first in _NO_GPU:
        for name in _NEED_A_GPU:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # ends in ImportError


def packages_in_use() -> list[str]:
    """Packages that need a GPU and that this process has imported."""
    return [name for name in _NEED_A_GPU if sys.modules.get(name) is not None]


def users_environment() -> dict[str, str]:
    """The environment with the GPUs that the user gave to this process, for code of the user."""
    environment = dict(os.environ)
    for name, value in _before.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment
