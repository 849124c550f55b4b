# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The experiment of a job: its folder, loggers and checkpoints, and the state it resumes from."""

import copy
import datetime
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from nemo.utils import exp_manager as nemo
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.checksums import write_durably
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.made_from import MadeFrom, made_from
from nemo_aligner.checkpoint.sources import Source, open_source
from nemo_aligner.config.access import shown_config, shown_url, shown_word
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.fields import fields_of
from nemo_aligner.config.inert_keys import INERT_EXPERIMENT
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.keys.common import PARALLEL, CheckpointParams
from nemo_aligner.config.rules import LOGGERS, SECTIONS, check_values, config_name_of, restore_key
from nemo_aligner.config.schema import LIVE
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.endings import keep_ending_in
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch import processes
from nemo_aligner.launch.job_entry import EXAMPLES
from nemo_aligner.launch.model_loading import Model, complete_model_config, load_from_nemo
from nemo_aligner.launch.start_up import is_verbose, remarks, versions
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.parallel.megatron_switches import changed
from nemo_aligner.training.loggers import PROMETHEUS_KEY, CustomLoggerWrapper, PrometheusLogger
from nemo_aligner.training.schedule import Timer

CHAT_DATE = "chat_date.txt"
SHOWN = [  # keys that the log begins with
    "trainer.ppo.advantage_estimator",
    *(f"trainer.{section}.reward_fn" for section in dict.fromkeys(SECTIONS.values())),
    *dict.fromkeys(job.restore_key for job in JOBS.values()),
    *("inference.reward_fn", "model.data.data_prefix"),
    *(f"{section}.file_path" for section in EXAMPLES),
    *(f"trainer.{name}" for name in "num_nodes devices accelerator precision".split()),
    *PARALLEL,
]


@dataclass(frozen=True)
class Experiment:
    """What every training job starts with."""

    section: str  # of `cfg.trainer`, with the job's own settings, such as "ppo"
    trainer: processes.JobTrainer  # it knows the ranks
    log_dir: Path | None  # the folder of the experiment; None with `exp_manager=null`
    logger: CustomLoggerWrapper  # metrics go to TensorBoard, W&B and `metrics.jsonl`


def start_processes(cfg: DictConfig, config_name: str) -> processes.JobTrainer:
    """Resolve and log `cfg`, of a job without experiment, start and join processes; all ranks call
    it.
    """
    trainer = processes.resolve_and_create_trainer(cfg)
    log_config(cfg, config_name)
    processes.launch_processes(trainer)
    return trainer


def start_with_teacher(cfg: DictConfig, config_name: str, model_class: type[Model]) -> Any:
    """`start_processes`, and the model that such a job gets from its `pretrained_checkpoint`."""
    base = open_source(cfg.pretrained_checkpoint.restore_from_path)
    cfg.model = complete_model_config(base, cfg.model, config_name)
    check_values(cfg, config_name, complete=True)
    trainer = start_processes(cfg, config_name)
    return load_from_nemo(model_class, cfg.model, trainer, restore_path=base)


def start_with_model(cfg: DictConfig, model_class: type[Model]) -> tuple[Experiment, Model]:
    """`start_from` the checkpoint that `cfg` names, if any."""
    return start_from(open_base(cfg), cfg, model_class)


def open_base(cfg: DictConfig) -> Source | None:
    """The checkpoint that a job starts from; None: random weights. Completes `cfg.model`."""
    config_name = str(config_name_of(cfg))
    path = OmegaConf.select(cfg, restore_key(config_name))
    base = None if path is None else open_source(path)
    cfg.model = complete_model_config(base, cfg.model, config_name)
    return base


def start_from(
    base: Source | None, cfg: DictConfig, model_class: type[Model], with_new_head: bool = False
) -> tuple[Experiment, Model]:
    """`start_processes` of a training job, whose folder and loggers are made before, and the model
    that it trains, with its adapters; every rank calls it. `base` and `cfg` are of `open_base`;
    `with_new_head` leaves a head in `base` out.
    """
    config_name = str(config_name_of(cfg))
    section = SECTIONS[config_name]
    trainer = processes.resolve_and_create_trainer(cfg, section)
    log_config(cfg, config_name)
    log_dir = setup_experiment(trainer, cfg)
    job = Experiment(section, trainer, log_dir, build_logger(trainer, log_dir))
    processes.launch_processes(trainer)
    fix_chat_date(cfg.model.get("data"), log_dir)
    if log_dir is not None and is_rank_zero():
        _write_config(cfg, log_dir)  # again, with that date
    if base is None:
        model = model_class(cfg.model, trainer)
    else:
        model = load_from_nemo(
            model_class, cfg.model, trainer, restore_path=base, load_base_model_only=with_new_head
        )
    model.init_peft(cfg.model.peft)
    return job, model


