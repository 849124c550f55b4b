# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The experiment of a job: its folder, loggers and checkpoints, and where a resumed one goes on."""

import copy
from pathlib import Path

from lightning.pytorch import Trainer
from nemo.utils.exp_manager import exp_manager as nemo_exp_manager
from omegaconf import DictConfig, open_dict

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.training.loggers import CustomLoggerWrapper


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
