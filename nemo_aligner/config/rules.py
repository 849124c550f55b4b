# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of a configuration cannot work, alone or together: plain functions over plain
values.

`check_values` knows the rules that jobs share; those of one job stand with its keys, in `jobs/`,
and PPO's in `ppo_rules.py`. Those of devices and architectures are in `parallel_rules.py`, of
policies that generate in `rollout_rules.py`, of servers in `server_rules.py`.
"""

import importlib.util
import os
from collections.abc import Mapping

from omegaconf import DictConfig

from nemo_aligner.config.data_rules import (
    check_chat,
    check_data_impl,
    check_labels_can_be_read,
    check_parts,
    plain_columns,
)
from nemo_aligner.config.defaults import complete_config, model_fallback
from nemo_aligner.config.fields import RESTORE_KEY
from nemo_aligner.config.inert_keys import check_later, refuse_model_values
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.optim_rules import check_optim
from nemo_aligner.config.parallel_rules import (
    check_accelerator,
    check_architecture,
    check_recomputation,
    count_ranks,
    cuda_devices,
    dtype_name,
    parallel_factor,
    virtual_pipeline_group,
)
from nemo_aligner.config.peft_rules import check_peft, trains_adapters
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import ConfigError

EVERY_CHECKPOINT = "every_checkpoint"  # a value of `model.save_hf`

# The optional loggers of `exp_manager`, with the package that each needs.
LOGGERS = {
    f"exp_manager.create_{package}_logger": package
    for package in ("wandb", "mlflow", "dllogger", "clearml", "neptune")
}
# Section of `trainer` that holds a job's own settings.
SECTIONS = {name: job.algo for name, job in JOBS.items() if job.algo}
# Jobs that read `model.data.data_prefix`.
PREFIX_DATA_JOBS = tuple(
    name for name, job in JOBS.items() if "model.data.data_prefix" in job.keys
)
RESTORE_KEYS = {  # key that names the weights a job starts from, if it is another than this one
    name: job.restore_key for name, job in JOBS.items() if job.restore_key != RESTORE_KEY
}


def config_name_of(cfg: DictConfig) -> str | None:
    """Which job of `CONFIG_NAMES` a whole configuration is for; None if it has none of their
    sections, so that it is no whole one or is for something else.
    """
    if "rm_model_file" in cfg:
        return "inference_rm"
    trainer = cfg.get("trainer") or {}
    job = next((job for job, name in SECTIONS.items() if name in trainer), None)
    return "gpt_ppo_critic" if job == "gpt_ppo_actor" and "remote_critic_rm" not in cfg else job


def job_of_model(model_cfg: DictConfig) -> str | None:
    """Which job of `CONFIG_NAMES` `model_cfg` is the section `model` of; None if of none."""
    job = model_cfg._get_root()
    is_section = isinstance(job, DictConfig) and job._get_node("model") is model_cfg
    return config_name_of(job) if is_section else None


def restore_key(config_name: str) -> str:
    """Key that names the weights that a job starts from."""
    return JOBS[config_name].restore_key


def check_values(
    cfg: DictConfig | dict,
    config_name: str,
    *,
    complete: bool,
    visible_devices: int | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Refuse values that cannot work, alone or together. Keys that are absent have their defaults.

    Args:
        cfg: the configuration of a job.
        complete: True once `cfg.model` holds the checkpoint's values too. Before that, checks that
            need the data-parallel size run only if the parallel sizes are given.
        visible_devices: GPUs of this machine; None asks PyTorch.
        env: environment variables; None: those of this process.

    Raises:
        ConfigError: with the value and the remedy.
    """
    values, job = Values(resolved(complete_config(cfg, config_name))), JOBS[config_name]
    check_keys_alone(values, config_name)
    accelerator, devices = values.get("trainer.accelerator"), values.get("trainer.devices")
    if visible_devices is None:
        visible_devices = 0 if accelerator == "cpu" else cuda_devices()
    check_accelerator(accelerator, devices, visible_devices)
    if values.get("trainer.precision") is not None:
        dtype_name(values.get("trainer.precision"))
    own_gpus = visible_devices if accelerator != "cpu" else 0
    ranks = count_ranks(devices, values.get("trainer.num_nodes"), own_gpus, env)
    trains_from_scratch = _check_start(values, config_name)
    refuse_model_values(values)
    if not complete:  # what the user wrote; a checkpoint's own data may have been of such a form
        check_later(values, config_name)

    complete = complete or trains_from_scratch
    base = str(values.get(job.restore_key))
    is_unsplit = os.path.isfile(os.path.join(base, "config.json"))  # a Hugging Face folder
    dp = parallel_factor(values, ranks, complete, is_unsplit)
    if complete:
        check_architecture(values.get("model"), fixed=not trains_from_scratch)
    check_recomputation(values, complete)
    length, positions = (
        values.get(f"model.{name}") for name in ("encoder_seq_length", "max_position_embeddings")
    )
    name = "position_embedding_type"
    learned = values.get(f"model.{name}", model_fallback(name)) == "learned_absolute"
    if length and positions and learned and positions < length:
        raise ConfigError(
            f"model.max_position_embeddings={positions} is smaller than "
            f"model.encoder_seq_length={length}; set it to {length}."
        )
    for key, package in LOGGERS.items():
        if values.get(key) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key}=True needs the package {package}, which is not installed; install it, or "
                "set the key to False (metrics.jsonl and report.html need no package)."
            )
    if job.algo:
        check_save_hf(values.get("model.save_hf"))
        check_peft(values)
        if trains_from_scratch and trains_adapters(values.tree):
            raise ConfigError(
                "model.peft.peft_scheme=lora trains adapters of a checkpoint; name it in "
                f"{job.restore_key}, or train all weights (peft_scheme=none)."
            )
        _check_training(values, config_name, dp)
    job.check(values, dp, ranks)


