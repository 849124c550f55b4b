# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the data sets of each job, and to data loaders; at NeMo-Aligner's
module path.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.data_rules import PARTS, check_data_impl, check_parts, holds_tokens
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import prompts, samplers
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.records import CHUNK_ID, DataFile, Records, data_paths

# (train, validation, test); validation is a dict where there are several sets.
Datasets = tuple[Any, Any, Any]


def build_train_valid_test_datasets(
    cls: Any,
    cfg: DictConfig,
    data_prefix: Mapping[str, Any] | Sequence[str] | str,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    n_chunks: int | Mapping[str, int] | None = None,
    n_examples_per_chunk: int | Mapping[str, int] | None = None,
) -> Datasets:
    """Build (train, validation, test) datasets; None where there are no files. With further keys
    `validation_<name>` the validation entry is a dict from key to dataset. `ConfigError`:
    `data_prefix`, `data_impl` or `splits_string` cannot be used.

    Args:
        cls: of the datasets: one of ours, or one with NeMo-Aligner's constructor.
        cfg: section `model`.
        data_prefix: the files (one path or a list) of `train` and maybe `validation` and `test`;
            or one path or list that `splits_string` divides. A list of weights and paths in turn,
            [0.3, a, 0.7, b], blends the files.
        data_impl: one of `data_rules.DATA_IMPLS`, for distillation also chunked_jsonl.
        splits_string: weights of the three contiguous parts of one common list of files.
        train_valid_test_num_samples: use at most so many samples of each; below 1 means all. A
            blend has exactly so many, or as many as its files together.
        seed, n_examples_per_chunk: not used (samplers shuffle; files say what they hold).
        n_chunks: for distillation, files that CHUNK_ID stands for: a number, or one for each part.
    """
    if getattr(cls, "in_chunks", False):
        data_impl = "jsonl" if data_impl == "chunked_jsonl" else data_impl
        data_prefix = _with_chunks(data_prefix, n_chunks)
    check_data_impl(data_impl)
    is_ours = hasattr(cls.__init__, "also_takes")  # and so built of files, not of records
    if is_ours:
        cls.check_form(data_impl)
    if data_prefix is None or not len(data_prefix):
        raise ConfigError("model.data.data_prefix is not set: give {train: [file.jsonl], ...}.")
    limits = dict(zip(PARTS, train_valid_test_num_samples, strict=True))
    cfg = copy.deepcopy(cfg)
    OmegaConf.update(cfg, "data.data_impl", data_impl, force_add=True)
    if holds_tokens(data_impl) and cfg.data.get("append_eod"):
        logging.warning(f"model.data.append_eod=True has no effect with data_impl={data_impl}.")

    def make(paths: list[DataFile], name: str) -> Any:
        if is_ours:
            arguments = cls.arguments(cfg, seq_length)
            return cls(paths, tokenizer, data_cfg=cfg.data, name=name, **arguments)
        return build_dataset_generic(
            cls, cfg, paths, data_impl, -1, seq_length, seed, tokenizer, name
        )

    if not isinstance(data_prefix, Mapping | DictConfig):
        return _split_common_files(make, data_prefix, splits_string, limits)
    if splits_string is not None:
        logging.warning(
            "model.data.splits_string has no effect: data_prefix names the files of each part."
        )
    check_parts(data_prefix)
    built = {}
    for key, files in data_prefix.items():
        if files is not None and len(files):
            paths, weights = data_paths(files, f"model.data.data_prefix.{key}")
            limit = limits[key if key in limits else "validation"]
            built[key] = blended(make(paths, key), weights, limit)
    validation = {key: dataset for key, dataset in built.items() if key.startswith("validation")}
    several = set(validation) - {"validation"}
    return built["train"], validation if several else built.get("validation"), built.get("test")


def _with_chunks(data_prefix: Any, n_chunks: int | Mapping[str, int] | None) -> Any:
    """`data_prefix` with the files that names with CHUNK_ID stand for."""
    has_parts, found = isinstance(data_prefix, Mapping | DictConfig), dict[str, Any]()
    for part, names in (data_prefix if has_parts else {"train": data_prefix}).items():
        names = [names] if isinstance(names, str) else names
        if any(CHUNK_ID in str(name) for name in names or ()):
            count = n_chunks if isinstance(n_chunks, int) else (n_chunks or {}).get(part)
            if not count:
                raise ConfigError(
                    f"model.data.data_prefix.{part} has names with {CHUNK_ID}, but "
                    f"model.data.n_chunks={n_chunks} does not say how many files these are."
                )
            numbers = {name: range(count if CHUNK_ID in str(name) else 1) for name in names}
            names = [str(m).replace(CHUNK_ID, str(n)) for m in names for n in numbers[m]]
        found[part] = names
    return found if has_parts else found["train"]


