# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of a job whose policy generates, PPO, REINFORCE or rejection sampling."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_aligner.data.nlp.builders import (
    build_configured_datasets,
    build_train_valid_test_rlhf_datasets,
    check_pad_to_length,
    single_validation_set,
)
from nemo_aligner.data.nlp.datasets import RLHFDataset

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec


def build_prompt_datasets(
    cfg: DictConfig, kind: str, remote: str, tokenizer: "TokenizerSpec"
) -> tuple[RLHFDataset, RLHFDataset]:
    """Prompts for training and for validation, from `model.data.data_prefix`.

    Args:
        cfg: the whole configuration.
        kind: "ppo", "rs" or "reinforce".
        remote: section of the servers that score the responses.
    """
    train_ds, validation_ds, _ = build_configured_datasets(
        cfg, build_train_valid_test_rlhf_datasets, tokenizer
    )
    validation_ds = single_validation_set(validation_ds)
    check_pad_to_length(cfg, remote, kind, [train_ds, validation_ds])
    return train_ds, validation_ds
