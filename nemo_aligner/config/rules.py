# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of a configuration cannot work, alone or together: functions over plain values,
which raise `ConfigError`. The rules of one job stand with its keys, in `jobs/`.
"""

import importlib.util
import os
from collections.abc import Mapping

from omegaconf import DictConfig

from nemo_aligner.config import data_rules, parallel_rules
from nemo_aligner.config.defaults import complete_config, model_fallback
from nemo_aligner.config.fields import RESTORE_KEY, Configuration, tree_of
from nemo_aligner.config.inert_keys import check_later, refuse_values
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.keys.common import PARAMS
from nemo_aligner.config.optim_rules import check_optim
from nemo_aligner.config.peft_rules import check_peft
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import ConfigError

EVERY_CHECKPOINT = "every_checkpoint"  # a value of `model.save_hf`

LOGGERS = {
    f"exp_manager.create_{package}_logger": package
    for package in ("wandb", "mlflow", "dllogger", "clearml", "neptune")
}
SECTIONS = {name: job.algo for name, job in JOBS.items() if job.algo}
PREFIX_DATA_JOBS = tuple(
    name for name, job in JOBS.items() if "model.data.data_prefix" in job.keys
)
RESTORE_KEYS = {  # key that names the weights a job starts from, if it is another than this one
    name: job.restore_key for name, job in JOBS.items() if job.restore_key != RESTORE_KEY
}


def config_name_of(cfg: DictConfig) -> str | None:
    """The job of `CONFIG_NAMES` that a whole configuration is for; None if of none."""
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
    return JOBS[config_name].restore_key


def check_values(
    cfg: DictConfig | dict,
    config_name: str,
    *,
    complete: bool,
    visible_devices: int | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Refuse values that cannot work, alone or together: `ConfigError` with the value and the
    remedy. Keys that are absent have their defaults.

    Args:
        complete: True once `cfg.model` holds the checkpoint's values too. Before that, checks that
            need the data-parallel size run only if the parallel sizes are given.
        visible_devices: GPUs of this machine; None asks PyTorch.
        env: environment variables; None: those of this process.
    """
    values, job = Values(resolved(complete_config(cfg, config_name))), JOBS[config_name]
    check_keys_alone(values, config_name)
    accelerator, devices = values.get("trainer.accelerator"), values.get("trainer.devices")
    if visible_devices is None:
        visible_devices = 0 if accelerator == "cpu" else parallel_rules.cuda_devices()
    parallel_rules.check_accelerator(accelerator, devices, visible_devices)
    if values.get("trainer.precision") is not None:
        parallel_rules.dtype_name(values.get("trainer.precision"))
    own_gpus = visible_devices if accelerator != "cpu" else 0
    ranks = parallel_rules.count_ranks(devices, values.get("trainer.num_nodes"), own_gpus, env)
    trains_from_scratch = _check_start(values, config_name)
    refuse_values(values)
    if not complete:  # what the user wrote; a checkpoint's own data may have been of such a form
        check_later(values, config_name)

    complete = complete or trains_from_scratch
    base = str(values.get(job.restore_key))
    is_unsplit = os.path.isfile(os.path.join(base, "config.json"))  # a Hugging Face folder
    dp = parallel_rules.parallel_factor(values, ranks, complete, is_unsplit)
    if complete:
        parallel_rules.check_architecture(values.get("model"), fixed=not trains_from_scratch)
    parallel_rules.check_recomputation(values, complete)
    embedding = "position_embedding_type"
    if values.get(f"model.{embedding}", model_fallback(embedding)) == "learned_absolute":
        values.at_most("model.encoder_seq_length", "model.max_position_embeddings")
    for key, package in LOGGERS.items():
        if values.get(key) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key}=True needs the package {package}, which is not installed; install it."
            )
    if job.algo:
        saving = (f"{PARAMS}.async_save", f"{PARAMS}.always_save_nemo", "model.save_hf")
        check_saving(*(values.get(key) for key in saving))
        check_peft(values)
        if trains_from_scratch:
            values.refuse(
                f"""model.peft.peft_scheme!=none | trains adapters of a checkpoint; name it in
                {job.restore_key}, or train all weights (peft_scheme=none)"""
            )
        _check_training(values, job, dp)
    values.refuse(job.rules, OWN=f"model.{job.algo}")
    job.check(values, dp, ranks)


