# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets as jobs build them, and what their items say."""

import json
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from nemo_aligner.data.nlp.builders import (
    build_sft_dataset,
    build_train_valid_test_regression_rm_datasets,
    build_train_valid_test_rlhf_datasets,
    build_train_valid_test_rm_datasets,
)
from nemo_aligner.data.nlp.records import Records

# Tokens of NeMo's chat format that a tokenizer of bytes has.
MARKS = {"system_turn_start": "\x00", "turn_start": "\x11", "label_start": "\x12"}
MARKS |= {"end_of_turn": "\n", "end_of_name": "\n"}


def build(
    function,
    data_prefix,
    tokenizer,
    impl="jsonl",
    splits=None,
    samples=(-1, -1, -1),
    seq_length=32,
    model=None,
    **data,
):
    """The parts of `function`, a builder, with the keys `data` of `model.data`, and `model`."""
    cfg = {"seed": 1, "data": {"seq_length": 32, "num_workers": 0, **data}}
    cfg |= {"ppo": {"length_params": {"max_length": 12}}, **(model or {})}
    prefix = OmegaConf.create(data_prefix) if isinstance(data_prefix, dict | list) else data_prefix
    given = {"data_prefix": prefix, "data_impl": impl, "splits_string": splits, "seed": 1}
    given |= {"train_valid_test_num_samples": list(samples), "seq_length": seq_length}
    return function(cfg=OmegaConf.create(cfg), tokenizer=tokenizer, **given)


build_prompts = partial(build, build_train_valid_test_rlhf_datasets)
build_pairs = partial(build, build_train_valid_test_rm_datasets)
build_labelled = partial(build, build_train_valid_test_regression_rm_datasets)


def sft(path, tokenizer, section=None, **options):
    """Examples of files, with the keys of `section`; `options`: of the builder."""
    cfg = OmegaConf.create({"file_path": path, "max_seq_length": 64, **(section or {})})
    return build_sft_dataset(cfg, tokenizer, **{"is_chat": False, **options})


def records(path, inspect=lambda record: len(record["text"]), fields=("text",), **options):
    """`Records` of one file, with these options or keys of `model.data`."""
    data_cfg = {name: options.pop(name, None) for name in ("columns", "index_mapping_dir")}
    return Records([path], list(fields), inspect, data_cfg=data_cfg, **options)


def prompts_of(dataset, tokenizer):
    """The texts of a data set of prompts."""
    return [tokenizer.ids_to_text(dataset[n]["text"].tolist()) for n in range(len(dataset))]


def sample_of(item, name, tokenizer):
    """The text of the sample `name` of a pair."""
    return tokenizer.ids_to_text(item[name][: item[f"{name}_length"]].tolist())


def trained_of(item):
    """The tokens of an example that are trained on."""
    return [token for token, on in zip(item["tokens"], item["trained"], strict=True) if on]


def read(path):
    """The records of a jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def check_same_bytes(one, other):
    """Two folders have the same files."""
    names = [[path.relative_to(folder) for path in folder.rglob("*")] for folder in (one, other)]
    assert sorted(names[0]) == sorted(names[1])
    for name in names[0]:
        if (one / name).is_file():
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
