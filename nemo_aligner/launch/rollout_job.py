# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What jobs share whose policy learns from its own responses."""

import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms.rollout_trainer import RolloutTrainer, updates_of_rollouts
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.folders import read_state, step_to_resume
from nemo_aligner.config.access import server_token
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.server_rules import read_web_rewards
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import (
    build_configured_datasets,
    build_dataloader,
    build_train_valid_test_datasets,
)
from nemo_aligner.data.nlp.fields import ALL_COLUMNS
from nemo_aligner.data.nlp.prompts import (
    PromptColumns,
    RLHFDataset,
    check_pad_to_length,
    collate_with_pad_to_max_batch,
    single_validation_set,
)
from nemo_aligner.data.nlp.samplers import get_batch_iterator_cls
from nemo_aligner.launch import experiment
from nemo_aligner.launch.job_entry import has_no_rewards
from nemo_aligner.launch.processes import no_checkpoint_error
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.servers import scoring_clients
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.training.schedule import compute_num_steps_per_epoch

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

    from nemo_aligner.servers.agents import AgentEnvironment
    from nemo_aligner.servers.reward_function import RewardFunction
    from nemo_aligner.servers.teachers import PolicyTeachers


def build_prompt_loaders(
    cfg: DictConfig, kind: str, remote: str, tokenizer: "TokenizerSpec"
) -> tuple[dict[str, Any], list[RLHFDataset]]:
    """The arguments of `PPOTrainer` that read the prompts of `model.data.data_prefix`, with the
    sizes of `model.<kind>`, and the data sets. `remote`: section of the reward servers.
    """
    settings = cfg.model[kind]
    train_ds, validation_ds, _ = build_configured_datasets(
        cfg, partial(build_train_valid_test_datasets, RLHFDataset), tokenizer
    )
    validation_ds = single_validation_set(validation_ds)
    datasets = [train_ds] if validation_ds is None else [train_ds, validation_ds]
    check_pad_to_length(cfg, remote, kind, datasets)
    sizes = {"mbs": settings.rollout_micro_batch_size, "gbs": settings.num_rollout_samples}
    train: Any = partial(build_dataloader, cfg, train_ds, **sizes, load_gbs=False)
    sizes = {"mbs": settings.val_rollout_micro_batch_size, "gbs": settings.num_val_samples}
    validation: Any = validation_ds and partial(
        build_dataloader, cfg, validation_ds, **sizes, load_gbs=False, use_random_sampler=False
    )
    collate_fn = collate_with_pad_to_max_batch(
        settings.length_params.max_length,
        tokenizer.eos_id,
        cfg,
        generate_masks_and_position_ids=False,
    )
    arguments = {
        "train_dataloader_builder": train,  # which takes `collate_fn` too, as the next one does
        "val_dataloader_builder": validation,
        "collate_fn": collate_fn,
        "batch_iterator_cls": get_batch_iterator_cls(cfg.trainer[kind].get("batch_iterator")),
    }
    return arguments, datasets