def check_save_hf(save_hf: object) -> None:
    """Raise `ConfigError` unless `save_hf` is a value of `model.save_hf`."""
    if save_hf not in (None, False, True, EVERY_CHECKPOINT):
        raise ConfigError(
            f"model.save_hf={save_hf!r} is not supported; use True, False or {EVERY_CHECKPOINT}."
        )


def check_async_save(async_save: object, always_save_nemo: object, save_hf: object) -> None:
    """Raise `ConfigError` if checkpoints are to be written in the background, and beside every one
    of them what is written from the weights in memory.
    """
    beside = {
        "exp_manager.checkpoint_callback_params.always_save_nemo=True": bool(always_save_nemo),
        f"model.save_hf={EVERY_CHECKPOINT}": save_hf == EVERY_CHECKPOINT,
    }
    for setting, is_set in beside.items():
        if async_save and is_set:
            raise ConfigError(
                "exp_manager.checkpoint_callback_params.async_save=True writes checkpoints while "
                f"the job goes on, but with {setting} the job waits for a file beside each of "
                "them; leave one of the two out."
            )


def check_dynamic_micro_batches(values: Values) -> None:
    """Raise `ConfigError` if `model.dynamic_micro_batch_tokens` would share samples out to other
    micro-batches than a loss is defined by.
    """
    tokens = "model.dynamic_micro_batch_tokens"
    if values.get(tokens) is None:
        return
    fixed = f"{tokens}={values.get(tokens)} makes micro-batches of similar samples, but"
    for key in (f"model.{section}loss_reduction" for section in ("", "ppo.", "rs.", "reinforce.")):
        if values.get(key) == "microbatch":
            raise ConfigError(
                f"{fixed} {key}=microbatch depends on which samples share one; use token or "
                f"sequence, or set {tokens}=null."
            )
    for key in ("model.moe_aux_loss_coeff", "model.moe_z_loss_coeff"):
        if values.get("model.num_moe_experts") and values.get(key):
            raise ConfigError(
                f"{fixed} the loss of {key}={values.get(key)} depends on which samples share one; "
                "set one of them to null."
            )


