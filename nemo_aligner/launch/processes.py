# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: started, joined and ended together; and the Lightning trainer that knows
their number.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.core.errors import AlarmError, ConfigError, ServerRequestError, UserError
from nemo_aligner.parallel.device import get_backend
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.servers.ports import find_free_port

# Processes of this node that Lightning's launcher has started from this one.
_children: list[subprocess.Popen] = []


# After an error: how long another process may take to fail for the same reason.
_FAILURE_GRACE_S = 5.0


# After a user's error: how long another rank leaves the message to rank 0.
_RANK_ZERO_FIRST_S = 10.0


# After the work: how long another process may take to end.
_EXIT_GRACE_S = 60.0


def user_errors_end_the_job(main):
    """Decorator of a script's `main`: every process of the job ends with it, in success and in
    failure.

    An error whose message says what to do (a user's, a server's, what alarms end a run with) is
    printed as one message, by rank 0 if all ranks have it, without a traceback; the exit code is
    1. Any other error keeps its traceback. Either way the processes that `launch_processes`
       started are not left behind.
    """

    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            result = main(*args, **kwargs)
        except (UserError, ServerRequestError, AlarmError) as error:
            if not is_rank_zero():
                time.sleep(_RANK_ZERO_FIRST_S)  # rank 0 ends this process if it has failed too
            print(f"\nERROR: {error}", file=sys.stderr, flush=True)
            _end_children(0.0)
            raise SystemExit(1) from None
        except BaseException:
            _end_children(_FAILURE_GRACE_S)
            raise
        if not _end_children(_EXIT_GRACE_S):
            raise SystemExit(1)
        return result

    return run


def _end_children(grace_s: float) -> bool:
    """Wait `grace_s` for the children, then kill what is left; True if all of them ended well by
    themselves.
    """
    deadline = time.monotonic() + grace_s
    for child in _children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0.0))
    alive = [child for child in _children if child.poll() is None]
    for child in alive:
        child.kill()
        child.wait()
    return not alive and all(child.returncode == 0 for child in _children)


def _end_with_parent() -> None:
    """In a process that Lightning's launcher started: end when rank 0 is killed, instead of
    waiting for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def resolve_and_create_trainer(cfg: DictConfig, pop_trainer_key: str | None = None) -> Trainer:
    """Resolve `cfg` in place and build the Lightning trainer from `cfg.trainer` without its
    `pop_trainer_key` section (None for a job that has none).

    The trainer knows devices, nodes and the launch form (plain `python`, torchrun, SLURM); its own
    loops are not used.

    Raises:
        ConfigError: a GPU was asked for on a machine without CUDA.
    """
    OmegaConf.resolve(cfg)
    options = {
        k: v for k, v in OmegaConf.to_container(cfg.trainer).items() if k != pop_trainer_key
    }
    accelerator = options.pop("accelerator", "auto")
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={accelerator}, but this machine has no CUDA; set "
            "trainer.accelerator=auto."
        )
    options["precision"] = (
        "bf16-true" if "bf16" in str(options.get("precision", 32)) else "32-true"
    )
    for not_lightnings in ("max_time", "max_epochs", "max_steps"):
        options.pop(not_lightnings, None)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun its numbers count
        options["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
        options["num_nodes"] = int(os.environ["WORLD_SIZE"]) // options["devices"]
    use_gpu = torch.cuda.is_available() and accelerator != "cpu"
    return Trainer(
        **options,
        accelerator="gpu" if use_gpu else "cpu",
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
    if (
        isinstance(strategy.cluster_environment, LightningEnvironment)
        and "LOCAL_RANK" not in os.environ
    ):
        os.environ.setdefault(
            "MASTER_PORT", str(find_free_port())
        )  # Lightning's own choice may be taken by now
    if strategy.launcher is not None:
        strategy.launcher.launch(lambda: None, trainer=trainer)
        _children.extend(getattr(strategy.launcher, "procs", []))
        # Lightning's own environment means that a process of local rank 0 has started the others.
        environment = strategy.cluster_environment
        if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            _end_with_parent()
    strategy.setup_environment()


def init_distributed(trainer: Trainer, model=None, use_te: bool = False) -> None:
    """Process group of this job (NeMo-Aligner's name). Models do it themselves on construction;
    `model` and `use_te` need nothing more."""
    launch_processes(trainer)
