# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration to datasets and data loaders, at NeMo-Aligner's module path."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.data_rules import (
    PARTS,
    check_data_impl,
    check_labels_can_be_read,
    check_parts,
    check_prompts_can_be_read,
    holds_tokens,
)
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.inert_keys import check_later
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.jobs.reward_model import (
    RewardModelType,
    learns_labelled_pairs,
    reward_model_type,
)
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat import begins_with_conversation, chat_form, say_default
from nemo_aligner.data.nlp.data_files import CHUNK_ID, DataFile, data_paths
from nemo_aligner.data.nlp.datasets import (
    DPOModelDataset,
    KTOModelDataset,
    LabelledPairDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    RewardModelDataset,
)
from nemo_aligner.data.nlp.file_dataset import FileDataset, blend
from nemo_aligner.data.nlp.packing import PackedDataset
from nemo_aligner.data.nlp.prompts import (
    RLHFDataset,
    check_pad_to_length,
    collate_with_batch_max_sequence_length,
    collate_with_pad_to_max_batch,
    identity_collate,
    single_validation_set,
)
from nemo_aligner.data.nlp.records import Records
from nemo_aligner.data.nlp.samplers import (
    BatchSampler,
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from nemo_aligner.data.nlp.sft import SFTChatDataset, SFTDataset
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.data.nlp.steerlm import SteerLM2Dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset
from nemo_aligner.parallel import parallel_state
from nemo_aligner.training.stop_requests import ignore_signals

__all__ = [
    "build_dataloader",
    "build_dataset_generic",
    "build_sft_dataset",
    "build_steerlm2_dataset",
    "build_train_valid_test_dpo_datasets",
    "build_train_valid_test_knowledge_distillation_datasets",
    "build_train_valid_test_kto_datasets",
    "build_train_valid_test_labelled_pair_datasets",
    "build_train_valid_test_response_datasets",
    "build_train_valid_test_datasets",
    "build_train_valid_test_regression_rm_datasets",
    "build_train_valid_test_rlhf_datasets",
    "build_train_valid_test_rm_datasets",
    "datasets_of_job",
    "check_pad_to_length",
    "collate_with_batch_max_sequence_length",
    "collate_with_pad_to_max_batch",
    "identity_collate",
    "single_validation_set",
]

# (train, validation, test); validation is a dict where there are several sets.
Datasets = tuple[Any, Any, Any]


class MakeDataset(Protocol):
    """Makes one dataset of the files `paths`."""

    def __call__(
        self,
        *,
        paths: list[DataFile],
        cfg: DictConfig,
        tokenizer: Tokenizer,
        seq_length: int,
        name: str,
    ) -> FileDataset:
        """`cfg` is the section `model`, `name` that of the dataset for messages."""


def _make_rlhf_dataset(
    paths: list[DataFile], cfg: DictConfig, tokenizer: Tokenizer, seq_length: int, name: str
) -> RLHFDataset:
    """Prompts of at most `seq_length - length_params.max_length` tokens, so that responses fit."""
    limit, reason = seq_length // 2, "half of it, as there is no length_params.max_length"
    sections = {"model.": cfg}
    sections |= {f"model.{kind}.": cfg.get(kind) for kind in ("reinforce", "rs", "ppo")}
    for key, section in sections.items():
        max_length = ((section or {}).get("length_params") or {}).get("max_length")
        if max_length is not None:
            limit = seq_length - max_length
            reason = f"less {key}length_params.max_length={max_length}"
    text = f"{limit} tokens (model.data.seq_length={seq_length}, {reason})"
    if limit <= 0:
        raise ConfigError(
            f"no room for prompts: the limit is {text}. Lower length_params.max_length."
        )
    return RLHFDataset(paths, tokenizer, limit, cfg.get("data"), name, limit_text=text)


def _maker(dataset: Callable[..., FileDataset]) -> MakeDataset:
    """What makes datasets of a class that is made of files, tokenizer, length and `model.data`."""

    def make(
        paths: list[DataFile], cfg: DictConfig, tokenizer: Tokenizer, seq_length: int, name: str
    ) -> FileDataset:
        return dataset(paths, tokenizer, seq_length, cfg.get("data"), name)

    return make


_make_rm_dataset = _maker(RewardModelDataset)
_make_dpo_dataset = _maker(DPOModelDataset)
_make_kto_dataset = _maker(KTOModelDataset)
_make_response_dataset = _maker(ResponseDataset)
_make_distillation_dataset = _maker(KnowledgeDistillationDataset)


def _make_regression_rm_dataset(
    paths: list[DataFile], cfg: DictConfig, tokenizer: Tokenizer, seq_length: int, name: str
) -> RegressionRewardModelDataset:
    given = complete(cfg.get("regression"), "training_rm", "model.regression")
    numbers, data = (given.num_attributes, given.loss_mask_val), cfg.get("data")
    return RegressionRewardModelDataset(paths, tokenizer, seq_length, *numbers, data, name)


def _make_labelled_pair_dataset(
    paths: list[DataFile], cfg: DictConfig, tokenizer: Tokenizer, seq_length: int, name: str
) -> LabelledPairDataset:
    given = complete(cfg.get("regression"), "training_rm", "model.regression")
    mask_value, data = given.loss_mask_val, cfg.get("data")
    return LabelledPairDataset(paths, tokenizer, seq_length, mask_value, data, name)


def build_train_valid_test_datasets(
    cls: MakeDataset,
    cfg: DictConfig,
    data_prefix: Mapping[str, Any] | Sequence[str] | str,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    n_chunks: int | None = None,
    n_examples_per_chunk: int | None = None,
) -> Datasets:
    """Build (train, validation, test) datasets.

    Args:
        cls: makes one dataset; a class is one with NeMo-Aligner's constructor.
        data_prefix: mapping with the files (one path or a list) of `train`, `validation` and
            `test`, of which the last two are optional; or one path or list that `splits_string`
            divides. A list of weights and paths in turn, [0.3, a, 0.7, b], blends the files.
        data_impl: form of the files, one of `data_rules.DATA_IMPLS`.
        splits_string: weights of the three contiguous parts of one common list of files, for
            example "98,1,1".
        train_valid_test_num_samples: use at most so many samples of each; below 1 means all. A
            blend has exactly so many, or as many as its files together.
        seed, n_chunks, n_examples_per_chunk: not used (samplers shuffle; there are no chunks).

    Returns:
        One entry is None where there are no files. With further keys `validation_<name>`, the
        validation entry is a dict from key to dataset.

    Raises:
        ConfigError: `data_prefix`, `data_impl` or `splits_string` cannot be used.
    """
    check_data_impl(data_impl)
    if cls in (_make_regression_rm_dataset, _make_labelled_pair_dataset):
        check_labels_can_be_read(data_impl)
    if cls in (_make_dpo_dataset, _make_kto_dataset, _make_response_dataset):
        check_prompts_can_be_read(data_impl)
    if data_prefix is None or not len(data_prefix):
        raise ConfigError(
            "model.data.data_prefix is not set: give {train: [file.jsonl], validation: "
            "[file.jsonl]}."
        )
    limits = dict(zip(PARTS, train_valid_test_num_samples, strict=True))
    cfg = copy.deepcopy(cfg)
    OmegaConf.update(cfg, "data.data_impl", data_impl, force_add=True)
    if holds_tokens(data_impl) and cfg.data.get("append_eod"):
        logging.warning(
            f"model.data.append_eod=True has no effect with data_impl={data_impl}: tokens are "
            "used as they are."
        )
    make = partial(
        dataset_maker(cls, data_impl, seed), cfg=cfg, tokenizer=tokenizer, seq_length=seq_length
    )
    if not isinstance(data_prefix, Mapping | DictConfig):
        return _split_common_files(make, data_prefix, splits_string, limits)
    if splits_string is not None:
        logging.warning(
            "model.data.splits_string has no effect: model.data.data_prefix names the files of "
            "each part."
        )
    return _separate_files(make, data_prefix, limits)


def _split_common_files(
    make: Callable[..., FileDataset],
    files: Sequence[str] | str,
    splits_string: str | None,
    limits: Mapping[str, int],
) -> Datasets:
    """Divide the documents of one list of files among training, validation and test."""
    paths, weights = data_paths(files, "model.data.data_prefix")
    if splits_string is None:
        raise ConfigError(
            f"model.data.data_prefix={files} names files for all of training, validation and "
            'test: say how to divide them with model.data.splits_string="98,1,1", or give '
            "separate files: {train: [...], validation: [...]}."
        )
    whole = make(paths=paths, name="all")
    if not isinstance(whole, FileDataset):
        raise ConfigError(
            f"model.data.splits_string cannot divide a {type(whole).__name__}: give separate "
            "files in model.data.data_prefix, {train: [...], validation: [...]}."
        )
    if weights is not None:
        _check_can_blend(whole, weights)
    # A blend divides each of its files, so that each part has all of them.
    pieces = [whole.documents] if weights is None else whole.documents_by_file()
    bounds = [_split(len(piece), str(splits_string)) for piece in pieces]
    datasets: list[FileDataset | None] = []
    for part, name in enumerate(PARTS):
        chosen = [
            piece[ends[part] : ends[part + 1]] for piece, ends in zip(pieces, bounds, strict=True)
        ]
        shares = weights
        if weights is not None and name != "train":  # small files may have no sample for it
            left = [number for number, piece in enumerate(chosen) if len(piece)]
            chosen, shares = [chosen[n] for n in left], [weights[n] for n in left]
        dataset = None
        if sum(map(len, chosen)):
            dataset = whole.select(_mixed(chosen, shares, limits[name], paths))
            dataset.name = name
        datasets.append(dataset)
    train, validation, test = datasets
    return train, validation, test


def _separate_files(
    make: Callable[..., FileDataset], files: Mapping[str, Any], limits: Mapping[str, int]
) -> Datasets:
    """Build one dataset for each key of `files`."""
    check_parts(files)
    built = {}
    for key, paths in files.items():
        if paths is not None and len(paths):
            names, weights = data_paths(paths, f"model.data.data_prefix.{key}")
            dataset = make(paths=names, name=key)
            limit = limits[key if key in limits else "validation"]
            built[key] = _blended(dataset, weights, limit)
    validation = {key: dataset for key, dataset in built.items() if key.startswith("validation")}
    if set(validation) <= {"validation"}:
        return built["train"], validation.get("validation"), built.get("test")
    return built["train"], validation, built.get("test")


build_train_valid_test_rlhf_datasets = partial(build_train_valid_test_datasets, _make_rlhf_dataset)
build_train_valid_test_rm_datasets = partial(build_train_valid_test_datasets, _make_rm_dataset)
build_train_valid_test_dpo_datasets = partial(build_train_valid_test_datasets, _make_dpo_dataset)
build_train_valid_test_kto_datasets = partial(build_train_valid_test_datasets, _make_kto_dataset)
build_train_valid_test_regression_rm_datasets = partial(
    build_train_valid_test_datasets, _make_regression_rm_dataset
)
build_train_valid_test_labelled_pair_datasets = partial(
    build_train_valid_test_datasets, _make_labelled_pair_dataset
)


def build_train_valid_test_knowledge_distillation_datasets(
    cfg: DictConfig,
    data_prefix: Mapping[str, Any] | Sequence[str] | str,
    data_impl: str,
    *args: Any,
    make: MakeDataset = _make_distillation_dataset,
    n_chunks: int | Mapping[str, int] | None = None,
    n_examples_per_chunk: int | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> Datasets:
    """`build_train_valid_test_datasets` of examples with the logits of a teacher. A name of a file
    with CHUNK_ID, as in NeMo-Aligner, stands for the files 0 to `n_chunks` - 1.

    Args:
        data_impl: also NeMo-Aligner's chunked_jsonl, the same as jsonl: data are read from disk.
        make: another kind of dataset.
        n_chunks: files of a name with CHUNK_ID; one number, or that of each part.
        n_examples_per_chunk: not used: the files say it.
    """

    def chunks(names: Any, part: str) -> Any:
        if not any(CHUNK_ID in str(name) for name in names):
            return names
        count = n_chunks if isinstance(n_chunks, int) else (n_chunks or {}).get(part)
        if not count:
            raise ConfigError(
                f"model.data.data_prefix.{part} has names with {CHUNK_ID}, but "
                f"model.data.n_chunks={n_chunks} does not say how many files these are."
            )
        return [
            str(name).replace(CHUNK_ID, str(n))
            for name in names
            for n in range(count if CHUNK_ID in str(name) else 1)
        ]

    if isinstance(data_prefix, Mapping | DictConfig):
        data_prefix = {
            part: None
            if names is None
            else chunks([names] if isinstance(names, str) else names, part)
            for part, names in data_prefix.items()
        }
    elif data_prefix is not None:
        names = [data_prefix] if isinstance(data_prefix, str) else data_prefix
        data_prefix = chunks(names, "train")
    return build_train_valid_test_datasets(
        make,
        cfg,
        data_prefix,
        "jsonl" if data_impl == "chunked_jsonl" else data_impl,
        *args,
        **kwargs,
    )


build_train_valid_test_response_datasets = partial(
    build_train_valid_test_knowledge_distillation_datasets, make=_make_response_dataset
)


def datasets_of_job(config_name: str, model: DictConfig) -> Callable[..., Datasets]:
    """What builds the datasets of a job that reads `model.data.data_prefix`, by what their records
    hold.

    Args:
        model: its complete section `model`.
    """
    records = JOBS[config_name].records
    if records == "logits":
        build: Callable[..., Datasets] = build_train_valid_test_response_datasets
        if model.knowledge_distillation.on_policy.fraction is None:
            build = build_train_valid_test_knowledge_distillation_datasets
        return partial(build, n_chunks=model.data.n_chunks)
    if records == "scored":
        if learns_labelled_pairs(model):
            return build_train_valid_test_labelled_pair_datasets
        if reward_model_type(model.reward_model_type) is RewardModelType.REGRESSION:
            return build_train_valid_test_regression_rm_datasets
        return build_train_valid_test_rm_datasets
    return {
        "prompt": build_train_valid_test_rlhf_datasets,
        "pair": build_train_valid_test_dpo_datasets,
        "labelled": build_train_valid_test_kto_datasets,
    }[records]


def build_configured_datasets(
    cfg: DictConfig, build: Callable[..., Datasets], tokenizer: Tokenizer
) -> Datasets:
    """(train, validation, test) datasets from the section `model.data`.

    Args:
        build: one of the functions `build_train_valid_test_*_datasets`.
    """
    data = cfg.model.data
    return build(
        cfg=cfg.model,
        data_prefix=data.data_prefix,
        data_impl=data.data_impl,
        splits_string=data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=data.seq_length,
        seed=cfg.model.seed,
        tokenizer=tokenizer,
    )


def build_sft_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    answer_only_loss: bool = True,
    is_chat: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    model_cfg: DictConfig | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    one_turn_per_sample: bool = False,
    chat_date: str | None = None,
    allow_empty_prompt: bool | None = False,
) -> SFTDataset | SFTChatDataset | PackedDataset:
    """Build the dataset of `model.data.train_ds` or `validation_ds`: prompts with their responses,
    or conversations.

    Args:
        data_cfg: `file_path` (one, a list, or a list of weights and files in turn: a blend),
            `max_seq_length`, and optionally `prompt_template`, `label_key`, `truncation_field`,
            `truncation_method`, `add_bos`, `add_eos`, `pad_to_max_length`, `columns`,
            `index_mapping_dir`, `packed_sequence`. For conversations the templates, the
            truncation, bos and eos are not read: their form says how they begin and end.
        num_samples: use at most so many samples; None or below 1 means all.
        answer_only_loss: train on the response only, not on the prompt.
        is_chat, special_tokens: `model.data.chat` and `chat_prompt_tokens` (None: NeMo's).
        model_cfg: section `model` (NeMo-Aligner's argument); nothing of it is needed.
        others: of `model.data`.

    Raises:
        ConfigError: no files, or something that is not supported.
    """
    section = {key: data_cfg.get(key) for key in data_cfg}
    check_later(Values({"model": {"data": {"train_ds": section}}}), "gpt_sft")
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    chat = {"chat": is_chat, "chat_prompt_tokens": special_tokens, "chat_template": chat_template}
    chat |= {"chat_template_kwargs": chat_template_kwargs, "chat_date": chat_date}
    chat |= {"one_turn_per_sample": one_turn_per_sample}
    form = chat_form(chat, tokenizer)
    if form is not None and form.default:
        if begins_with_conversation(paths[0], data_cfg):
            say_default(form.default)
        else:
            form = None
    options: dict[str, Any] = {
        "max_seq_length": data_cfg.max_seq_length,
        "answer_only_loss": answer_only_loss,
        "pad_to_max_length": bool(data_cfg.get("pad_to_max_length")),
        "columns": data_cfg.columns,
        "index_mapping_dir": data_cfg.index_mapping_dir,
        "allow_empty_prompt": bool(allow_empty_prompt),
    }
    if form is not None:
        options["one_turn_per_sample"] = one_turn_per_sample
        dataset: Any = SFTChatDataset(paths, tokenizer, form, **options)
    else:
        names = "prompt_template label_key truncation_field truncation_method add_bos".split()
        options |= {name: data_cfg[name] for name in names}
        options |= {"add_eos": bool(data_cfg.add_eos)}
        options |= {"keep_lengths": bool(data_cfg.packed_sequence)}
        dataset = SFTDataset(paths, tokenizer, **options)
    dataset = _blended(dataset, weights, num_samples)
    return PackedDataset(dataset) if data_cfg.packed_sequence else dataset


def build_steerlm2_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> SteerLM2Dataset:
    """Build the dataset of `model.data.train_ds` or `validation_ds` of SteerLM 2.0.

    Args:
        data_cfg: `file_path` (as for `build_sft_dataset`), `max_seq_length`, and optionally
            `pad_to_max_length`, `columns` and `index_mapping_dir`.
        num_samples: use at most so many prompts; None or below 1 means all.
        special_tokens: `model.data.chat_prompt_tokens`; None: those of NeMo.

    Raises:
        ConfigError: no files.
        UserError: a broken line; names the file and the line.
    """
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    dataset = SteerLM2Dataset(
        paths,
        tokenizer,
        max_seq_length=data_cfg.max_seq_length,
        special_tokens=special_tokens,
        pad_to_max_length=bool(data_cfg.get("pad_to_max_length")),
        columns=data_cfg.columns,
        index_mapping_dir=data_cfg.index_mapping_dir,
    )
    built: SteerLM2Dataset = _blended(dataset, weights, num_samples)
    return built


def _blended(dataset: Any, weights: Sequence[float] | None, num_samples: int | None) -> Any:
    """The first `num_samples` of a dataset, or so many of the blend of its files; None or below 1:
    as many as there are.
    """
    if weights is None:
        return _limit(dataset, num_samples)
    _check_can_blend(dataset, weights)
    return dataset.select(
        _mixed(dataset.documents_by_file(), weights, num_samples, dataset.lines.paths)
    )


def _check_can_blend(dataset: Any, weights: Sequence[float]) -> None:
    """Raise `ConfigError` unless the dataset knows which sample is of which file: one that was
    built with NeMo-Aligner's constructor has all of them in one.
    """
    if not isinstance(dataset, FileDataset) or len(dataset.lines.paths) != len(weights):
        raise ConfigError(
            f"model.data.data_prefix has weights, but a {type(dataset).__name__} that is built by "
            "its class cannot be a blend of files; give them without weights, or use the "
            "functions build_train_valid_test_*_datasets."
        )


def _mixed(
    pieces: list[np.ndarray],
    weights: Sequence[float] | None,
    num_samples: int | None,
    paths: Sequence[Any],
) -> np.ndarray:
    """Documents of a blend of `pieces`, one per file; without weights of the only piece."""
    if weights is None:
        return pieces[0][:num_samples] if num_samples and num_samples > 0 else pieces[0]
    for piece, path in zip(pieces, paths):
        if not len(piece):
            raise ConfigError(
                f"model.data.data_prefix blends {path}, of which no sample is left for this part."
            )
    total = sum(map(len, pieces))
    return blend(pieces, weights, num_samples if num_samples and num_samples > 0 else total)


def _split(size: int, splits_string: str) -> list[int]:
    """Four bounds that cut range(size) in three parts, in proportion to "98,1,1" (or "98/1/1").

    Missing weights are 0.
    """
    try:
        weights = [float(part) for part in splits_string.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(
            f"model.data.splits_string={splits_string!r}: three weights are needed, for example "
            '"98,1,1".'
        )
    weights += [0.0] * (3 - len(weights))
    return [round(size * total / sum(weights)) for total in np.cumsum([0.0, *weights])]


def _limit(dataset: Any, num_samples: int | None) -> Any:
    """The first `num_samples` of a dataset; None or below 1: all of it."""
    if dataset is None or num_samples is None or num_samples < 1 or num_samples >= len(dataset):
        return dataset
    return dataset.select(dataset.documents[:num_samples])


def build_dataloader(
    cfg: DictConfig,
    dataset: torch.utils.data.Dataset[Any],
    consumed_samples: int,
    mbs: int,
    gbs: int,
    drop_last: bool = True,
    pad_samples_to_global_batch_size: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    load_gbs: bool = True,
    use_random_sampler: bool = True,
) -> torch.utils.data.DataLoader[Any]:
    """Build a data loader for this data-parallel rank that starts after `consumed_samples`.

    Args:
        cfg: complete configuration; `model.seed` and `model.data.num_workers` are read.
        consumed_samples: samples that all ranks together have used.
        drop_last, pad_samples_to_global_batch_size: see `samplers.py`.
        load_gbs: yield this rank's share of a global batch; False yields micro-batches.
        use_random_sampler: shuffle, with a new permutation in each epoch.
    """
    sampler_classes: dict[tuple[bool, bool], type[BatchSampler]] = {
        (True, True): MegatronPretrainingRandomBatchSampler,
        (True, False): MegatronPretrainingRandomSampler,
        (False, True): MegatronPretrainingBatchSampler,
        (False, False): MegatronPretrainingSampler,
    }
    batch_sampler = sampler_classes[bool(use_random_sampler), bool(load_gbs)](
        total_samples=len(dataset),  # type: ignore[arg-type]  # torch's class has no __len__
        consumed_samples=consumed_samples,
        micro_batch_size=mbs,
        global_batch_size=gbs,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        drop_last=drop_last,
        pad_samples_to_global_batch_size=pad_samples_to_global_batch_size,
        seed=cfg.model.seed,
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=cfg.model.data.num_workers,
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate_fn,
        worker_init_fn=ignore_signals,
        # Each new iterator of a loader draws a seed: from this generator, not from the global one,
        # on which the training depends.
        generator=torch.Generator().manual_seed(cfg.model.seed),
    )


def build_dataset_generic(
    cls: Callable[..., Any],
    cfg: DictConfig,
    data_prefix: Sequence[Any],
    data_impl: str,
    num_samples: int,
    seq_length: int,
    seed: int,
    tokenizer: Any,
    name: str,
    n_chunks: int | None = None,
    n_examples_per_chunk: int | None = None,
) -> Any:
    """A dataset of a class with NeMo-Aligner's constructor, from the files `data_prefix`.

    Args:
        num_samples, n_chunks, n_examples_per_chunk: not used: the class sees all records (there
            are no chunks).

    Raises:
        ConfigError: another `data_impl`.
        UserError: a file is missing or empty, or a line is broken; names the file and the line.
    """
    if not str(data_impl).startswith("json"):
        raise ConfigError(
            f"model.data.data_impl={data_impl}: a dataset class of one's own is built from "
            "records, not from files of tokens. Convert the data to jsonl."
        )
    records: list[Record] = []

    def keep(record: Record) -> int:
        records.append(record)
        return 0

    Records(data_prefix, [], keep, columns=cfg.data.get("columns"))
    return cls(
        cfg=cfg,
        tokenizer=tokenizer,
        name=name,
        data_prefix=str(data_prefix[0]),
        documents=np.arange(len(records), dtype=np.int32),
        data=records,
        seq_length=seq_length,
        seed=seed,
        drop_last=name != "validation" or cfg.data.get("validation_drop_last", True),
    )


def dataset_maker(cls: Callable[..., Any], data_impl: str, seed: int) -> Callable[..., Any]:
    """What `build_train_valid_test_datasets` calls with `paths`: a function as it is, a class by
    NeMo-Aligner's constructor.
    """
    if not isinstance(cls, type):
        return cls

    def make(*, paths: list[Any], cfg: Any, tokenizer: Any, seq_length: int, name: str) -> Any:
        return build_dataset_generic(
            cls, cfg, paths, data_impl, -1, seq_length, seed, tokenizer, name
        )

    return make


__getattr__ = retired_names(__name__)
