# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Datasets by NeMo-Aligner's constructor, `(cfg, tokenizer, name, data_prefix, documents, data,
seq_length, seed, drop_last)`: ours accept the call, and classes of one's own are called so.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.leftovers import temporary_folder
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.records import Records

NEMO_ALIGNER_ARGUMENTS = (
    "cfg",
    "tokenizer",
    "name",
    "data_prefix",
    "documents",
    "data",
    "seq_length",
    "seed",
    "drop_last",
)
Dataset = TypeVar("Dataset", bound=type)


def accepts_nemo_aligner_call(
    convert: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[[Dataset], Dataset]:
    """Decorator of a dataset over jsonl files: it accepts NeMo-Aligner's arguments too.

    The records are those of `data`, which has been read already; they are written to a file that
    lives as long as the dataset. `documents`, `seed` and `drop_last` decide nothing, as there.

    Args:
        convert: from NeMo-Aligner's arguments by name to the class's own, but for `paths`,
            `tokenizer`, `name` and `data_cfg`.
    """

    def decorator(cls: Dataset) -> Dataset:
        own_init = cls.__init__  # type: ignore[misc]

        @functools.wraps(own_init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if not _is_nemo_aligner_call(args, kwargs):
                own_init(self, *args, **kwargs)
                return
            given = {**dict(zip(NEMO_ALIGNER_ARGUMENTS, args, strict=False)), **kwargs}
            folder = tempfile.TemporaryDirectory(dir=temporary_folder("nemo_aligner_data_"))
            self._folder = folder  # copies of the dataset read its file too
            own_init(
                self,
                paths=[_write_records(given["data"], Path(folder.name), given["name"])],
                tokenizer=given["tokenizer"],
                name=given["name"],
                data_cfg=given["cfg"].get("data"),
                **convert(given),
            )

        __init__.also_takes = NEMO_ALIGNER_ARGUMENTS  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorator


def _is_nemo_aligner_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Ours start with the paths of files, NeMo-Aligner's with the section `model`."""
    return "documents" in kwargs or bool(args) and isinstance(args[0], Mapping | DictConfig)


def _write_records(data: Sequence[Any], folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(len(data)):
            if not isinstance(data[number], Mapping):
                raise ConfigError(
                    f"{name} data: record {number} is a {type(data[number]).__name__}; a dataset "
                    "is built from records of jsonl files, {'text': ...}."
                )
            file.write(json.dumps(data[number]) + "\n")
    return str(path)


def prompt_limit(given: dict[str, Any]) -> dict[str, Any]:
    """Limit of prompts by NeMo-Aligner's rule: what `length_params.max_length` of the section
    leaves of `seq_length`, or half of it.
    """
    seq_length, params = given["seq_length"], given["cfg"].get("length_params")
    limit = seq_length // 2 if params is None else seq_length - params["max_length"]
    if limit <= 0:
        raise ConfigError(
            f"no room for prompts: seq_length={seq_length} and "
            f"length_params.max_length={params['max_length']}. Lower max_length."
        )
    return {"max_prompt_length": limit, "limit_text": f"{limit} tokens"}


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
