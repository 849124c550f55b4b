# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What all jobs that learn from labelled data do: build their data loaders, train, resume."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch.utils.data import DataLoader

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.builders import Datasets, build_configured_datasets, build_dataloader
from nemo_aligner.launch.experiment import Job, load_trainer_state, run_timer, set_up_training
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.schedule import supervised_max_steps


class Loaders(NamedTuple):
    """Each yields this rank's share of global batches.

    Attributes:
        train: of the training data.
        validation: by name of the set; may be empty.
        test: None if there are no test data.
    """

    train: DataLoader[Any]
    validation: Mapping[str, DataLoader[Any]]
    test: DataLoader[Any] | None


def build_dataloaders(
    cfg: DictConfig,
    build: Callable[..., Datasets],
    tokenizer: Tokenizer,
    *,
    train_random: bool = True,
    validation_random: bool = False,
    samples_per_item: int = 1,
) -> Loaders:
    """Loaders of the data that `model.data.data_prefix` names.

    Args:
        cfg, build, tokenizer: as for `builders.build_configured_datasets`. Datasets whose items
            make no batch by themselves have a `collate_fn`.
        train_random, validation_random: shuffle. The test data keep their order.
        samples_per_item: how many of the samples that `model.micro_batch_size` and
            `model.global_batch_size` count an item of the datasets holds.
    """
    train, validation, test = build_configured_datasets(cfg, build, tokenizer)

    def loader(dataset: Any, random: bool, drop_last: bool) -> DataLoader[Any]:
        return build_dataloader(
            cfg,
            dataset,
            consumed_samples=0,  # the trainer says where to go on
            mbs=cfg.model.micro_batch_size // samples_per_item,
            gbs=cfg.model.global_batch_size // samples_per_item,
            drop_last=drop_last,
            pad_samples_to_global_batch_size=not drop_last,
            use_random_sampler=random,
            collate_fn=getattr(dataset, "collate_fn", None),
        )

    sets = validation if isinstance(validation, dict) else {"validation": validation}
    drop_last = cfg.model.data.validation_drop_last
    return Loaders(
        train=loader(train, train_random, drop_last=True),
        validation={
            name: loader(dataset, validation_random, drop_last)
            for name, dataset in sets.items()
            if dataset is not None
        },
        test=None if test is None else loader(test, False, drop_last),
    )


def train_supervised(
    cfg: DictConfig,
    job: Job,
    model: MegatronGPTModel,
    loaders: Loaders,
    trainer_class: type[SupervisedTrainer] = SupervisedTrainer,
) -> SupervisedTrainer:
    """Train `model` from where the last checkpoint stands to the end; all ranks call it.

    Args:
        cfg: the whole configuration.
        model: with its initial weights, adapters and reference policy.
        trainer_class: its settings are the section `job.section` of `cfg.trainer`.

    Returns:
        The trainer, whose `held_out` has the last validation.

    Raises:
        JobStopped: after a save, at the time limit or a signal.
    """
    settings = cfg.trainer[job.section]
    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg, job, model, max_steps=supervised_max_steps(settings, loaders.train)
    )
    trainer = trainer_class(
        cfg=settings,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=loaders.train,
        val_dataloader=loaders.validation,
        test_dataloader=loaders.test,
        logger=job.logger,
        ckpt_callback=ckpt_callback,
        run_timer=run_timer(cfg),
    )
    state = load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.fit()
    return trainer