def check_saving(async_save: object, always_save_nemo: object, save_hf: object) -> None:
    """Refuse an unknown `model.save_hf`, and files that are written beside each checkpoint written
    in the background.
    """
    section = {"async_save": async_save, "always_save_nemo": always_save_nemo}
    given = {f"{PARAMS}.{key}": value for key, value in section.items()}
    v = Values(tree_of(given | {"model.save_hf": save_hf}))
    v.choice("model.save_hf", (True, False, EVERY_CHECKPOINT))
    v.refuse(
        """PARAMS.async_save & PARAMS.always_save_nemo or model.save_hf=every_checkpoint | writes
        in the background, but {} has the job wait for a file; leave one of the two out""",
        PARAMS=PARAMS,
    )


_DYNAMIC_RULES = """
TOKENS & model.LOSS or model.ppo.LOSS or model.rs.LOSS or model.reinforce.LOSS | SIMILAR, but {}
    depends on which samples share one; use token or sequence, or set TOKENS=null
TOKENS & model.num_moe_experts & model.moe_aux_loss_coeff or model.moe_z_loss_coeff | SIMILAR,
    but the loss of {} depends on which samples share one; set one of them to null
"""


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
    key, job = restore_key(config_name), JOBS[config_name]
    restore = values.get(key)
    serves_a_function = values.has("inference.reward_fn")
    if restore is not None or (config_name == "inference_rm" and serves_a_function):
        return False
    if not job.from_scratch:
        raise ConfigError(f"{key} is not set; give the .nemo file or folder to start from.")
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "tokenizer.library")
    missing = [f"model.{name}" for name in sizes if not values.has(f"model.{name}")]
    if missing:
        raise ConfigError(
            f"{key} is not set, so the model starts from random weights, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set either; name a "
            "checkpoint or give the architecture."
        )
    return True


def _check_training(values: Values, job: Configuration, dp: dict[str, int]) -> None:
    times = dp | parallel_rules.virtual_pipeline_group(values)
    values.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    values.refuse(
        _DYNAMIC_RULES,
        TOKENS="model.dynamic_micro_batch_tokens",
        LOSS="loss_reduction=microbatch",
        SIMILAR="makes micro-batches of similar samples",
    )
    check_optim(values.get("model.optim", {}))
    if "model.data.data_prefix" not in job.keys:  # others may have it from a checkpoint
        return
    values.at_most("model.data.seq_length", "model.encoder_seq_length")
    data_rules.plain_columns(values.get("model.data.columns"))
    data_impl, files = values.get("model.data.data_impl"), values.get("model.data.data_prefix")
    in_chunks = data_impl == "chunked_jsonl" and values.get("model.knowledge_distillation")
    if data_impl is not None and not in_chunks:
        data_rules.check_data_impl(data_impl)
    data_rules.check_chat(values.get("model.data", {}))
    if not files:
        raise ConfigError(
            "model.data.data_prefix is not set; give the data files, for example "
            "'model.data.data_prefix={train: [train.jsonl], validation: [val.jsonl]}'."
        )
    if isinstance(files, Mapping):
        data_rules.check_parts(files)


def why_nothing_is_kept(values: Values, config_name: str) -> str | None:
    """The setting by which a job that trains leaves no checkpoint and no model behind, if any."""
    if config_name not in SECTIONS or config_name == "gpt_ppo_critic":  # saves with the actor
        return None
    if values.get("exp_manager.create_checkpoint_callback") is False:
        return "exp_manager.create_checkpoint_callback=False"
    key = f"trainer.{SECTIONS[config_name]}.save_interval"
    interval = values.get(key, 1)
    return f"{key}={interval}" if interval <= 0 else None