def check_keys_alone(values: Values, config_name: str) -> None:
    """Raise `ConfigError` where a key has a value that it cannot have, whatever the others are."""
    has_adapters = values.get("model.peft.peft_scheme") not in (None, "none")
    for key in JOBS[config_name].keys.values():
        is_unused = key.name.startswith("model.peft.lora_tuning.") and not has_adapters
        if not (is_unused and values.is_null(key.name)):
            key.check(values)


def _check_start(values: Values, config_name: str) -> bool:
    """Check the weights that the job starts from; returns whether they are random."""
    if config_name == "evaluate":  # it may have responses in place of a policy
        return False
    key = restore_key(config_name)
    restore = values.get(key)
    if restore is not None and not os.path.exists(str(restore)):
        raise ConfigError(
            f"{key}={restore} does not exist; give the path of a .nemo file or folder."
        )
    serves_a_function = values.get("inference.reward_fn") is not None
    if restore is not None or (config_name == "inference_rm" and serves_a_function):
        return False
    if not JOBS[config_name].from_scratch:
        raise ConfigError(
            f"{key} is not set; give the path of the .nemo file or folder to start from."
        )
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "tokenizer.library")
    missing = [f"model.{name}" for name in sizes if values.get(f"model.{name}") is None]
    if missing:
        raise ConfigError(
            f"{key} is not set, so the model starts from random weights, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set either; name a "
            "checkpoint or give the architecture."
        )
    return True


def _check_training(values: Values, config_name: str, dp: dict[str, int]) -> None:
    """What all jobs that train have in common."""
    times = dp | virtual_pipeline_group(values)
    values.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    check_dynamic_micro_batches(values)
    check_optim(values.get("model.optim", {}))
    if values.get("exp_manager") is not None:
        params = "exp_manager.checkpoint_callback_params"
        check_async_save(
            values.get(f"{params}.async_save"),
            values.get(f"{params}.always_save_nemo"),
            values.get("model.save_hf"),
        )
    if config_name in PREFIX_DATA_JOBS:
        _check_prefix_data(values)


def why_nothing_is_kept(values: Values, config_name: str) -> str | None:
    """The setting by which a job that trains leaves no checkpoint and no model behind, if any."""
    if config_name not in SECTIONS or config_name == "gpt_ppo_critic":  # saves with the actor
        return None
    if values.get("exp_manager.create_checkpoint_callback") is False:
        return "exp_manager.create_checkpoint_callback=False"
    key = f"trainer.{SECTIONS[config_name]}.save_interval"
    interval = values.get(key, 1)
    return f"{key}={interval}" if interval <= 0 else None


def _check_prefix_data(values: Values) -> None:
    """What the jobs that read `model.data.data_prefix` have in common. The others may have got
    such keys from a checkpoint.
    """
    values.at_most("model.data.seq_length", "model.encoder_seq_length")
    plain_columns(values.get("model.data.columns"))
    data_impl = values.get("model.data.data_impl")
    in_chunks = data_impl == "chunked_jsonl" and values.get("model.knowledge_distillation")
    if data_impl is not None and not in_chunks:
        check_data_impl(data_impl)
        if values.get("model.reward_model_type") == "regression":
            check_labels_can_be_read(data_impl)
    check_chat(values.get("model.data", {}))
    if not values.get("model.data.data_prefix"):
        raise ConfigError(
            "model.data.data_prefix is not set; give the data files, for example "
            "'model.data.data_prefix={train: [train.jsonl], validation: [val.jsonl], test: "
            "[val.jsonl]}'."
        )
    if isinstance(values.get("model.data.data_prefix"), Mapping):
        check_parts(values.get("model.data.data_prefix"))
