# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the launch scripts share: processes, Lightning trainer, experiment folder, configuration of
a loaded model, resume.
"""

import contextlib
import copy
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from nemo.utils import logging
from nemo.utils.exp_manager import exp_manager as nemo_exp_manager
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_aligner.checkpoint import nemo_archive
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.checks import drop_unset
from nemo_aligner.core.errors import AlarmError, ConfigError, ServerRequestError, UserError
from nemo_aligner.parallel.device import get_backend
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.training.loggers import CustomLoggerWrapper, is_rank_zero
from nemo_aligner.training.schedule import compute_num_steps_per_epoch

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


def setup_experiment(trainer: Trainer, cfg: DictConfig) -> Path:
    """Log folder and loggers through NeMo's `exp_manager`; every rank calls it. Returns the log
    folder.

    Checkpoints, resume and time limits are this project's own, so those keys are kept from it.
    """
    options = copy.deepcopy(cfg.exp_manager)
    with open_dict(options):
        options.create_checkpoint_callback = False
        options.resume_if_exists = False
        options.resume_from_checkpoint = None
        options.max_time_per_run = None
        options.seconds_to_sleep = 0
        options.pop("checkpoint_callback_params", None)
    try:
        log_dir = Path(nemo_exp_manager(trainer, options))
    except OSError as error:
        raise UserError(
            f"the log folder exp_manager.explicit_log_dir={options.get('explicit_log_dir')} "
            "cannot be written: "
            f"{error}; give another one."
        ) from error
    if is_rank_zero():
        _keep_json_lines(log_dir)
    return log_dir


def _keep_json_lines(log_dir: Path) -> None:
    """`exp_manager` moves the files of a former run to `run_<n>`; the JSON lines come back, for a
    resumed job continues them.
    """
    runs = sorted(log_dir.glob("run_*"), key=lambda run: int(run.name.removeprefix("run_")))
    for file in runs[-1].glob("*.jsonl") if runs else ():
        if not (log_dir / file.name).exists():
            file.rename(log_dir / file.name)


def build_logger(trainer: Trainer, log_dir: Path) -> CustomLoggerWrapper:
    """TensorBoard / W&B loggers of the trainer and `metrics.jsonl` in `log_dir`."""
    return CustomLoggerWrapper(trainer.loggers, metrics_file=log_dir / "metrics.jsonl")


def build_checkpoint_callback(
    cfg: DictConfig, log_dir: Path, model, optimizer, scheduler
) -> CheckpointCallback:
    """`CheckpointCallback` from `exp_manager.checkpoint_callback_params`."""
    params = cfg.exp_manager.get("checkpoint_callback_params") or {}
    accepted = (
        "filename",
        "monitor",
        "mode",
        "save_top_k",
        "save_nemo_on_train_end",
        "always_save_nemo",
    )
    return CheckpointCallback(
        log_dir,
        model,
        optimizer,
        scheduler,
        name=cfg.exp_manager.get("name") or "model",
        enabled=cfg.exp_manager.get("create_checkpoint_callback", True),
        **{key: params[key] for key in accepted if key in params},
    )


def supervised_max_steps(trainer_cfg: DictConfig, train_dataloader) -> int:
    """Optimizer updates of a job with `trainer.sft` or `trainer.rm`: the horizon of its learning
    rate.

    Raises:
        ConfigError: neither epochs nor steps say when training ends.
    """
    max_epochs, max_steps = trainer_cfg.get("max_epochs", 1), trainer_cfg.get("max_steps", -1)
    limits = [] if max_steps is None or max_steps < 0 else [max_steps]
    if max_epochs is not None:
        limit_batches = trainer_cfg.get("limit_train_batches", 1.0)
        limits.append(
            max_epochs * compute_num_steps_per_epoch(train_dataloader.batch_sampler, limit_batches)
        )
    if not limits:
        raise ConfigError(
            "max_epochs=null needs max_steps: one of them must say when training ends."
        )
    return min(limits)


def load_trainer_state(cfg: DictConfig, ckpt_callback: CheckpointCallback) -> dict | None:
    """Resume as `exp_manager` asks: counters of the checkpoint loaded, or None for a fresh start;
    all ranks call it.

    Raises:
        UserError: `resume_if_exists` without a checkpoint, while `resume_ignore_no_checkpoint` is
            off.
    """
    options = cfg.exp_manager
    if options.get("resume_from_checkpoint"):
        return ckpt_callback.load_latest(options.resume_from_checkpoint)
    if not options.get("resume_if_exists", False):
        return None
    state = ckpt_callback.load_latest()
    if state is None and not options.get("resume_ignore_no_checkpoint", True):
        raise UserError(
            f"exp_manager.resume_if_exists=True, but {ckpt_callback.root} holds no complete "
            "checkpoint; set "
            "exp_manager.resume_ignore_no_checkpoint=True to start afresh."
        )
    return state


def load_and_override_model_config(
    restore_path, model_cfg_to_overwrite: DictConfig, remove_meta_info: bool = True
):
    """Configuration of the model in a `.nemo`, with the values of `model_cfg_to_overwrite` over
    it.

    `overwrite_base_config.<key>=True` drops the base's section `<key>` before, instead of merging
    into it. Where the tokenizer is not given, the file's own is used.
    """
    base = nemo_archive.read_config(nemo_archive.check_restore_path(restore_path))
    overwrite = model_cfg_to_overwrite
    with open_dict(base):
        for section, keys in (overwrite.get("overwrite_base_config") or {}).items():
            for key, drop in (
                keys.items() if isinstance(keys, DictConfig | dict) else [(None, keys)]
            ):
                if drop and key is None:
                    base.pop(section, None)
                elif drop and section in base and base[section] is not None:
                    base[section].pop(key, None)
        if remove_meta_info:
            base.pop("target", None)
            base.pop("nemo_version", None)
    OmegaConf.set_struct(base, False)
    # A null in the script's configuration means "as in the checkpoint" for what describes the
    # network.
    given = OmegaConf.to_container(drop_unset(overwrite), resolve=True)
    return OmegaConf.merge(base, given)


def load_from_nemo(
    cls,
    model_cfg: DictConfig,
    trainer: Trainer,
    strict: bool = True,
    modify_config_fn=None,
    restore_path=None,
    load_base_model_only: bool = False,
    return_updated_cfg: bool = False,
):
    """Build `cls` from `model_cfg` (merged over the file's own by the caller) with the weights of
    a `.nemo`; all ranks call it.

    Args:
        modify_config_fn: `(file_cfg, model_cfg) -> cfg`, NeMo-Aligner's hook for the last word on
            the configuration.
        load_base_model_only: leave weights that `cls.fresh_weights()` names (heads) at their
            initial values even if the file has them.
        return_updated_cfg: return `(model, cfg)`.

    Raises:
        UserError: the path does not exist or does not fit the model.
    """
    restore_path = nemo_archive.check_restore_path(restore_path)
    file_cfg = nemo_archive.read_config(restore_path)
    if modify_config_fn is not None:
        cfg = modify_config_fn(file_cfg, model_cfg)
    else:
        cfg = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(file_cfg)), model_cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("target", None)
    model = cls(cfg, trainer=trainer)
    model.load_nemo_weights(
        restore_path,
        strict=strict,
        missing_ok=cls.fresh_weights(),
        skip=cls.fresh_weights() if load_base_model_only else (),
    )
    logging.info(f"{cls.__name__} restored from {restore_path}")
    return (model, cfg) if return_updated_cfg else model
