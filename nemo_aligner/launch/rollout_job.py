# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What all jobs do whose policy learns from its own responses: build loaders of their prompts, ask
for rewards, train, resume.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nemo_aligner.algorithms.rollout_trainer import RolloutTrainer, compute_num_optimizer_steps
from nemo_aligner.core.interfaces import PromptLoaderBuilder
from nemo_aligner.data.nlp.batch_iterators import get_batch_iterator_cls
from nemo_aligner.data.nlp.builders import (
    build_configured_datasets,
    build_dataloader,
    build_train_valid_test_rlhf_datasets,
    check_pad_to_length,
    collate_with_pad_to_max_batch,
    single_validation_set,
)
from nemo_aligner.data.nlp.datasets import RLHFDataset
from nemo_aligner.launch.experiment import Job, load_trainer_state, run_timer, set_up_training
from nemo_aligner.launch.score_sources import start_score_source
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.servers.reward_client import RemoteGPTRMClient
from nemo_aligner.training.schedule import compute_max_steps, compute_num_steps_per_epoch

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec


@dataclass(frozen=True)
class PromptLoaders:
    """The prompts of a trainer whose policy generates."""

    # arguments of `PPOTrainer`; the first two take `collate_fn` too
    train_dataloader_builder: PromptLoaderBuilder
    val_dataloader_builder: PromptLoaderBuilder | None
    collate_fn: Callable[..., Any]
    max_steps: int  # rollouts of the whole job
    datasets: list[RLHFDataset]  # of the prompts


def build_prompt_loaders(
    cfg: DictConfig, kind: str, remote: str, tokenizer: "TokenizerSpec"
) -> PromptLoaders:
    """Loaders of the prompts of `model.data.data_prefix`, with the sizes of `model.<kind>`.

    Args:
        cfg: the whole configuration.
        kind: "ppo", "rs" or "reinforce".
        remote: section of the servers that score the responses.
    """
    settings, section = cfg.model[kind], cfg.trainer[kind]
    train_ds, validation_ds, _ = build_configured_datasets(
        cfg, build_train_valid_test_rlhf_datasets, tokenizer
    )
    validation_ds = single_validation_set(validation_ds)
    datasets = [train_ds] if validation_ds is None else [train_ds, validation_ds]
    check_pad_to_length(cfg, remote, kind, datasets)
    train: Any = partial(
        build_dataloader,
        cfg,
        train_ds,
        mbs=settings.rollout_micro_batch_size,
        gbs=settings.num_rollout_samples,
        load_gbs=False,
    )
    validation: Any = validation_ds and partial(
        build_dataloader,
        cfg,
        validation_ds,
        mbs=settings.val_rollout_micro_batch_size,
        gbs=settings.num_val_samples,
        load_gbs=False,
        use_random_sampler=False,
    )
    steps_per_epoch = compute_num_steps_per_epoch(train(consumed_samples=0).batch_sampler)
    return PromptLoaders(
        train,
        validation,
        collate_with_pad_to_max_batch(
            settings.length_params.max_length,
            tokenizer.eos_id,
            cfg,
            generate_masks_and_position_ids=False,
        ),
        compute_max_steps(steps_per_epoch, section.max_epochs, section.max_steps),
        datasets,
    )


def train_on_rollouts(
    cfg: DictConfig,
    job: Job,
    model: MegatronGPTPolicyModel,
    trainer_class: Callable[..., RolloutTrainer],
    samples_per_prompt: int,
    *,
    epochs: int = 1,
    remote: str = "remote_rm",
    client_class: Callable[..., Any] = RemoteGPTRMClient,
    client_argument: str = "rm",
    load_state: Callable[..., dict[str, Any] | None] = (
        lambda cfg, ckpt_callback, client: load_trainer_state(cfg, ckpt_callback)
    ),
) -> None:
    """Train `model` from where the last checkpoint stands to the end; all ranks call it.

    Args:
        cfg: the whole configuration.
        model: with its initial weights, adapters and reference policy.
        trainer_class: its settings are the section `job.section` of `cfg.trainer`.
        samples_per_prompt: that are learned from.
        epochs: passes over a rollout.
        remote: section of the servers that score the responses.
        client_class: talks to them; the trainer gets one as `client_argument`.
        load_state: `(cfg, ckpt_callback, client)` to the counters to resume from, or None.

    Raises:
        JobStopped: after a save, at the time limit or a signal.
    """
    kind = job.section
    settings = cfg.trainer[kind]
    prompts = build_prompt_loaders(cfg, kind, remote, model.tokenizer)
    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg,
        job,
        model,
        max_steps=compute_num_optimizer_steps(
            prompts.max_steps,
            cfg.model[kind].num_rollout_samples * samples_per_prompt,
            cfg.model.global_batch_size,
            epochs,
        ),
        train=prompts.train_dataloader_builder(consumed_samples=0),
        has_validation=prompts.val_dataloader_builder is not None,
    )
    client = client_class(
        cfg[remote],
        model.tokenizer,
        max_length=cfg.model.encoder_seq_length,
        score_source=start_score_source(cfg, kind, remote, model, prompts.datasets),
    )
    try:
        trainer = trainer_class(
            cfg=settings,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader_builder=prompts.train_dataloader_builder,
            val_dataloader_builder=prompts.val_dataloader_builder,
            collate_fn=prompts.collate_fn,
            batch_iterator_cls=get_batch_iterator_cls(settings.get("batch_iterator")),
            logger=job.logger,
            ckpt_callback=ckpt_callback,
            run_timer=run_timer(cfg),
            **{client_argument: client},
        )
        state = load_state(cfg, ckpt_callback, client)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.fit()
    finally:
        client.communicator.close()