def fix_chat_date(data: DictConfig | None, log_dir: Path | None) -> None:
    """Set `chat_date` of `model.data`, the day that chat templates take for today, to that of the
    run's first start, or the one given last, which its folder keeps; all ranks call it.
    """
    if data is None or "chat_date" not in data:
        return
    date = data.chat_date
    with failing_together(log_dir and log_dir / CHAT_DATE):
        if is_rank_zero():
            file = Path(log_dir or os.devnull) / CHAT_DATE
            # Former releases have let NeMo move it, as that of a run before.
            moved = sorted(file.parent.glob(f"run_*/{CHAT_DATE}"), key=os.path.getmtime)
            found = [each for each in (*moved, file) if each.exists()]
            kept = found[-1].read_text() if found else None
            date = str(date or kept or datetime.date.today())
            if log_dir is not None and date != kept:
                write_durably(file, date.encode())
    data.chat_date = gathered(date)[0]


def log_config(cfg: DictConfig, config_name: str) -> None:
    """Log the `overview`; with NEMO_ALIGNER_VERBOSE the whole configuration."""
    shown = OmegaConf.create(shown_config(plain_dict(cfg)))
    if is_verbose():
        logging.info(f"\n\n*** configuration ***\n{OmegaConf.to_yaml(shown)}")
    logging.info(overview(shown, config_name))
    logging.info(f"CPU threads of each rank: {torch.get_num_threads()} (OMP_NUM_THREADS)")


def overview(cfg: DictConfig, config_name: str) -> str:
    """What is trained or served, from what, on what data and devices."""
    own = {key: OmegaConf.select(cfg, key) for key in SHOWN if key in LIVE[config_name]}
    given = [
        f"{key}={value}"
        for key, value in own.items()
        if value is not None and (key not in PARALLEL or value != 1)
    ]
    return f"{config_name}: {', '.join(given)}"


def run_timer(cfg: DictConfig) -> Timer:
    return Timer(None if cfg.exp_manager is None else cfg.exp_manager.max_time_per_run)


def setup_experiment(trainer: Trainer, cfg: DictConfig) -> Path | None:
    """Make the log folder, which it returns, and the loggers with NeMo's `exp_manager`, which does
    not see keys of checkpoints, resuming and time limits, nor move the files of former runs (those
    of metrics go on); every rank calls it. None with `exp_manager=null`. `UserError`: the folder
    cannot be written, or a logger cannot be set up.
    """
    if cfg.exp_manager is None:
        return None
    options = copy.deepcopy(cfg.exp_manager)
    asked = [key for key in LOGGERS if options.get(key.partition(".")[2])]
    with open_dict(options):
        options.create_mlflow_logger = False
        options.create_checkpoint_callback = False
        options.resume_if_exists = False
        options.resume_from_checkpoint = None
        options.max_time_per_run = None
        options.seconds_to_sleep = 0
        for key in ("checkpoint_callback_params", PROMETHEUS_KEY, *INERT_EXPERIMENT):
            options.pop(key.removeprefix("exp_manager."), None)
    try:
        with changed([(nemo, "check_resume", lambda *_arguments: None)]):
            log_dir = Path(nemo.exp_manager(trainer, options))
        if "exp_manager.create_mlflow_logger" in asked:
            trainer.loggers = [*trainer.loggers, _mlflow_logger(options, log_dir)]
        if asked and is_rank_zero():
            for logger in trainer.loggers:
                getattr(logger, "experiment", None)  # it begins: a server is known to answer
    except Exception as error:  # libraries of loggers have classes of their own
        key = "explicit_log_dir" if options.get("explicit_log_dir") else "name"
        if isinstance(error, OSError) and (error.filename or not asked):
            raise UserError(
                f"the log folder of exp_manager.{key}={options.get(key)} cannot be written: "
                f"{error}; give another one."
            ) from error
        if not asked:
            raise
        reason = shown_url(str(error).partition("\n")[0][:200])
        raise UserError(
            f"a logger cannot be set up: {type(error).__name__}: {reason}\nCorrect its keys in "
            f"exp_manager, or leave it out ({', '.join(asked)})."
        ) from error
    if is_rank_zero():
        from nemo_aligner.report.page import ABOUT_FILE

        address = cfg.exp_manager.get(PROMETHEUS_KEY)
        if address is not None:
            trainer.loggers = [*trainer.loggers, PrometheusLogger(address)]
        # In place of NeMo's file, which holds secrets.
        words = [shown_word(word) for word in sys.argv]
        (log_dir / "cmd-args.log").write_text(" ".join(words))
        is_command = Path(words[0]).stem in ("__main__", "nemo-aligner")
        program = ["nemo-aligner"] if is_command else ["python", words[0]]
        command = shlex.join(program + words[1:])
        about = {"job": config_name_of(cfg), "command": command, "versions": versions()}
        (log_dir / ABOUT_FILE).write_text(json.dumps(about, indent=1))
        _write_config(cfg, log_dir)
        remarks.write_to(log_dir)
        logging.info(f"results: {log_dir.absolute()}, with the configuration in config.yaml")
    keep_ending_in(log_dir, is_rank_zero())
    return log_dir


