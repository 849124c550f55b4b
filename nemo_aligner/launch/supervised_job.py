# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What all jobs that learn from labelled data do: build their data loaders, train, resume."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch.utils.data import DataLoader

from nemo_aligner.algorithms.reference_log_probs import with_reference_log_probs
from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.config.jobs import JOBS, supervised
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import builders, datasets
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.sft import build_sft_dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset
from nemo_aligner.launch import experiment
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.optim import build_scheduler
from nemo_aligner.training.schedule import supervised_max_steps


class Loaders(NamedTuple):
    """Each yields this rank's share of global batches."""

    train: DataLoader[Any]
    validation: Mapping[str, DataLoader[Any]]
    test: DataLoader[Any] | None


def build_dataloaders(
    cfg: DictConfig,
    build: Callable[..., builders.Datasets],
    tokenizer: Tokenizer,
    *,
    train_random: bool = True,
    validation_random: bool = False,
    samples_per_item: int = 1,
    prepare: Callable[[Any, str], Any] = lambda dataset, name: dataset,
) -> Loaders:
    """Loaders of the data that `model.data.data_prefix` names.

    Args:
        build: as for `builders.build_configured_datasets`.
        train_random, validation_random: shuffle. The test data keep their order.
        samples_per_item: samples, as batch sizes count them, of an item of the datasets.
        prepare: (dataset, name of the set) to what the loader reads in its place.
    """
    train, validation, test = builders.build_configured_datasets(cfg, build, tokenizer)
    sets = validation if isinstance(validation, dict) else {"validation": validation}
    train, test = (
        None if dataset is None else prepare(dataset, name)
        for dataset, name in ((train, "train"), (test, "test"))
    )
    sets = {name: prepare(dataset, name) for name, dataset in sets.items() if dataset is not None}

    loader = partial(_loader, cfg, samples_per_item=samples_per_item)
    drop_last = cfg.model.data.validation_drop_last
    return Loaders(
        train=loader(train, train_random, drop_last=True),
        validation={
            name: loader(dataset, validation_random, drop_last) for name, dataset in sets.items()
        },
        test=None if test is None else loader(test, False, drop_last),
    )


def _loader(
    cfg: DictConfig,
    dataset: Any,
    random: bool,
    drop_last: bool,
    gbs: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    samples_per_item: int = 1,
) -> DataLoader[Any]:
    """`gbs` None: `model.global_batch_size`; `collate_fn` None: that of `dataset`, if any."""
    return builders.build_dataloader(
        cfg,
        dataset,
        consumed_samples=0,  # the trainer says where to go on
        mbs=cfg.model.micro_batch_size // samples_per_item,
        gbs=(gbs or cfg.model.global_batch_size) // samples_per_item,
        drop_last=drop_last,
        pad_samples_to_global_batch_size=not drop_last,
        use_random_sampler=random,
        collate_fn=collate_fn or getattr(dataset, "collate_fn", None),
    )


def datasets_of_job(config_name: str, model: DictConfig) -> Callable[..., builders.Datasets]:
    """What builds the datasets of a job that reads `model.data.data_prefix`."""
    records = JOBS[config_name].records
    cls: type[FileDataset] = datasets.RewardModelDataset
    if records == "logits":
        on_policy = model.knowledge_distillation.on_policy.fraction is not None
        cls = datasets.ResponseDataset if on_policy else KnowledgeDistillationDataset
        return partial(builders.build_train_valid_test_datasets, cls, n_chunks=model.data.n_chunks)
    if records != "scored":
        kinds: dict[str, type[FileDataset]] = {
            "prompt": RLHFDataset,
            "pair": datasets.DPOModelDataset,
            "labelled": datasets.KTOModelDataset,
        }
        cls = kinds[records]
    elif supervised.learns_labelled_pairs(model):
        cls = datasets.LabelledPairDataset
    elif model.reward_model_type == supervised.RewardModelType.REGRESSION.value:
        cls = datasets.RegressionRewardModelDataset
    return partial(builders.build_train_valid_test_datasets, cls)


