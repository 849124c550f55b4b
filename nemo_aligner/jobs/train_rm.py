# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Train a reward model: on pairs of texts, or on texts with labels.

    nemo-aligner train rm pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [c.jsonl]}"

`model.reward_model_type=binary_ranking`, the default, reads neighbouring lines `{"text": ...}`,
the better one first. `regression` reads lines `{"text": ..., "label": [number, ...]}` with
`model.regression.num_attributes` numbers; `model.regression.loss_mask_val` stands for a number
that is not known. With `model.regression.loss_func=scaled_bt` (or `regular_bt`, `margin_bt`) two
neighbouring lines are a pair and the first number of their labels says which is better, and how
much: below 0 the first.

The model starts from a language model with a new head, whose weights follow from `model.seed`;
with `model.regression.load_rm_head_weights=True` from a reward model with its own head; without
`pretrained_checkpoint.restore_from_path` from random weights, and then the architecture must be
given. The job ends with the accuracy, or the correlation with the labels, on data that it was not
trained on.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_aligner.config.jobs.reward_model import learns_labelled_pairs
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

    from nemo_aligner.launch.supervised_job import Loaders
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

CONFIG_NAME = "training_rm"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo.utils import logging

        from nemo_aligner.launch.experiment import start_job
        from nemo_aligner.launch.model_loading import complete_model_config
        from nemo_aligner.launch.supervised_job import train_supervised
        from nemo_aligner.models.nlp.gpt.reward_model_classes import (
            held_out_text,
            reward_model_class,
            reward_model_type,
        )

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    model_class = reward_model_class(cfg.model.reward_model_type)
    model_class.check_training_config(cfg.model)
    job = start_job(cfg, "rm")

    model = build_model(cfg, model_class, job.trainer)
    model.init_peft(cfg.model.peft)
    loaders = build_dataloaders(cfg, model.tokenizer)
    rm_trainer = train_supervised(cfg, job, model, loaders)
    kind = reward_model_type(cfg.model.reward_model_type)
    attributes = model.cfg.regression.num_attributes
    for name, (metrics, samples) in rm_trainer.held_out.items():
        logging.info(f"{name}: {held_out_text(kind, metrics, samples, attributes)}")


def build_model(
    cfg: DictConfig, model_class: type["MegatronGPTRewardModel"], trainer: "Trainer"
) -> "MegatronGPTRewardModel":
    """The reward model to train: of random weights, or from the checkpoint; with a new head unless
    its own is wanted.

    Raises:
        UserError: the checkpoint's own head is asked for, and it has none.
    """
    from nemo_aligner.launch.model_loading import load_from_nemo

    base = cfg.pretrained_checkpoint.restore_from_path
    if base is None:
        return model_class(cfg.model, trainer)
    keep_head = cfg.model.regression.load_rm_head_weights
    model = load_from_nemo(
        model_class, cfg.model, trainer, restore_path=base, load_base_model_only=not keep_head
    )
    if keep_head and not model.has_trained_head:
        raise UserError(
            f"model.regression.load_rm_head_weights=True, but {base} is no reward model, so that "
            "it has no head to load; name a reward model in "
            "pretrained_checkpoint.restore_from_path, or set it to False for a new head."
        )
    return model


def build_dataloaders(cfg: DictConfig, tokenizer: "TokenizerSpec") -> "Loaders":
    """Loaders of the data for the kind of reward model."""
    from nemo_aligner.data.nlp.builders import datasets_of_job
    from nemo_aligner.launch import supervised_job

    return supervised_job.build_dataloaders(
        cfg,
        datasets_of_job(CONFIG_NAME, cfg.model),
        tokenizer,
        train_random=cfg.trainer.rm.train_random_sampler,
        validation_random=cfg.trainer.rm.val_random_sampler,
        # The sizes of batches count samples, an item of such a data set is a pair of them.
        samples_per_item=2 if learns_labelled_pairs(cfg.model) else 1,
    )