def _mlflow_logger(options: DictConfig, log_dir: Path) -> MLFlowLogger:
    """MLflow's logger, which NeMo calls with a name twice. Without `tracking_uri` or the address
    in the environment it writes into the folder `mlruns` of the experiment.
    """
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses folders else
    given = OmegaConf.to_object(options).get("mlflow_logger_kwargs") or {}
    names = {"experiment_name": options.get("name") or log_dir.name, "run_name": log_dir.name}
    defaults = {**names, "save_dir": str(log_dir.absolute() / "mlruns")}
    known = {key: value for key, value in given.items() if value is not None}
    return MLFlowLogger(**{**defaults, **known})


def _write_config(cfg: DictConfig, log_dir: Path) -> None:
    shown = OmegaConf.create(shown_config(plain_dict(cfg)))
    OmegaConf.save(shown, log_dir / "config.yaml")


def build_logger(trainer: Trainer, log_dir: Path | None) -> CustomLoggerWrapper:
    """TensorBoard and W&B loggers, and `metrics.jsonl` and `report.html` in `log_dir`, if any."""
    if log_dir is None or not is_rank_zero():
        return CustomLoggerWrapper(trainer.loggers)
    from nemo_aligner.report.ending import LiveReport  # of one rank

    file, report = log_dir / "metrics.jsonl", LiveReport(log_dir)
    return CustomLoggerWrapper(trainer.loggers, metrics_file=file, report=report.update)


def build_checkpoint_callback(
    cfg: DictConfig,
    log_dir: Path | None,
    model: MegatronGPTModel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    made_from: MadeFrom | None = None,
    has_validation: bool = True,
) -> CheckpointCallback:
    """By `checkpoint_options`; without a `log_dir` it neither writes nor finds a checkpoint."""
    given = checkpoint_options(cfg)
    if not has_validation:
        if str(given.get("monitor")).startswith("val_"):
            given["monitor"] = None
        if "filename" in given:
            given["filename"] = re.sub(r"-?\{val_[^{}]*\}", "", given["filename"])
    return CheckpointCallback(
        os.devnull if log_dir is None else log_dir,  # no folder can be below os.devnull
        model,
        optimizer,
        scheduler,
        enabled=log_dir is not None and cfg.exp_manager.get("create_checkpoint_callback", True),
        made_from=made_from,
        **given,
    )


def checkpoint_options(cfg: DictConfig) -> dict[str, Any]:
    """The arguments of `CheckpointCallback` in a configuration."""
    options = cfg.get("exp_manager") or {}
    params = options.get("checkpoint_callback_params") or {}
    known = [name for name, key in fields_of(CheckpointParams).items() if key.get("acts", True)]
    return {
        "name": options.get("name") or "model",
        "save_hf": (cfg.get("model") or {}).get("save_hf"),
        **{key: params[key] for key in known if params.get(key) is not None},
    }


def set_up_training(
    cfg: DictConfig,
    job: Experiment,
    model: MegatronGPTModel,
    max_steps: int,
    train: Any = None,
    has_validation: bool = True,
) -> dict[str, Any]:
    """What every trainer gets, by the names of its arguments; logs the configuration. All ranks
    call it. `max_steps` is the horizon of the schedule, `train` a loader of the training data.
    """
    settings = cfg.trainer[job.section]
    if not has_validation:
        logging.info("no validation data: nothing is validated, and the newest checkpoints stay")
    has_validation &= settings.get("val_check_interval", 1) > 0
    has_validation &= settings.get("limit_val_batches", 1) != 0
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=max_steps)
    origin = made_from(cfg, job.section, train)
    ckpt_callback = build_checkpoint_callback(
        cfg, job.log_dir, model, optimizer, scheduler, origin, has_validation
    )
    job.logger.log_hyperparams(shown_config(plain_dict(cfg)))
    return {
        "cfg": settings,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "logger": job.logger,
        "ckpt_callback": ckpt_callback,
    }


def load_trainer_state(cfg: DictConfig, ckpt_callback: CheckpointCallback) -> dict | None:
    """Counters of the loaded checkpoint, or None for a fresh start, as `exp_manager` asks; all
    ranks call it. `UserError`: it must resume, and there is no checkpoint.
    """
    if cfg.exp_manager is None:
        return None
    options = complete(cfg.exp_manager, "gpt_sft", "exp_manager")
    if options.resume_from_checkpoint:
        return ckpt_callback.load_latest(options.resume_from_checkpoint)
    if not options.resume_if_exists:
        return None
    state = ckpt_callback.load_latest()
    if state is None and not options.resume_ignore_no_checkpoint:
        raise processes.no_checkpoint_error(ckpt_callback.root)
    return state
