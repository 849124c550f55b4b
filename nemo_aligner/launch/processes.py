# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The Lightning trainer of a job, and the processes that it starts and joins."""

import atexit
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from nemo.utils import exp_manager as nemo_exp_manager
from nemo.utils.callbacks import NeMoModelCheckpoint
from nemo.utils.exp_manager import check_resume as nemo_check_resume
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.folders import complete_checkpoints
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.fields import fields_of
from nemo_aligner.config.keys.common import Machines
from nemo_aligner.config.parallel_rules import check_accelerator, cuda_devices, default_precision
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.leftovers import sweep_once
from nemo_aligner.launch import endings
from nemo_aligner.launch.watchdog import watch
from nemo_aligner.parallel import environment
from nemo_aligner.parallel.device import get_backend
from nemo_aligner.parallel.parallel_state import join_on_loopback, share_gloo_devices

TIMEOUT = timedelta(minutes=30)  # of collectives, and of the wait for all ranks at the start

# What Lightning gets of the section `trainer`: it starts processes, but its loops are not used.
LIGHTNING_OPTIONS = (*fields_of(Machines), "enable_checkpointing", "use_distributed_sampler")


class JobTrainer(Trainer):
    """Lightning's trainer, with its job's resolved configuration and own section of `trainer`, if
    any.
    """

    def __init__(self, job_cfg: DictConfig, section: str | None, **options: Any) -> None:
        self.job_cfg = job_cfg
        self.section = section
        super().__init__(**options)


def _check_resume(
    trainer: Trainer,
    log_dir: str | Path,
    if_exists: bool,
    past_end: bool,
    may_lack: bool,
    dirpath: str | None,
    checkpoint: str | None,
) -> None:
    """In place of NeMo's, for the `exp_manager` of scripts of NeMo-Aligner: `trainer.ckpt_path` is
    our newest complete checkpoint.
    """
    if isinstance(trainer, JobTrainer) and if_exists:
        if_exists, folder = False, Path(dirpath or Path(log_dir) / "checkpoints")
        found = complete_checkpoints(folder)
        checkpoint = checkpoint or (str(found[-1][0]) if found else None)
        if not checkpoint and not may_lack:
            raise no_checkpoint_error(folder)
    nemo_check_resume(trainer, log_dir, if_exists, past_end, may_lack, dirpath, checkpoint)


def no_checkpoint_error(folder: Path) -> UserError:
    return UserError(
        f"exp_manager.resume_if_exists=True, but {folder} holds no complete checkpoint; set "
        "exp_manager.resume_ignore_no_checkpoint=True to start afresh."
    )


def nemo_checkpoint_callback(trainer: Trainer) -> NeMoModelCheckpoint | None:
    callbacks = getattr(trainer, "callbacks", None) or []
    return next((each for each in callbacks if isinstance(each, NeMoModelCheckpoint)), None)


def resolve_and_create_trainer(cfg: DictConfig, pop_trainer_key: str | None = None) -> JobTrainer:
    """Resolve `cfg` in place and build the Lightning trainer from `LIGHTNING_OPTIONS` of
    `cfg.trainer`; the section `pop_trainer_key` stays out. `ConfigError`: a GPU was asked for
    without CUDA, or the CPU in a process that has found a GPU.
    """
    sweep_once()
    environment.adopt_mpi_ranks(os.environ)  # scripts of NeMo-Aligner have nobody else to do it
    # NeMo's callback fails at an earlier run's val_loss=nan, and removes all but the best.
    NeMoModelCheckpoint.nemo_topk_check_previous_run = lambda _self: None
    nemo_exp_manager.check_resume = _check_resume
    OmegaConf.resolve(cfg)
    trainer_cfg = plain_dict(complete(cfg.trainer, "gpt_sft", "trainer"))
    options = {key: trainer_cfg[key] for key in LIGHTNING_OPTIONS}
    accelerator = options.pop("accelerator")
    if accelerator == "cpu":
        environment.hide_gpus()
    gpus = cuda_devices()
    check_accelerator(accelerator, 1, gpus)
    if accelerator == "cpu" and (gpus or environment.packages_in_use()):
        found = f"{gpus} GPUs" if gpus else " and ".join(environment.packages_in_use())
        raise ConfigError(
            f"trainer.accelerator=cpu, but this process had found {found} before it read that, "
            "and would use them; start it with an empty environment variable "
            "CUDA_VISIBLE_DEVICES."
        )
    precision = options["precision"] or default_precision(accelerator)
    options["precision"] = "bf16-true" if "bf16" in str(precision) else "32-true"
    if "LOCAL_WORLD_SIZE" in os.environ:  # under torchrun and mpirun their numbers count
        options["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
        options["num_nodes"] = int(os.environ["WORLD_SIZE"]) // options["devices"]
    # Lightning would take SLURM's variables, of the allocation that mpirun runs in, for the ranks.
    environments = [LightningEnvironment()] if environment.has_mpi_ranks(os.environ) else None
    return JobTrainer(
        cfg,
        pop_trainer_key,
        **options,
        plugins=environments,
        accelerator="gpu" if gpus else "cpu",
        strategy=DDPStrategy(process_group_backend=get_backend(), timeout=TIMEOUT),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def launch_processes(trainer: Trainer | None) -> None:
    """Start the other processes of this node, if nobody else did (torchrun, SLURM), and join the
    process group; every rank calls it. With plain `python` Lightning starts this script again,
    once per further device; such processes end with each other. Without a trainer, or with the
    group in place, nothing happens.
    """
    if trainer is None or torch.distributed.is_initialized():
        return
    strategy = trainer.strategy
    cluster = strategy.cluster_environment
    endings.end_with_starter()
    starts_others = isinstance(cluster, LightningEnvironment)
    starts_others = starts_others and "LOCAL_RANK" not in os.environ
    if starts_others:
        from nemo_aligner.servers.ports import find_free_port

        # Lightning's own choice may be taken by the time that it is used.
        os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    if strategy.launcher is not None:
        others = {endings.STARTED_BY: str(os.getpid())} if starts_others else {}
        os.environ.update(others)
        try:
            strategy.launcher.launch(lambda: None, trainer=trainer)
        finally:
            for name in others:
                del os.environ[name]
        endings.adopt(getattr(strategy.launcher, "procs", []))
    share_gloo_devices()
    if isinstance(strategy, DDPStrategy):
        strategy.set_world_ranks()
        assert cluster is not None
        backend = strategy.process_group_backend or get_backend()
        rank, ranks = cluster.global_rank(), cluster.world_size()
        place = cluster.main_address, cluster.main_port
        if join_on_loopback(backend, rank, ranks, *place, TIMEOUT) and backend == "nccl":
            atexit.register(torch.distributed.destroy_process_group)  # as Lightning does
    strategy.setup_environment()  # joins the other ranks unless this process has
    if isinstance(trainer, JobTrainer):
        settings = complete(trainer.job_cfg.trainer, "gpt_sft", "trainer")
        watch(settings.hang_timeout_s, trainer.global_rank, trainer.world_size)


def init_distributed(ptl_trainer: Trainer, ptl_model: object = None, use_te: bool = False) -> None:
    """`launch_processes` by NeMo-Aligner's name and arguments; every rank calls it."""
    launch_processes(ptl_trainer)
