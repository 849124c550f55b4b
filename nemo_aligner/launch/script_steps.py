# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps and helpers of NeMo-Aligner's own scripts, under its names and signatures. The scripts
of this package do not use them: see `launch/experiment.py`.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import hydra
import torch
from lightning.pytorch import Trainer
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from nemo.utils import logging
from omegaconf import DictConfig, open_dict

from nemo_aligner.algorithms.rollout_trainer import updates_of_rollouts
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import read_state
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.launch.experiment import checkpoint_options
from nemo_aligner.launch.processes import JobTrainer, launch_processes, nemo_checkpoint_callback
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.training.schedule import compute_num_steps_per_epoch, supervised_max_steps

COUNTERS = """step consumed_samples epoch iteration ppo_optimization_step
    reinforce_optimization_step""".split()


def init_peft(ptl_model: MegatronGPTModel, updated_cfg: DictConfig) -> None:
    """Set up `peft` of the section `model`; all ranks call it. `UserError`: an unavailable
    scheme.
    """
    peft_cfg = updated_cfg.get("peft")
    scheme = None if peft_cfg is None else peft_cfg.get("peft_scheme")
    model_init: Callable[[Any], None] | None = getattr(ptl_model, "init_peft", None)
    if model_init is not None:
        model_init(peft_cfg)
    elif scheme not in (None, "none"):
        raise UserError(
            f"{type(ptl_model).__name__} trains all its weights; set model.peft.peft_scheme=none "
            f"instead of {scheme!r}."
        )


def disable_data_callbacks(
    ptl_model: MegatronGPTModel, train_dataloader: Any, train_ds: Any
) -> None:
    """Keep the training data on the model, as NeMo does (`_train_ds`, `_train_dl`)."""
    ptl_model._train_ds = train_ds
    ptl_model._train_dl = train_dataloader


def init_using_ptl(
    ptl_trainer: Trainer, ptl_model: MegatronGPTModel, train_dataloader: Any, train_ds: Any
) -> None:
    """Set the model up for training and load the checkpoint `ptl_trainer.ckpt_path`, if any; all
    ranks call it, once. The length of the schedule follows from the section of `trainer`.
    `train_dataloader` and `train_ds` are global batches of a supervised job; for PPO and RS the
    dataset of prompts is read; None for a critic.
    """
    launch_processes(ptl_trainer)
    disable_data_callbacks(ptl_model, train_dataloader, train_ds)
    max_steps = _updates(ptl_trainer, ptl_model, train_dataloader, train_ds)
    ptl_model.setup_megatron_optimization(max_steps=max_steps)
    restore_path = getattr(ptl_trainer, "ckpt_path", None)
    if restore_path is not None:
        _callback(ptl_trainer, ptl_model, Path(restore_path).parent).load_latest(restore_path)


def _updates(
    trainer: Trainer, model: MegatronGPTModel, train_dataloader: Any, train_ds: Any
) -> int:
    """Optimizer updates, the horizon of the learning rate. Without a job's configuration as in
    NeMo: `trainer.max_steps`, or `trainer.max_epochs` over the training data.
    """
    section = getattr(trainer, "section", None)
    own = trainer.job_cfg.trainer.get(section) if section else None
    if section in ("rm", "sft", "dpo", "kto", "spin"):
        job = "spin" if section == "spin" else "sft"  # the others have no key of their own here
        return supervised_max_steps(
            complete(own, f"gpt_{job}", f"trainer.{job}"), train_dataloader
        )
    if section in ("ppo", "rs") and train_ds is None:  # a critic
        return int(complete(own, "gpt_ppo_critic", f"trainer.{section}").max_steps)
    if section in ("ppo", "rs", "reinforce"):
        settings = complete(own, f"gpt_{section}_actor", f"trainer.{section}")
        rollout = model.cfg[section]
        if section == "ppo":
            _refuse_keys_of_own_script(rollout, settings)
        steps_per_epoch = len(train_ds) // rollout.num_rollout_samples
        return updates_of_rollouts(section, settings, model.cfg, steps_per_epoch)
    # A trainer of ours did not hand these keys to Lightning.
    given = trainer.job_cfg.trainer if isinstance(trainer, JobTrainer) else trainer
    max_steps, max_epochs = (getattr(given, key, None) for key in ("max_steps", "max_epochs"))
    if max_steps is not None and max_steps >= 0:
        return int(max_steps)
    if train_dataloader is None or not max_epochs or max_epochs < 0:
        raise UserError(
            "the number of optimizer updates of this job is not known: build the trainer with "
            "resolve_and_create_trainer(cfg, section), or give it max_steps."
        )
    return int(max_epochs * compute_num_steps_per_epoch(train_dataloader.batch_sampler))


def _refuse_keys_of_own_script(rollout: DictConfig, settings: DictConfig) -> None:
    """`ConfigError`: a key that NeMo-Aligner's PPO script cannot hand on or whose client it
    lacks.
    """
    estimator = ADVANTAGE_ESTIMATORS[settings.advantage_estimator]
    used = {
        "trainer.ppo.advantage_estimator": not estimator.needs_critic,
        "model.ppo.num_rollouts_per_prompt": rollout.num_rollouts_per_prompt != 1,
        "model.ppo.kl_loss_coef": rollout.kl_loss_coef,
        "trainer.ppo.overlong_buffer_len": settings.overlong_buffer_len,
        "trainer.ppo.teacher_kl_coef": settings.teacher_kl_coef,
    }
    for key, is_used in used.items():
        if is_used:
            raise ConfigError(
                f"{key} does not work in a script of NeMo-Aligner, which does not know it; use "
                "examples/nlp/gpt/train_gpt_ppo_actor.py of this package."
            )