def train_on_rollouts(
    cfg: DictConfig,
    job: experiment.Experiment,
    model: MegatronGPTPolicyModel,
    trainer_class: Callable[..., RolloutTrainer],
    *,
    remote: str = "remote_rm",
    client_class: Callable[..., Any] = scoring_clients.RemoteGPTRMClient,
    client_argument: str = "rm",
    load_state: Callable[..., dict[str, Any] | None] = (
        lambda cfg, ckpt_callback, client: experiment.load_trainer_state(cfg, ckpt_callback)
    ),
) -> None:
    """Train `model`, with its initial weights, adapters and reference policy, from where the last
    checkpoint stands to the end; all ranks call it. `JobStopped`: after a save, at the time limit
    or a signal.

    Args:
        trainer_class: its settings are the section `job.section` of `cfg.trainer`.
        remote: section of the servers that score the responses.
        client_class: talks to them; the trainer gets one as `client_argument`.
        load_state: `(cfg, ckpt_callback, client)` to the counters to resume from, or None.
    """
    kind = job.section
    prompts, datasets = build_prompt_loaders(cfg, kind, remote, model.tokenizer)
    train = prompts["train_dataloader_builder"](consumed_samples=0)
    steps_per_epoch = compute_num_steps_per_epoch(train.batch_sampler)
    parts = experiment.set_up_training(
        cfg,
        job,
        model,
        max_steps=updates_of_rollouts(kind, cfg.trainer[kind], cfg.model, steps_per_epoch),
        train=train,
        has_validation=prompts["val_dataloader_builder"] is not None,
    )
    client = client_class(
        cfg[remote],
        model.tokenizer,
        max_length=cfg.model.encoder_seq_length,
        score_source=start_score_source(cfg, kind, remote, model, datasets),
    )
    clients = {client_argument: client}
    try:
        if cfg.trainer[kind].get("teacher_kl_coef"):
            clients["teacher"] = connect_teachers(cfg, model.tokenizer, datasets[0])
        trainer = trainer_class(**parts, **prompts, run_timer=experiment.run_timer(cfg), **clients)
        state = load_state(cfg, parts["ckpt_callback"], client)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.fit()
    finally:
        if "teacher" in clients:
            clients["teacher"].close()
        client.communicator.close()


def connect_teachers(
    cfg: DictConfig, tokenizer: "TokenizerSpec", train_ds: RLHFDataset
) -> "PolicyTeachers":
    """All ranks call it. `UserError`: a record of the training data names no teacher of
    `remote_teacher`.
    """
    from nemo_aligner.servers.teachers import PolicyTeachers

    remote, named = cfg.remote_teacher, None
    if remote.column is not None:
        with failing_together():  # each rank checks its share of the records
            share = torch.distributed.get_rank(), torch.distributed.get_world_size()
            columns, known = PromptColumns([train_ds], [remote.column], share), [*remote.teachers]
            for document in train_ds.documents[share[0] :: share[1]]:
                name = train_ds.lines[document][remote.column]
                if name not in known:
                    raise UserError(
                        f"{train_ds.lines.where(document)}: '{remote.column}' is {name!r}, but "
                        f"remote_teacher.teachers has {', '.join(known)}."
                    )

        def named(numbers: Tensor) -> list[str]:
            return [record[remote.column] for record in columns(numbers)]

    return PolicyTeachers(remote, tokenizer, cfg.model.encoder_seq_length, named)


# ------------------------------------------------------------------------- a user's own functions


def own_function(named: str | None, key: str, parameters: Sequence[str]) -> Callable | None:
    """The function `named` (path/to/file.py:function), the value of `key`, if any. It is called
    with `parameters`. `ConfigError`: there is none, it cannot be called so, or (when called) its
    result has not the shape of the first, or no gradient to pass on.
    """
    if named is None:
        return None
    from nemo_aligner.servers.worker import LoadError, load_named

    path, _, name = named.rpartition(":")
    called = f"{name}({', '.join(f'{each}=...' for each in parameters)})"
    import_path = list(sys.path)
    try:
        function = load_named(os.path.abspath(path), name, "function", inspect.isfunction)
        inspect.signature(function).bind(**dict.fromkeys(parameters))
        if inspect.iscoroutinefunction(function):
            raise TypeError("it is async")
    except LoadError as error:
        raise ConfigError(f"{key}={named}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={named}: {error}. It is called as {called}.") from None
    finally:  # what is beside the file must not hide modules that this rank imports later
        folder = os.path.dirname(os.path.abspath(path))
        sys.path[:] = import_path if folder in import_path else [*import_path, folder]

    @functools.wraps(function)
    def checked(**arguments: Any) -> Tensor:
        result, like = function(**arguments), arguments[parameters[0]]
        is_tensor = isinstance(result, Tensor)
        if not is_tensor or result.shape != like.shape:
            found = f"shape {list(result.shape)}" if is_tensor else f"type {type(result).__name__}"
            raise ConfigError(
                f"{key}={named} returns the {found}; it must return a tensor of the shape of "
                f"{parameters[0]}, {list(like.shape)}."
            )
        if like.requires_grad and not result.requires_grad:
            raise ConfigError(
                f"{key}={named} returns a tensor without gradient; compute it from "
                f"{parameters[0]}, without detach() or no_grad()."
            )
        return result

    return checked