def train_on_preferences(
    cfg: DictConfig, model_class: type[MegatronGPTModel], trainer_class: type[SupervisedTrainer]
) -> None:
    """The whole job of DPO or KTO."""
    job, model = experiment.start_with_model(cfg, model_class)
    # Before a checkpoint is resumed: the reference stays the model that the job started from.
    loaders = build_preference_dataloaders(cfg, job.section, model)
    train_supervised(cfg, job, model, loaders, trainer_class)


def build_preference_dataloaders(cfg: DictConfig, kind: str, model: Any) -> Loaders:
    """`build_dataloaders` for DPO or KTO (`kind`), with `model`, a `ReferencePolicyMixin`, at its
    present weights as reference. With `ref_log_probs_dir` the batches have its log-probs; without,
    `model` keeps a copy of its weights. All ranks call it, before a checkpoint is resumed.
    """
    build = datasets_of_job(f"gpt_{kind}", cfg.model)
    root = cfg.model[kind].ref_log_probs_dir
    if root is None:
        model.set_reference_policy()
        return build_dataloaders(cfg, build, model.tokenizer)
    checkpoint = Path(cfg.pretrained_checkpoint.restore_from_path).expanduser()

    def prepare(dataset: Any, name: str) -> Any:
        return with_reference_log_probs(model, dataset, Path(root), checkpoint, f"{kind}-{name}")

    return build_dataloaders(cfg, build, model.tokenizer, prepare=prepare)


def build_sft_dataloaders(
    cfg: DictConfig,
    tokenizer: Tokenizer,
    build: Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    answer_only_loss: bool = True,
) -> Loaders:
    """Loaders of `model.data.train_ds` and, if it has files, `validation_ds`.

    Args:
        build: makes a data set of (section, tokenizer); None: of prompts with responses, or of
            conversations, of which `answer_only_loss` trains on the responses only.
        collate_fn: of the training data, in place of its own.
    """
    data = cfg.model.data
    build = build or partial(build_sft_dataset, answer_only_loss=answer_only_loss, data=data)
    train, validation = data.train_ds, data.validation_ds
    dataset = build(train, tokenizer)
    train_loader = _loader(cfg, dataset, train.shuffle, drop_last=True, collate_fn=collate_fn)
    sets = {}
    if validation.file_path:
        dataset, gbs = build(validation, tokenizer), validation.global_batch_size
        sets["validation"] = _loader(cfg, dataset, validation.shuffle, validation.drop_last, gbs)
    return Loaders(train_loader, sets, test=None)


def train_supervised(
    cfg: DictConfig,
    job: experiment.Experiment,
    model: MegatronGPTModel,
    loaders: Loaders,
    trainer_class: Callable[..., SupervisedTrainer] = SupervisedTrainer,
) -> SupervisedTrainer:
    """Train `model`, with its initial weights, adapters and reference policy, from the last
    checkpoint to the end; all ranks call it. `JobStopped`: after a save, at the time limit or a
    signal.
    """
    settings = cfg.trainer[job.section]
    max_steps = supervised_max_steps(settings, loaders.train)
    parts = experiment.set_up_training(
        cfg, job, model, max_steps, loaders.train, bool(loaders.validation)
    )
    trainer = trainer_class(
        **parts,
        train_dataloader=loaders.train,
        val_dataloader=loaders.validation,
        test_dataloader=loaders.test,
        run_timer=experiment.run_timer(cfg),
        section=f"trainer.{job.section}",
    )
    ckpt_callback, optimizer = parts["ckpt_callback"], parts["optimizer"]
    state = experiment.load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        trainer.load_state_dict(state)
        if trainer.max_steps != max_steps:  # part of the data was used in batches of another size
            updates = parts["scheduler"].state_dict()
            scheduler = build_scheduler(optimizer, model.cfg.optim, trainer.max_steps)
            scheduler.load_state_dict(updates)
            trainer.scheduler = ckpt_callback.scheduler = scheduler
    trainer.fit()
    return trainer
