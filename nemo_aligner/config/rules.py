# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of a configuration cannot work, alone or together: plain functions over plain
values.

`check_values` knows the rules of every job. Those of devices and architectures are in
`parallel_rules.py`, of policies that generate in `rollout_rules.py` and `ppo_rules.py`, of servers
in `server_rules.py`.
"""

import importlib.util
import os
from collections.abc import Mapping

from omegaconf import DictConfig

from nemo_aligner.config.command_rules import (
    check_generation_command,
    check_topk_logits,
)
from nemo_aligner.config.data_rules import (
    check_chat,
    check_data_impl,
    check_labels_can_be_read,
    check_packed,
    check_parts,
    check_prompts_can_be_read,
    holds_tokens,
    plain_columns,
)
from nemo_aligner.config.defaults import complete_config, model_fallback
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.model_keys import refuse_model_values
from nemo_aligner.config.old_forms import check_later
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
from nemo_aligner.config.ppo_rules import check_ppo_actor
from nemo_aligner.config.rollout_rules import (
    check_on_policy,
    check_reinforce_actor,
    check_rs_actor,
    check_spin,
)
from nemo_aligner.config.schema import COMMAND_NAMES
from nemo_aligner.config.server_rules import (
    check_critic_server,
    check_reward_server,
    check_teacher_server,
)
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
# Key that names the weights a job starts from.
RESTORE_KEYS = {"gpt_sft": "model.restore_from_path", "inference_rm": "rm_model_file"}
RESTORE_KEY = "pretrained_checkpoint.restore_from_path"  # of all others


def config_name_of(cfg: DictConfig) -> str | None:
    """Which job of `CONFIG_NAMES` a whole configuration is for; None if it has none of their
    sections, so that it is no whole one or is for something else.
    """
    if "rm_model_file" in cfg:
        return "inference_rm"
    trainer = cfg.get("trainer")
    sections = [name for name in SECTIONS.values() if trainer is not None and name in trainer]
    if "ppo" in sections:
        return "gpt_ppo_actor" if "remote_critic_rm" in cfg else "gpt_ppo_critic"
    return next((job for job, name in SECTIONS.items() if name in sections), None)


def job_of_model(model_cfg: DictConfig) -> str | None:
    """Which job of `CONFIG_NAMES` `model_cfg` is the section `model` of; None if of none."""
    job = model_cfg._get_root()
    is_section = isinstance(job, DictConfig) and job._get_node("model") is model_cfg
    return config_name_of(job) if is_section else None


def restore_key(config_name: str) -> str:
    """Key that names the weights that a job starts from."""
    return RESTORE_KEYS.get(config_name, RESTORE_KEY)


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
    values = Values(resolved(complete_config(cfg, config_name)))
    check_keys_alone(values, config_name)
    ranks = _check_devices(values, visible_devices, env)
    trains_from_scratch = _check_start(values, config_name)
    refuse_model_values(values)
    if not complete:  # what the user wrote; a checkpoint's own data may have been of such a form
        check_later(values, config_name)

    complete = complete or trains_from_scratch
    base = str(values.get(restore_key(config_name)))
    is_unsplit = os.path.isfile(os.path.join(base, "config.json"))  # a Hugging Face folder
    dp = parallel_factor(values, ranks, complete, is_unsplit)
    if complete:
        check_architecture(values.get("model"), fixed=not trains_from_scratch)
    check_recomputation(values, complete)
    _check_sequence_lengths(values)
    for key, package in LOGGERS.items():
        if values.get(key) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key}=True needs the package {package}, which is not installed; install it, or "
                "set the key to False (metrics.jsonl and report.html need no package)."
            )
    if config_name == "inference_rm":
        check_reward_server(values, ranks)
        return
    if config_name == "compute_topk_logits":
        check_topk_logits(values, dp | virtual_pipeline_group(values))
        return
    if config_name == "inference_teacher":
        check_teacher_server(values)
        return
    if config_name in COMMAND_NAMES:
        check_generation_command(values)
        return
    check_save_hf(values.get("model.save_hf"))
    check_peft(values)
    if trains_from_scratch and trains_adapters(values.tree):
        raise ConfigError(
            "model.peft.peft_scheme=lora trains adapters of a checkpoint; name it in "
            f"{restore_key(config_name)}, or train all weights (peft_scheme=none)."
        )
    _check_training(values, config_name, dp)
    if config_name == "gpt_ppo_actor":
        check_ppo_actor(values, dp)
    elif config_name == "gpt_rs_actor":
        check_rs_actor(values, dp)
    elif config_name == "gpt_reinforce_actor":
        check_reinforce_actor(values, dp)
    elif config_name == "gpt_ppo_critic":
        check_critic_server(values)
    elif config_name == "gpt_sft":
        _check_sft(values, dp)
    elif config_name == "gpt_dpo":
        _check_dpo(values)
    elif config_name == "gpt_knowledge_distillation":
        _check_distillation(values)
    elif config_name == "gpt_kto":
        _check_kto(values)
    elif config_name == "gpt_spin":
        check_spin(values, dp)
        _check_sft_data(values, dp, ("validation_ds",))


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
    if not async_save:
        return
    beside = {
        "exp_manager.checkpoint_callback_params.always_save_nemo=True": bool(always_save_nemo),
        f"model.save_hf={EVERY_CHECKPOINT}": save_hf == EVERY_CHECKPOINT,
    }
    for setting, is_set in beside.items():
        if is_set:
            raise ConfigError(
                "exp_manager.checkpoint_callback_params.async_save=True writes checkpoints while "
                f"the job goes on, but with {setting} the job waits for a file beside each of "
                "them; leave one of the two out."
            )


def check_dynamic_micro_batches(values: Values) -> None:
    """Raise `ConfigError` if `model.dynamic_micro_batch_tokens` would share samples out to other
    micro-batches than a loss is defined by.
    """
    tokens = values.get("model.dynamic_micro_batch_tokens")
    if tokens is None:
        return
    fixed = (
        f"model.dynamic_micro_batch_tokens={tokens} makes micro-batches of similar samples, but"
    )
    for key in (f"model.{section}loss_reduction" for section in ("", "ppo.", "rs.", "reinforce.")):
        if values.get(key) == "microbatch":
            raise ConfigError(
                f"{fixed} {key}=microbatch depends on which samples share one; use token or "
                "sequence, or set model.dynamic_micro_batch_tokens=null."
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


def _check_devices(
    values: Values, visible_devices: int | None, env: Mapping[str, str] | None
) -> int:
    """Check `trainer.accelerator`, `devices` and `precision`; returns the number of ranks."""
    accelerator, devices = values.get("trainer.accelerator"), values.get("trainer.devices")
    nodes = values.size("trainer.num_nodes")
    if visible_devices is None:
        visible_devices = 0 if accelerator == "cpu" else cuda_devices()
    check_accelerator(accelerator, devices, visible_devices)
    if values.get("trainer.precision") is not None:
        dtype_name(values.get("trainer.precision"))
    return count_ranks(devices, nodes, visible_devices if accelerator != "cpu" else 0, env)


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
    if config_name not in ("gpt_sft", "training_rm"):
        raise ConfigError(
            f"{key} is not set; give the path of the .nemo file or folder to start from."
        )
    _check_from_scratch(values, key)
    return True


def _check_from_scratch(values: Values, key: str) -> None:
    """Without a checkpoint the architecture must be given."""
    needed = [
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.tokenizer.library",
    ]
    missing = [key for key in needed if values.get(key) is None]
    if missing:
        raise ConfigError(
            f"{key} is not set, so the model starts from random weights, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set either; name a "
            "checkpoint or give the architecture."
        )


def _check_sequence_lengths(values: Values) -> None:
    length = values.whole("model.encoder_seq_length", 2)
    positions = values.whole("model.max_position_embeddings", 1)
    name = "position_embedding_type"
    learned = values.get(f"model.{name}", model_fallback(name)) == "learned_absolute"
    if length and positions and learned and positions < length:
        raise ConfigError(
            f"model.max_position_embeddings={positions} is smaller than "
            f"model.encoder_seq_length={length}; set it to {length}."
        )


def _check_training(values: Values, config_name: str, dp: dict[str, int]) -> None:
    """What all jobs that train have in common."""
    values.multiple(
        "model.global_batch_size",
        "model.micro_batch_size",
        times=dp | virtual_pipeline_group(values),
    )
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
    data_length = values.whole("model.data.seq_length", 2)
    length = values.whole("model.encoder_seq_length", 2)
    if data_length and length and data_length > length:
        raise ConfigError(
            f"model.data.seq_length={data_length} is above model.encoder_seq_length={length}; set "
            f"it to {length} or less."
        )
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


def check_steerlm2(cfg: DictConfig | dict) -> None:
    """Raise `ConfigError` unless a configuration of `gpt_sft.yaml` can train SteerLM 2.0.

    Args:
        cfg: has passed `check_values`.
    """
    values = Values(resolved(complete_config(cfg, "gpt_sft")))
    key = RESTORE_KEYS["gpt_sft"]
    if values.get(key) is None:
        raise ConfigError(
            f"{key} is not set; SteerLM 2 starts from the policy that sampled the responses: give "
            "its .nemo file or folder."
        )
    if not values.get("model.data.chat"):
        raise ConfigError(
            "model.data.chat=False: data of SteerLM 2 are in NeMo's chat format; set it to True."
        )
    reduction = values.get("model.loss_reduction")
    if reduction != "token":
        raise ConfigError(
            f"model.loss_reduction={reduction}: the loss of SteerLM 2 has a reduction of its own, "
            "a mean over prompts; leave it at token."
        )
    for split in ("train_ds", "validation_ds"):
        if values.get(f"model.data.{split}.packed_sequence"):
            raise ConfigError(
                f"model.data.{split}.packed_sequence=True: responses of SteerLM 2 are not packed; "
                "set it to False, and model.dynamic_micro_batch_tokens for short ones."
            )


def _check_sft(values: Values, dp: dict[str, int]) -> None:
    _check_sft_data(values, dp, ("train_ds", "validation_ds"))


def _check_sft_data(values: Values, dp: dict[str, int], with_sizes: tuple[str, ...]) -> None:
    """Check `model.data` of jobs that read its sections; those `with_sizes` have batch sizes."""
    check_chat(values.get("model.data", {}))
    length = values.whole("model.encoder_seq_length")
    for split in ("train_ds", "validation_ds"):
        name = f"model.data.{split}"
        if split in with_sizes:
            values.multiple(
                f"{name}.global_batch_size",
                f"{name}.micro_batch_size",
                times=dp | virtual_pipeline_group(values),
            )
        limit = values.get(f"{name}.max_seq_length")
        if limit and length and limit > length:
            raise ConfigError(
                f"{name}.max_seq_length={limit} is above model.encoder_seq_length={length}; lower "
                "it."
            )
        plain_columns(values.get(f"{name}.columns"), f"{name}.columns")
        check_packed(
            values.get(f"{name}.packed_sequence"),
            values.get(f"{name}.file_path"),
            values.get("model.context_parallel_size"),
            name,
        )


def _check_preferences(values: Values, kind: str) -> None:
    """What DPO and KTO, `kind`, have in common."""
    section = f"model.{kind}."
    folder = values.get(f"{section}ref_log_probs_dir")
    if folder is not None and not isinstance(folder, str):
        raise ConfigError(
            f"{section}ref_log_probs_dir={folder!r} must be a folder, or null: the log-probs of "
            "the reference policy are not kept."
        )
    check_prompts_can_be_read(str(values.get("model.data.data_impl")))
    _check_not_both_0(values, [f"{section}preference_loss_weight", f"{section}sft_loss_weight"])


def _check_not_both_0(values: Values, weights: list[str]) -> None:
    if not any(values.get(key) for key in weights):
        raise ConfigError(f"{' and '.join(weights)} are both 0: nothing would be learned.")


def _check_kto(values: Values) -> None:
    _check_preferences(values, "kto")
    _check_not_both_0(
        values, ["model.kto.desirable_loss_weight", "model.kto.undesirable_loss_weight"]
    )


def _check_dpo(values: Values) -> None:
    dpo = "model.dpo."
    _check_preferences(values, "dpo")
    loss, smoothing = values.get(f"{dpo}preference_loss"), values.get(f"{dpo}label_smoothing")
    if smoothing and loss != "dpo":
        raise ConfigError(
            f"{dpo}label_smoothing={smoothing} belongs to {dpo}preference_loss=dpo, not {loss}; "
            "set it to 0."
        )


def check_candidates(top_k: int, outside_top_k: str, sft_loss_weight: float) -> None:
    """Raise `ConfigError` if a student could learn nothing from `top_k` logits of each token."""
    if top_k == 1 and outside_top_k == "renormalize" and not sft_loss_weight:
        raise ConfigError(
            "the teacher gives one logit of each token, and "
            "model.knowledge_distillation.outside_top_k=renormalize makes its probability 1 for "
            "teacher and student: nothing would be learned. Give more logits, or set "
            "outside_top_k=bucket."
        )


def _check_distillation(values: Values) -> None:
    own = "model.knowledge_distillation."
    _check_not_both_0(values, [f"{own}kd_loss_weight", f"{own}sft_loss_weight"])
    beta = values.get(f"{own}jsd_beta")
    if not 0 < beta < 1:
        raise ConfigError(
            f"{own}jsd_beta={beta} must be above 0 and below 1; its limits are kd_loss=fwd_kl and "
            "bwd_kl."
        )
    scale = values.get(f"{own}target_logits_scale")
    if values.get(f"{own}outside_top_k") == "bucket" and scale != 1:
        raise ConfigError(
            f"{own}outside_top_k=bucket needs {own}target_logits_scale=1, not {scale}: what the "
            "teacher gives other tokens is known at this scale only; set renormalize or 1."
        )
    check_on_policy(values)
    top_k = values.get("model.data.top_k")
    if top_k is not None:
        check_candidates(
            top_k, values.get(f"{own}outside_top_k"), values.get(f"{own}sft_loss_weight")
        )
    data_impl = str(values.get("model.data.data_impl"))
    if holds_tokens(data_impl):
        raise ConfigError(
            f"model.data.data_impl={data_impl} holds tokens only; give the jsonl files that "
            "compute_topk_logits.py wrote."
        )
