# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of a job whose policy generates, PPO, REINFORCE or rejection sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nemo_aligner.core.interfaces import PromptLoaderBuilder
from nemo_aligner.data.nlp.builders import (
    build_configured_datasets,
    build_dataloader,
    build_train_valid_test_rlhf_datasets,
    check_pad_to_length,
    collate_with_pad_to_max_batch,
    single_validation_set,
)
from nemo_aligner.data.nlp.datasets import RLHFDataset
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