# ------------------------------------------------------- what gives the rewards in the job itself


def start_score_source(
    cfg: DictConfig, kind: str, remote: str, policy: Any, prompts: Sequence[RLHFDataset]
) -> scoring_clients.ScoreSource | None:
    """What `model.<kind>.environment`, `trainer.<kind>.reward_fn` or `judge` names, whose
    processes end with the job; None: servers (`remote`) give the rewards. All ranks call it.
    `policy` gets an environment. `UserError`: the code cannot be used; on all ranks.
    """
    options, section = cfg.model[kind].environment, f"model.{kind}.environment"
    if options.path is not None:
        from nemo_aligner.servers.environment import PythonEnvironment

        with failing_together():
            policy.environment = PythonEnvironment(
                options.path,
                policy.tokenizer,
                max_turns=options.max_turns,
                workers=options.workers,
                timeout_s=options.timeout_s,
                fallback=options.fallback,
                section=section,
                starts_workers=policy.generator.asks_environment,
            )
            atexit.register(policy.environment.close)
        return policy.environment
    share = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if options.port is not None:
        copies = gathered(policy.generator.asks_environment)
        with failing_together():
            records = PromptColumns(prompts, (ALL_COLUMNS,), share)
            place = sum(copies[: share[0]])
            policy.environment = _agents(cfg, kind, remote, policy, records, place)
        return policy.environment
    options, section = cfg.trainer[kind], f"trainer.{kind}"
    if has_no_rewards(cfg, kind):
        return scoring_clients.NoRewards()
    if options.reward_fn is None and options.judge.url is None:
        return None
    function = None
    with failing_together():
        if parallel_state.get_rank() == parallel_state.get_model_parallel_src_rank():
            function = _function(options, section, policy, cfg[remote].init_timeout_s)
            atexit.register(function.close)
            check_names(function, prompts[0].lines[int(prompts[0].documents[0])])
    asked = next(filter(None, gathered(function and function.columns)), None)
    if asked is None:
        return scoring_clients.RewardsInJob(function, None)
    with failing_together():  # each rank checks its share of the records
        columns = PromptColumns(prompts, asked, share)
    return scoring_clients.RewardsInJob(function, columns)


def check_names(function: "RewardFunction", record: Mapping[str, Any]) -> None:
    """Refuse or warn of columns of a record that the reward does not get, as another has the name.
    `UserError`: the parameter that gets the lengths is called like a column.
    """
    from nemo_aligner.servers.web import TAKEN

    name = function.third
    if name in record and not name.startswith("len"):
        raise UserError(
            f"{function.title} has '{name}', a column of the records, as its third parameter, "
            f"which gets the lengths: write (prompts, responses, lengths, {name})."
        )
    taken = [name for name in TAKEN if name in record]
    if function.is_served and taken and ALL_COLUMNS in function.columns:
        logging.warning(
            f"{function.title} does not get these columns of the records, as its own fields have "
            f"the names: {', '.join(taken)}. Rename them in the data if it needs them."
        )


