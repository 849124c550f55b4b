# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The Lightning trainer of a job, and the processes that it starts and joins."""

import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.parallel_rules import check_accelerator, cuda_devices
from nemo_aligner.config.values import plain_dict
from nemo_aligner.launch.endings import started_processes
from nemo_aligner.parallel.device import get_backend
from nemo_aligner.servers.ports import find_free_port

# What Lightning gets of the section `trainer`: it starts processes, but its loops are not used.
LIGHTNING_OPTIONS = (
    "num_nodes",
    "devices",
    "accelerator",
    "precision",
    "logger",
    "enable_checkpointing",
    "use_distributed_sampler",
)


def resolve_and_create_trainer(cfg: DictConfig, pop_trainer_key: str | None = None) -> Trainer:
    """Resolve `cfg` in place and build the Lightning trainer from `LIGHTNING_OPTIONS` of
    `cfg.trainer`; the section `pop_trainer_key` with the job's own settings stays out.

    The trainer knows devices, nodes and the launch form (plain `python`, torchrun, SLURM); its own
    loops are not used.

    Raises:
        ConfigError: a GPU was asked for on a machine without CUDA.
    """
    OmegaConf.resolve(cfg)
    trainer_cfg = plain_dict(complete(cfg.trainer, "gpt_sft", "trainer"))
    options = {key: trainer_cfg[key] for key in LIGHTNING_OPTIONS}
    accelerator, gpus = options.pop("accelerator"), cuda_devices()
    check_accelerator(accelerator, 1, gpus)
    options["precision"] = "bf16-true" if "bf16" in str(options["precision"]) else "32-true"
    if "LOCAL_WORLD_SIZE" in os.environ:  # under torchrun and mpirun their numbers count
        options["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
        options["num_nodes"] = int(os.environ["WORLD_SIZE"]) // options["devices"]
    return Trainer(
        **options,
        accelerator="gpu" if gpus and accelerator != "cpu" else "cpu",
        strategy=DDPStrategy(process_group_backend=get_backend(), timeout=timedelta(minutes=30)),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def launch_processes(trainer: Trainer | None) -> None:
    """Start the other processes of this node, if nobody else did, and join the process group;
    every rank calls it.

    Under torchrun and SLURM the processes exist already; with plain `python` Lightning's launcher
    starts this script again, once per further device. Without a trainer, or with the group in
    place, nothing happens.

    When a process of a node started in this way dies, the others end within seconds: Lightning
    watches the children, and they end with their parent.
    """
    if trainer is None or torch.distributed.is_initialized():
        return
    strategy = trainer.strategy
    environment = strategy.cluster_environment
    starts_processes = isinstance(environment, LightningEnvironment)
    if starts_processes and "LOCAL_RANK" not in os.environ:
        # Lightning's own choice may be taken by the time that it is used.
        os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    if strategy.launcher is not None:
        strategy.launcher.launch(lambda: None, trainer=trainer)
        started_processes.extend(getattr(strategy.launcher, "procs", []))
        if starts_processes and environment.local_rank() > 0:
            _end_with_parent()
    strategy.setup_environment()


def init_distributed(trainer: Trainer, model: object = None, use_te: bool = False) -> None:
    """Join the process group of this job (NeMo-Aligner's name for `launch_processes`); every rank
    calls it.

    `load_from_nemo` does it too. `model` and `use_te` are accepted for older scripts and ignored.
    """
    launch_processes(trainer)


def _end_with_parent() -> None:
    """End this process, which Lightning's launcher started, when its parent, rank 0, is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
