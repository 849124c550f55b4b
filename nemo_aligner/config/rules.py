# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which values of a configuration cannot work, alone or together: plain functions over plain
values.

`check_values` knows the rules of each job; which keys exist stands in `config_schema.py`.
"""

import os

from nemo_aligner.config.parallel_rules import (
    EP_REMEDY,
    check_accelerator,
    check_architecture,
    check_recomputation,
    count_ranks,
    cuda_devices,
    parallel_factor,
    virtual_pipeline_group,
)
from nemo_aligner.config.ppo_rules import check_ppo_variants
from nemo_aligner.config.reward_models import read_reward_models
from nemo_aligner.config.schema import ARCHITECTURE_KEYS, FLAGS, LIVE, ONLY, REQUIRED
from nemo_aligner.config.values import Values, require_multiple, resolved
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import LOSS_REDUCTIONS

# Section of `trainer` that holds a job's own settings, and the key that names the weights it
# starts from.
SECTIONS = {
    "gpt_ppo_actor": "ppo",
    "gpt_ppo_critic": "ppo",
    "gpt_rs_actor": "rs",
    "training_rm": "rm",
    "gpt_sft": "sft",
}
RESTORE_KEYS = {"gpt_sft": "model.restore_from_path", "inference_rm": "rm_model_file"}
RESTORE_KEY = "pretrained_checkpoint.restore_from_path"  # of all others


def check_flags(values: Values, config_name: str) -> None:
    """Raise unless each switch is True or False; null only where it means "as in the
    checkpoint".
    """
    for key in sorted(FLAGS & LIVE[config_name]):
        value = values.get(key)
        leaves_it = key.removeprefix("model.") in ARCHITECTURE_KEYS or values.is_null(
            key.rpartition(".")[0]
        )
        if isinstance(value, bool) or (value is None and (leaves_it or not values.is_null(key))):
            continue
        shown = "null" if value is None else repr(value)
        raise ConfigError(f"{key}={shown} must be True or False.")


def check_required(values: Values, config_name: str) -> None:
    """Raise where a key that needs a value was set to null. One that is absent has the default of
    the code.
    """
    for key in sorted(REQUIRED[config_name]):
        if values.is_null(key):
            raise ConfigError(
                f"{key} is not set; give it a value (docs/config.md names its default)."
            )


def check_intervals(section: str, val_check_interval, save_interval) -> None:
    """Raise unless checkpoints fall on validations (their file name and ranking hold a validation
    score).
    """
    both = (val_check_interval, save_interval)
    if all(isinstance(x, int) and x > 0 for x in both) and save_interval % val_check_interval:
        raise ConfigError(
            f"{section}.save_interval={save_interval} must be a multiple of "
            f"{section}.val_check_interval={val_check_interval}."
        )


def _divides(values: Values, whole: str, *parts: str, dp: dict[str, int]) -> None:
    """The batch size at key `whole` must be a multiple of those at `parts` x DP; keys not set are
    left out.
    """
    total = values.whole(whole, minimum=1)
    factors = {part: values.whole(part, minimum=1) for part in parts}
    if total is not None and all(factors.values()):
        require_multiple(whole, total, factors | dp)


def _check_same(values: Values, key: str, other: str) -> None:
    a, b = values.get(key), values.get(other)
    if a is not None and b is not None and a != b:
        raise ConfigError(f"{key}={a} and {other}={b} must be the same value; set only {other}.")


def _check_sequence_lengths(values: Values) -> None:
    length, positions = (
        values.whole("model.encoder_seq_length", 2),
        values.whole("model.max_position_embeddings", 1),
    )
    learned = values.get("model.position_embedding_type", "learned_absolute") == "learned_absolute"
    if length and positions and learned and positions < length:
        raise ConfigError(
            f"model.max_position_embeddings={positions} is smaller than "
            f"model.encoder_seq_length={length}; "
            f"set it to {length}."
        )


def _check_policy(values: Values, kind: str, remote: str, dp: dict[str, int]) -> None:
    """What PPO and RS actors have in common; `kind` is "ppo" or "rs", `remote` the section of its
    servers.
    """
    v, section, model = values, f"trainer.{kind}.", f"model.{kind}."
    _check_same(v, section + "model_gbs", "model.global_batch_size")
    _check_same(v, section + "model_mbs", "model.micro_batch_size")
    v.whole(model + "forward_micro_batch_size", 1)
    for key, minimum in (("max_epochs", 1), ("max_steps", -1), ("val_check_interval", 0)):
        if v.whole(section + key, minimum) is None:
            raise ConfigError(f"{section}{key} is not set; give a whole number.")
    _divides(v, model + "num_rollout_samples", model + "rollout_micro_batch_size", dp=dp)
    _divides(v, model + "num_val_samples", model + "val_rollout_micro_batch_size", dp=dp)
    v.whole(section + "rollout_batch_seq_length", 2)
    v.number(section + "alarms.truncated_fraction", 0, 1)
    v.choice(model + "loss_reduction", LOSS_REDUCTIONS)
    _check_generation(v, model, remote)
    experts = v.whole("model.expert_model_parallel_size", 1) or 1
    if experts > 1 and v.get(f"{section}batch_iterator.use_flask", False):
        raise ConfigError(
            f"{section}batch_iterator.use_flask=True does not work with "
            f"model.expert_model_parallel_size={experts}: "
            "these ranks hold each other's experts, so none may generate more often than another. "
            "Set it to False "
            f"({EP_REMEDY})."
        )
    v.number(f"{remote}.init_timeout_s", 0, above=True)
    v.number(f"{remote}.inference_timeout_s", 0, above=True)
    read_reward_models(v.get(remote, {}), remote)


def _check_generation(values: Values, model: str, remote: str) -> None:
    v = values
    longest = v.whole(model + "length_params.max_length", 1)
    shortest = v.whole(model + "length_params.min_length", 0)
    context = v.whole("model.encoder_seq_length", 2)
    if longest and context and longest >= context:
        raise ConfigError(
            f"{model}length_params.max_length={longest} leaves no room for a prompt in "
            f"model.encoder_seq_length={context}; set max_length below {context}."
        )
    if longest and shortest and shortest > longest:
        raise ConfigError(
            f"{model}length_params.min_length={shortest} is above max_length={longest}; lower "
            "min_length."
        )
    pad = v.whole(f"{remote}.pad_to_length", 1)
    if pad and longest and pad <= longest:
        raise ConfigError(
            f"{remote}.pad_to_length={pad} cannot hold a prompt and {longest} generated tokens "
            f"({model}length_params.max_length); set it to model.encoder_seq_length={context}."
        )
    sampling = model + "sampling_params."
    v.number(sampling + "temperature", 0, above=True)
    v.number(sampling + "top_p", 0, 1, above=True)
    v.number(sampling + "repetition_penalty", 0, above=True)
    v.whole(sampling + "top_k", 0)


def _check_actor(values: Values, dp: dict[str, int]) -> None:
    v = values
    _check_policy(v, "ppo", "remote_critic_rm", dp)
    if v.whole("trainer.ppo.ppo_epochs", 1) is None:
        raise ConfigError("trainer.ppo.ppo_epochs is not set; give a whole number.")
    prompts, answers = (
        v.whole(f"model.ppo.{key}", 1)
        for key in ("num_rollout_samples", "num_rollouts_per_prompt")
    )
    batch = v.whole("model.global_batch_size", 1)
    if prompts and batch:
        name = "model.ppo.num_rollout_samples" + (
            f" x num_rollouts_per_prompt={answers}" if (answers or 1) > 1 else ""
        )
        require_multiple(name, prompts * (answers or 1), {"model.global_batch_size": batch})
    v.number("model.ppo.ratio_eps", 0, above=True)
    v.number("model.ppo.entropy_bonus", 0)
    for key in ("discount_factor", "gae_lambda"):
        v.number(f"trainer.ppo.{key}", 0, 1)
    v.number("trainer.ppo.initial_policy_kl_penalty", 0)
    v.whole("trainer.ppo.critic_warmup_steps", 0)
    check_ppo_variants(v)
    v.number("trainer.ppo.alarms.sampling_mismatch", 0, above=True)
    v.number("trainer.ppo.alarms.clip_fraction", 0, 1)
    v.number("trainer.ppo.alarms.explained_variance", high=1)
    v.port("remote_critic_rm.critic.port")
    if v.get("remote_critic_rm.reward_models") and v.get(
        "remote_critic_rm.combine_rm_and_critic_server", True
    ):
        raise ConfigError(
            "remote_critic_rm.reward_models names servers of their own, but "
            "remote_critic_rm.combine_rm_and_critic_server=True has the critic server score "
            "rewards; set it to False."
        )


def _check_rs(values: Values, dp: dict[str, int]) -> None:
    v = values
    _check_policy(v, "rs", "remote_rm", dp)
    prompts = v.whole("model.rs.num_rollout_samples", 1)
    answers, kept = (
        v.whole(f"model.rs.{key}", 1) for key in ("num_rollouts_per_prompt", "top_n_rollouts")
    )
    if answers and kept and kept > answers:
        raise ConfigError(
            f"model.rs.top_n_rollouts={kept} is above model.rs.num_rollouts_per_prompt={answers}: "
            "no more can be kept "
            "than were drawn; lower the first or raise the second."
        )
    sampling = "model.rs.sampling_params."
    if (
        answers
        and answers > 1
        and (v.get(sampling + "use_greedy") or v.get(sampling + "top_k") == 1)
    ):
        raise ConfigError(
            f"model.rs.num_rollouts_per_prompt={answers} answers to a prompt would be the same "
            "with "
            "sampling_params.use_greedy=True or top_k=1; sample, or draw one answer."
        )
    batch = v.whole("model.global_batch_size", 1)
    if prompts and kept and batch and prompts * kept % batch:
        raise ConfigError(
            f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={kept} = "
            f"{prompts * kept} kept answers "
            f"are not a multiple of model.global_batch_size={batch}; change one of them."
        )


def _check_serving(values: Values, section: str) -> None:
    """What the servers have in common; `section` holds their port."""
    values.port(f"{section}.port")
    values.number(f"{section}.max_queue_delay_microseconds", 0)
    values.whole(f"{section}.strip_sequence_length_to_multiple", 1)
    if values.get("model.reward_standardization.enable"):
        for key in ("mean", "std"):
            if values.get(f"model.reward_standardization.{key}") is None:
                raise ConfigError(
                    "model.reward_standardization.enable=True needs "
                    f"model.reward_standardization.{key}; set it."
                )
        values.number("model.reward_standardization.std", 0, above=True)
    sizes = values.get(f"{section}.inference_micro_batch_size", 1)
    for size in sizes if isinstance(sizes, (list, tuple)) else [sizes]:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{section}.inference_micro_batch_size={sizes!r} must be a positive whole number "
                "or a list of them."
            )


def _check_critic(values: Values) -> None:
    _check_serving(values, "trainer.ppo")
    values.choice("model.loss_reduction", LOSS_REDUCTIONS)
    values.number("model.loss_clip_val", 0)


def _check_reward_server(values: Values, ranks: int) -> None:
    v = values
    _check_serving(v, "inference")
    v.whole("inference.reward_fn_workers", 1)
    v.number("inference.reward_fn_timeout_s", 0, above=True)
    v.number("inference.reward_fn_fallback")
    function = v.get("inference.reward_fn")
    if function is None:
        return
    if v.get("rm_model_file") is None and v.get("model.tokenizer.library") is None:
        raise ConfigError(
            f"inference.reward_fn={function} reads text, so it needs the tokenizer of the policy "
            "that it judges: set "
            "rm_model_file to the policy's .nemo, or model.tokenizer."
        )
    if ranks > 1:
        raise ConfigError(
            f"inference.reward_fn={function} is served by one process with "
            "inference.reward_fn_workers="
            f"{v.get('inference.reward_fn_workers')} workers, but the job has {ranks} ranks; set "
            "trainer.devices=1, "
            "and more workers if they are needed."
        )


def _check_from_scratch(values: Values, restore_key: str) -> None:
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
            f"{restore_key} is not set, so the model starts from random weights, but "
            f"{', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set either; name a checkpoint or give "
            "the architecture."
        )


def check_values(
    cfg, config_name: str, *, complete: bool, visible_devices: int | None = None, env=None
) -> None:
    """Refuse values that cannot work, alone or together.

    Args:
        cfg: `DictConfig`, or a dict without references.
        complete: True once `cfg.model` holds the checkpoint's values too. Before that, checks that
            need the data parallel size run only if the parallel sizes are given.
        visible_devices: GPUs of this machine; None asks PyTorch.

    Raises:
        ConfigError: with the value and the remedy.
    """
    values = Values(resolved(cfg))
    check_required(values, config_name)
    check_flags(values, config_name)
    visible_devices = cuda_devices() if visible_devices is None else visible_devices
    devices, nodes = values.get("trainer.devices", 1), values.whole("trainer.num_nodes", 1) or 1
    check_accelerator(values.get("trainer.accelerator", "auto"), devices, visible_devices)
    use_gpus = values.get("trainer.accelerator", "auto") != "cpu"
    ranks = count_ranks(devices, nodes, visible_devices if use_gpus else 0, env)
    trains_from_scratch = _check_start(values, config_name)

    for key, (accepted, remedy) in ONLY.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported here: {remedy}.")

    dp = parallel_factor(values, ranks, complete or trains_from_scratch)
    if complete or trains_from_scratch:
        check_architecture(values.get("model", {}), fixed=not trains_from_scratch)
    check_recomputation(values, complete or trains_from_scratch)
    _check_sequence_lengths(values)
    values.whole("model.forward_micro_batch_size", 1)
    values.whole("model.seed", 0)
    if config_name == "inference_rm":
        return _check_reward_server(values, ranks)

    _check_training(values, config_name, dp)
    if config_name == "gpt_ppo_actor":
        _check_actor(values, dp)
    elif config_name == "gpt_rs_actor":
        _check_rs(values, dp)
    elif config_name == "gpt_ppo_critic":
        _check_critic(values)
    elif config_name == "gpt_sft":
        _check_sft(values, dp)


def _check_start(values: Values, config_name: str) -> bool:
    """The weights that the job starts from; returns whether it starts from random ones."""
    restore_key = RESTORE_KEYS.get(config_name, RESTORE_KEY)
    restore = values.get(restore_key)
    if restore is not None and not os.path.exists(str(restore)):
        raise ConfigError(
            f"{restore_key}={restore} does not exist; give the path of a .nemo file or folder."
        )
    if restore is not None or (
        config_name == "inference_rm" and values.get("inference.reward_fn") is not None
    ):
        return False
    if config_name not in ("gpt_sft", "training_rm"):
        raise ConfigError(
            f"{restore_key} is not set; give the path of the .nemo file or folder to start from."
        )
    _check_from_scratch(values, restore_key)
    return True


def _check_training(values: Values, config_name: str, dp: dict[str, int]) -> None:
    """What all jobs that train have in common."""
    _divides(
        values,
        "model.global_batch_size",
        "model.micro_batch_size",
        dp=dp | virtual_pipeline_group(values),
    )
    values.number("model.optim.lr", 0, above=True)
    values.choice("exp_manager.checkpoint_callback_params.mode", ("min", "max"))
    data_length, length = (
        values.whole("model.data.seq_length", 2),
        values.whole("model.encoder_seq_length", 2),
    )
    if data_length and length and data_length > length:
        raise ConfigError(
            f"model.data.seq_length={data_length} is above model.encoder_seq_length={length}; set "
            f"it to {length} or "
            "less."
        )
    section = f"trainer.{SECTIONS[config_name]}"
    values.number(f"{section}.gradient_clip_val", 0)
    values.whole(f"{section}.alarms.replica_check_interval", 0)
    check_intervals(
        section,
        values.get(f"{section}.val_check_interval"),
        values.get(f"{section}.save_interval"),
    )
    for key in ("limit_train_batches", "limit_val_batches"):
        values.number(f"{section}.{key}", 0)
    reads_prefix = config_name in ("gpt_ppo_actor", "gpt_rs_actor", "training_rm")
    if reads_prefix and not values.get("model.data.data_prefix"):
        raise ConfigError(
            "model.data.data_prefix is not set; give the data files, for example "
            "'model.data.data_prefix={train: [train.jsonl], validation: [val.jsonl], test: "
            "[val.jsonl]}'."
        )


def _check_sft(values: Values, dp: dict[str, int]) -> None:
    values.choice("model.loss_reduction", LOSS_REDUCTIONS)
    for split in ("train_ds", "validation_ds"):
        name = f"model.data.{split}"
        factors = dp | virtual_pipeline_group(values)
        _divides(values, f"{name}.global_batch_size", f"{name}.micro_batch_size", dp=factors)
        limit, length = (
            values.whole(f"{name}.max_seq_length", 2),
            values.whole("model.encoder_seq_length"),
        )
        if limit and length and limit > length:
            raise ConfigError(
                f"{name}.max_seq_length={limit} is above model.encoder_seq_length={length}; lower "
                "it."
            )
        values.choice(f"{name}.truncation_method", ("left", "right"))
