# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of a job whose policy generates, PPO or rejection sampling."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_aligner.data.nlp.builders import (
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
        kind: "ppo" or "rs".
        remote: section of the servers that score the responses.
    """
    data = cfg.model.data
    train_ds, validation_ds, _ = build_train_valid_test_rlhf_datasets(
        cfg=cfg.model,
        data_prefix=data.data_prefix,
        data_impl=data.data_impl,
        splits_string=data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=data.seq_length,
        seed=cfg.model.seed,
        tokenizer=tokenizer,
    )
    validation_ds = single_validation_set(validation_ds)
    check_pad_to_length(cfg, remote, kind, [train_ds, validation_ds])
    return train_ds, validation_ds