def extract_optimizer_scheduler_from_ptl_model(
    ptl_model: MegatronGPTModel,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Optimizer and schedule of a model; `UserError`: it is not set up for training."""
    if ptl_model._optimizer is None or ptl_model._scheduler is None:
        raise UserError(
            f"{type(ptl_model).__name__} has no optimizer yet; call init_using_ptl, or "
            "model.setup_megatron_optimization(max_steps), first."
        )
    return ptl_model._optimizer, ptl_model._scheduler


class FakeScheduler:
    """A schedule that keeps the learning rate; for models trained without one."""

    last_epoch = 0

    def step(self, increment: int = 1) -> None:
        self.last_epoch += increment

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])


class FakeCheckpointCallback:
    """Writes no checkpoints; a job with `exp_manager.create_checkpoint_callback=False` has it."""

    def custom_save(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""


def add_custom_checkpoint_callback(
    ptl_trainer: Trainer, ptl_model: MegatronGPTModel
) -> CheckpointCallback | FakeCheckpointCallback:
    """Writes checkpoints in the form of this package to the folder of NeMo's own callback."""
    callback = nemo_checkpoint_callback(ptl_trainer)
    if callback is None:
        return FakeCheckpointCallback()
    return _callback(ptl_trainer, ptl_model, Path(callback.dirpath))


def _callback(trainer: Trainer, model: MegatronGPTModel, folder: Path) -> CheckpointCallback:
    optimizer, scheduler = extract_optimizer_scheduler_from_ptl_model(model)
    job_cfg = trainer.job_cfg if isinstance(trainer, JobTrainer) else DictConfig({})
    options = checkpoint_options(job_cfg)
    callback = CheckpointCallback(folder.parent, model, optimizer, scheduler, **options)
    callback.root = folder
    return callback


def custom_save_ckpt_func(
    self: CheckpointCallback,
    trainer: Trainer,
    pl_module: MegatronGPTModel,
    monitor_candidates: dict[str, Any],
    is_train_end: bool = False,
    save_top_only: bool = False,
) -> None:
    """`self.custom_save(...)`; all ranks call it. `save_top_only` has no effect."""
    self.custom_save(monitor_candidates, is_train_end=is_train_end)


def retrieve_custom_trainer_state_dict(ptl_trainer: Trainer) -> dict[str, int] | None:
    """Counters of the checkpoint `ptl_trainer.ckpt_path`, for the trainer's `load_state_dict`;
    None without one. `UserError`: it is no complete checkpoint of this package.
    """
    path = ptl_trainer.ckpt_path
    if path is None:
        return None
    state = read_state(Path(path))
    if state is None:
        raise UserError(
            f"{path} is not a complete checkpoint of this package, to resume from. Start from "
            "its .nemo file (pretrained_checkpoint.restore_from_path) in another folder."
        )
    # A trainer of one's own may give its counters as metrics only.
    counters = state["trainer"] or {
        key: int(state["metrics"][key]) for key in COUNTERS if key in state["metrics"]
    }
    logging.info(f"resuming from {path}: {counters}")
    return {**dict.fromkeys(COUNTERS, 0), **counters}


@contextmanager
def temp_pop_from_config(cfg: DictConfig, name_to_temporarily_remove: str) -> Iterator[None]:
    """Inside, `cfg` is without the key `name_to_temporarily_remove`."""
    with open_dict(cfg):
        value = cfg.pop(name_to_temporarily_remove)
    try:
        yield
    finally:
        with open_dict(cfg):
            cfg[name_to_temporarily_remove] = value


def set_autocast_gpu_dtype(precision: int | str) -> None:
    """Set the dtype of `torch.autocast` on a GPU: 16 is float16, "bf16" bfloat16; others change
    nothing. The models here do not use autocast: `model.precision` sets their dtype.
    """
    dtype = {16: torch.float16, "bf16": torch.bfloat16}.get(precision)
    if dtype is not None:
        torch.set_autocast_dtype("cuda", dtype)


# ----------------------------------------------------------------------------- marks of functions

P = ParamSpec("P")
R = TypeVar("R")


def deprecated_in_version(
    version: str, message: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a call warns (`DeprecationWarning`) that `version` will remove the function."""

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            text = f"{function.__name__} is deprecated; version {version} will not have it."
            warnings.warn(f"{text} {message or ''}".strip(), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return run

    return decorator


def surpress_user_warnings(f: Callable[P, R]) -> Callable[P, R]:
    """Decorator, spelled as in NeMo-Aligner: a call shows no `UserWarning`."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return f(*args, **kwargs)

    return run


def configure_batch_sizes(mbs: int, gbs: int, dp: int = 1) -> None:
    """Tell Megatron the sizes of the next passes, of `gbs` over `dp` data-parallel ranks."""
    reconfigure_num_microbatches_calculator(
        rank=parallel_state.get_rank(),
        rampup_batch_size=None,
        global_batch_size=gbs,
        micro_batch_size=mbs,
        data_parallel_size=dp,
    )


class InferenceMetricsHandler:
    """Metrics by name, each with `update(batch, generation_output)`, `compute() -> float` and
    `reset()`. `metrics_config`: from name to what Hydra makes the metric of (`_target_`, ...), or
    None.
    """

    def __init__(self, metrics_config: DictConfig | dict[str, Any] | None) -> None:
        self.metrics: Mapping[str, Any] = hydra.utils.instantiate(metrics_config or {})

    def has_metrics(self) -> bool:
        return len(self.metrics) > 0

    def update(self, batch: Mapping[str, Any], generation_output: Mapping[str, Any]) -> None:
        for metric in self.metrics.values():
            metric.update(batch, generation_output)

    def compute(self) -> dict[str, float]:
        return {name: metric.compute() for name, metric in self.metrics.items()}

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()
