# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Forms of data files, `model.data.data_impl`."""

from nemo_aligner.core.errors import ConfigError

# name -> what a file holds
DATA_IMPLS = {
    "jsonl": "texts, one JSON object per line",
    "json": "the same",
    "mmap": "tokens: an indexed dataset of Megatron (<prefix>.bin and <prefix>.idx)",
    "packed_jsonl": "tokens: an array of NumPy (.npy)",
}
# Forms of NeMo-Aligner that are refused, with what replaces them.
OTHER_DATA_IMPLS = {
    "chunked_jsonl": "name the chunks as a list of files with data_impl=jsonl",
}


def check_data_impl(name: str) -> None:
    """Raise `ConfigError` unless `name` is one of `DATA_IMPLS`."""
    if name in DATA_IMPLS:
        return
    remedy = OTHER_DATA_IMPLS.get(name, f"use one of {', '.join(DATA_IMPLS)}")
    raise ConfigError(f"model.data.data_impl={name} is not supported; {remedy}.")


def holds_tokens(name: str) -> bool:
    """Whether files of this form hold tokens, not texts."""
    return name in ("mmap", "packed_jsonl")


def check_labels_can_be_read(data_impl: str) -> None:
    """Raise `ConfigError` if files of this form have no place for labels."""
    if holds_tokens(data_impl):
        raise ConfigError(
            f"model.data.data_impl={data_impl} holds tokens only, but a regression reward model "
            'needs labels; give jsonl files of {"text": ..., "label": [number, ...]}.'
        )
