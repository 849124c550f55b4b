# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a reward model: on pairs of texts, or on texts with labels.

    python train_reward_model.py pretrained_checkpoint.restore_from_path=sft.nemo \
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
trained on. One process per device: with `trainer.devices=N` plain `python` starts them itself;
torchrun and srun work as well. The same command resumes from the last checkpoint in
`exp_manager.explicit_log_dir`. Keys: conf/training_rm.yaml, docs/config.md.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config, complete_model, drop_unset
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.command_line import hydra_runner
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
    from torch.utils.data import DataLoader

    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel


@hydra_runner(config_path="conf", config_name="training_rm")
@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, "training_rm")
    check_config(cfg, "training_rm")
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo.utils import logging

        from nemo_aligner.algorithms.supervised import SupervisedTrainer
        from nemo_aligner.launch.experiment import (
            build_checkpoint_callback,
            load_trainer_state,
            run_timer,
            start_job,
        )
        from nemo_aligner.launch.model_loading import load_and_override_model_config
        from nemo_aligner.models.nlp.gpt.reward_model_classes import (
            held_out_text,
            reward_model_class,
            reward_model_type,
        )
        from nemo_aligner.training.schedule import supervised_max_steps

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = (
        drop_unset(cfg.model) if base is None else load_and_override_model_config(base, cfg.model)
    )
    cfg.model = complete_model(cfg.model, "training_rm")
    model_class = reward_model_class(cfg.model.reward_model_type)
    model_class.check_training_config(cfg.model)
    job = start_job(cfg, "rm")

    model = build_model(cfg, model_class, job.trainer)
    model.init_peft(cfg.model.peft)
    train_dataloader, val_dataloaders, test_dataloader = build_dataloaders(cfg, model.tokenizer)
    optimizer, scheduler = model.setup_megatron_optimization(
        max_steps=supervised_max_steps(cfg.trainer.rm, train_dataloader)
    )
    ckpt_callback = build_checkpoint_callback(cfg, job.log_dir, model, optimizer, scheduler)
    job.logger.log_hyperparams(OmegaConf.to_container(cfg))
    rm_trainer = SupervisedTrainer(
        cfg=cfg.trainer.rm,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=train_dataloader,
        val_dataloader=val_dataloaders,
        test_dataloader=test_dataloader,
        logger=job.logger,
        ckpt_callback=ckpt_callback,
        run_timer=run_timer(cfg),
    )
    state = load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        rm_trainer.load_state_dict(state)
    rm_trainer.fit()
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


def build_dataloaders(
    cfg: DictConfig, tokenizer: "TokenizerSpec"
) -> tuple["DataLoader", dict[str, "DataLoader"], "DataLoader | None"]:
    """Loaders for training, for each validation set by name, and for the test set or None."""
    from nemo_aligner.data.nlp.builders import (
        build_dataloader,
        build_train_valid_test_labelled_pair_datasets,
        build_train_valid_test_regression_rm_datasets,
        build_train_valid_test_rm_datasets,
    )
    from nemo_aligner.models.nlp.gpt.reward_model_classes import (
        RewardModelType,
        learns_labelled_pairs,
    )

    build_datasets = {
        RewardModelType.BINARY_RANKING: build_train_valid_test_rm_datasets,
        RewardModelType.REGRESSION: build_train_valid_test_regression_rm_datasets,
    }[RewardModelType(cfg.model.reward_model_type)]
    samples_per_item = 1
    if learns_labelled_pairs(cfg.model):
        # The sizes of batches count samples, an item of the data set is a pair of them.
        build_datasets, samples_per_item = build_train_valid_test_labelled_pair_datasets, 2
    data = cfg.model.data
    train_ds, validation_ds, test_ds = build_datasets(
        cfg=cfg.model,
        data_prefix=data.data_prefix,
        data_impl=data.data_impl,
        splits_string=data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=data.seq_length,
        seed=cfg.model.seed,
        tokenizer=tokenizer,
    )

    def dataloader(dataset, random: bool, drop_last: bool) -> "DataLoader":
        return build_dataloader(
            cfg,
            dataset,
            consumed_samples=0,
            mbs=cfg.model.micro_batch_size // samples_per_item,
            gbs=cfg.model.global_batch_size // samples_per_item,
            drop_last=drop_last,
            pad_samples_to_global_batch_size=not drop_last,
            use_random_sampler=random,
        )

    validation_sets = (
        validation_ds if isinstance(validation_ds, dict) else {"validation": validation_ds}
    )
    validation = {
        name: dataloader(dataset, cfg.trainer.rm.val_random_sampler, data.validation_drop_last)
        for name, dataset in validation_sets.items()
        if dataset is not None
    }
    test = None if test_ds is None else dataloader(test_ds, False, data.validation_drop_last)
    train = dataloader(train_ds, cfg.trainer.rm.train_random_sampler, drop_last=True)
    return train, validation, test


if __name__ == "__main__":
    main()