def _split_common_files(
    make: Callable[..., Any],
    files: Sequence[str] | str,
    splits_string: str | None,
    limits: Mapping[str, int],
) -> Datasets:
    paths, weights = data_paths(files, "model.data.data_prefix")
    if splits_string is None:
        raise ConfigError(
            f"model.data.data_prefix={files} names files for all parts: divide them with "
            'model.data.splits_string="98,1,1", or give {train: [...], validation: [...]}.'
        )
    whole = make(paths, "all")
    if not isinstance(whole, FileDataset):
        raise ConfigError(
            f"model.data.splits_string cannot divide a {type(whole).__name__}: give "
            "model.data.data_prefix={train: [...], validation: [...]}."
        )
    # A blend divides each of its files, so that each part has all of them.
    pieces = _pieces(whole, weights)
    bounds = [_split(len(piece), str(splits_string)) for piece in pieces]
    datasets: dict[str, FileDataset] = {}
    for part, name in enumerate(PARTS):
        chosen = [
            piece[ends[part] : ends[part + 1]] for piece, ends in zip(pieces, bounds, strict=True)
        ]
        # Small files may have no sample for validation and test.
        kept = [n for n, piece in enumerate(chosen) if len(piece) or name == "train"]
        shares = None if weights is None else [weights[n] for n in kept]
        if sum(map(len, chosen)):
            documents = _mixed([chosen[n] for n in kept], shares, limits[name], paths)
            datasets[name] = whole.select(documents)
            datasets[name].name = name
    return datasets.get("train"), datasets.get("validation"), datasets.get("test")


def build_configured_datasets(
    cfg: DictConfig, build: Callable[..., Datasets], tokenizer: Tokenizer
) -> Datasets:
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


def blended(dataset: Any, weights: Sequence[float] | None, num_samples: int | None) -> Any:
    """The first `num_samples` (None, below 1: all) of a dataset, or of the blend of its files."""
    if weights is None and not 0 < (num_samples or 0) < len(dataset):
        return dataset
    pieces = _pieces(dataset, weights)
    return dataset.select(_mixed(pieces, weights, num_samples, dataset.lines.paths))


def _pieces(dataset: Any, weights: Sequence[float] | None) -> list[np.ndarray]:
    """The documents of a dataset; where there are weights, those of each file."""
    if weights is None:
        return [dataset.documents]
    if not isinstance(dataset, FileDataset):
        raise ConfigError(
            f"model.data.data_prefix has weights, but a {type(dataset).__name__} that is built by "
            "its class cannot be a blend of files; give them without weights."
        )
    lines = dataset.documents * dataset.lines_per_document
    files = np.searchsorted(dataset.lines.first_of_file, lines, side="right")
    return [dataset.documents[files == n] for n in range(1, len(weights) + 1)]


def _mixed(
    pieces: list[np.ndarray],
    weights: Sequence[float] | None,
    num_samples: int | None,
    paths: Sequence[Any],
) -> np.ndarray:
    """Documents of a blend of `pieces`, one per file; without weights of the only piece."""
    size = num_samples if num_samples and num_samples > 0 else sum(map(len, pieces))
    if weights is None:
        return pieces[0][:size]
    for piece, path in zip(pieces, paths):
        if not len(piece):
            raise ConfigError(
                f"model.data.data_prefix blends {path}, of which no sample is left for this part."
            )
    return blend(pieces, weights, size)


def blend(by_file: list[np.ndarray], weights: Sequence[float], size: int) -> np.ndarray:
    """int64 [size]: documents of several files in proportion to `weights`, at each position of the
    file that is furthest behind its share. One that is too small starts again.
    """
    from megatron.core.datasets import helpers

    file_of, number_in_file = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    shares = np.array(weights, dtype=np.float64)
    helpers.build_blending_indices(
        file_of, number_in_file, shares / shares.sum(), len(shares), size, False
    )
    result = np.zeros(size, dtype=np.int64)
    for number, documents in enumerate(by_file):
        here = file_of == number
        if here.any():
            result[here] = documents[number_in_file[here] % len(documents)]
    return result


def _split(size: int, splits_string: str) -> list[int]:
    """Four bounds that cut range(size) in three parts, in proportion to "98,1,1" (or "98/1/1")."""
    try:
        weights = [float(part) for part in splits_string.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(
            f"model.data.splits_string={splits_string!r}: three weights are needed, 98,1,1 say."
        )
    weights += [0.0] * (3 - len(weights))
    return [round(size * total / sum(weights)) for total in np.cumsum([0.0, *weights])]


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
    """A dataset of a class with NeMo-Aligner's constructor, from all records of the jsonl files
    `data_prefix`: `num_samples`, `n_chunks` and `n_examples_per_chunk` are not used.
    """
    if not str(data_impl).startswith("json"):
        raise ConfigError(
            f"model.data.data_impl={data_impl}: a dataset class of one's own reads no files of "
            "tokens. Convert the data to jsonl."
        )
    columns = {"columns": cfg.data.get("columns")}
    records = list(Records(data_prefix, [], lambda record: 0, data_cfg=columns))
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


build_dataloader = samplers.build_dataloader
collate_with_batch_max_sequence_length = prompts.collate_with_batch_max_sequence_length
collate_with_pad_to_max_batch = prompts.collate_with_pad_to_max_batch
identity_collate = prompts.identity_collate
RLHFDataset = prompts.RLHFDataset
build_train_valid_test_rlhf_datasets = partial(build_train_valid_test_datasets, RLHFDataset)

__getattr__ = retired_names(__name__)