def _agents(
    cfg: DictConfig, kind: str, remote: str, policy: Any, records: PromptColumns, place: int
) -> "AgentEnvironment":
    from nemo_aligner.data.nlp.chat_template import ChatTemplate
    from nemo_aligner.data.nlp.fields import holds_conversation
    from nemo_aligner.data.nlp.record_encoder import chat_form
    from nemo_aligner.servers.agents import AgentDoor, AgentEnvironment

    options, section = cfg.model[kind].environment, f"model.{kind}.environment"
    form, first = chat_form(cfg.model.data, policy.tokenizer), records.record(0)
    if not isinstance(form, ChatTemplate) or not holds_conversation(first):
        raise ConfigError(
            f"{section}.port={options.port} needs prompts that are conversations and a chat "
            f"template: the first one has {sorted(first)}, and model.data.chat_template="
            f"{cfg.model.data.get('chat_template')}."
        )
    environment = AgentEnvironment(
        form,
        policy.tokenizer,
        records.record,
        policy.generation_params,
        policy.generator.max_sequence_length,
        max_turns=options.max_turns,
        timeout_s=options.timeout_s,
        fallback=options.fallback,
        idle_timeout_s=cfg[remote].init_timeout_s,
        section=section,
    )
    if policy.generator.asks_environment:
        host, port = options.host, options.port + place
        token = server_token(host, options.token_file, section)
        door = AgentDoor(host, port, environment, token, f"{section}.port")
        atexit.register(door.close)
        logging.info(f"agents find the policy at http://{host}:{port}/v1/sessions")
    return environment


def _function(
    options: DictConfig, section: str, policy: Any, init_timeout_s: float
) -> "RewardFunction":
    from nemo_aligner.servers.reward_function import RewardFunction
    from nemo_aligner.servers.web import RewardServers

    servers = read_web_rewards(plain_dict(options, resolve=True), section)
    return RewardFunction(
        RewardServers(servers, init_timeout_s) if servers else options.reward_fn,
        policy.tokenizer,
        workers=options.reward_fn_workers * (len(servers.urls) if servers else 1),
        timeout_s=options.reward_fn_timeout_s,
        fallback=options.reward_fn_fallback,
        per=options.rewards_per,
        step_end=options.step_end,
        section=section,
        gives_columns=True,
    )


# ----------------------------------------------------------- the state of an actor and its critic


def load_state_of_pair(
    cfg: DictConfig,
    ckpt_callback: CheckpointCallback,
    rm_critic: RemoteGPTRMCriticClient | scoring_clients.RewardsInPlaceOfCritic,
) -> dict[str, Any] | None:
    """Counters of the actor, resumed as `exp_manager` asks, with the critic at the same step; None
    for a fresh start; all ranks call it. Without a common step the actor resumes alone, and the
    check before its first rollout says what to do (`check_status`).
    """
    if cfg.exp_manager is None:
        return experiment.load_trainer_state(cfg, ckpt_callback)
    options = complete(cfg.exp_manager, "gpt_ppo_actor", "exp_manager")
    is_named = bool(options.resume_from_checkpoint)  # by the user
    status = rm_critic.status()
    while status is not None:
        folders = _checkpoints(options, ckpt_callback)
        step = step_to_resume(folders, status["checkpoints"])
        folder = None if step is None else folders.get(step)
        if step is None or (is_named and folder is None):
            break
        if folder is not None and not is_named and not ckpt_callback.is_sound(folder):
            continue
        if not rm_critic.go_to(step):
            status = rm_critic.status()
            continue
        if step < max(folders, default=0):
            logging.warning(
                f"the critic has no checkpoint of actor step {max(folders)}: the actor goes back "
                f"to step {step}, the newest of both."
            )
        if is_named:
            return ckpt_callback.load_latest(folder)
        if folder is not None:
            return ckpt_callback.load_sound(folder)
        if options.resume_if_exists and not options.resume_ignore_no_checkpoint:
            raise no_checkpoint_error(ckpt_callback.root)
        ckpt_callback.start_anew()
        return None
    return experiment.load_trainer_state(cfg, ckpt_callback)


def _checkpoints(options: DictConfig, ckpt_callback: CheckpointCallback) -> dict[int, Path]:
    """Folders that the actor may resume from, by its step, as rank 0 sees them."""
    found: dict[int, str] = {}
    if options.resume_from_checkpoint:
        stored = read_state(Path(options.resume_from_checkpoint))
        if stored is not None:
            found = {int(stored["trainer"]["step"]): options.resume_from_checkpoint}
    elif options.resume_if_exists:
        found = ckpt_callback.saved_at("step")
    return {step: Path(folder) for step, folder in gathered(found)[0].items()}
