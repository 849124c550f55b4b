# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the configuration in a checkpoint, which others may have written, may refer to: its own
files and models of the Hugging Face hub, but no environment variable or other file. The user's
YAML and command line are not checked here.

A file outside is no error until something would open it, for files of NeMo hold paths of the
machine that wrote them. It stands behind `OUTSIDE`, so that nothing opens or copies it by mistake;
`build_tokenizer` refuses it unless the user gives the key.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.data_rules import KEPT_FORM
from nemo_aligner.core.errors import UserError

# Keys that may name a file that belongs in the archive; NeMo's.
ARTIFACT_KEYS = (
    "tokenizer.model",
    "tokenizer.vocab_file",
    "tokenizer.merge_file",
    f"tokenizer.{KEPT_FORM}.chat_template",
)
TOKENIZER_TYPE = "tokenizer.type"  # a name, or the folder of a Hugging Face tokenizer
OUTSIDE = "outside the checkpoint: "

_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.\[\]-]+\}")  # to another key, such as ${.hidden_size}


def read_yaml(file: Path, path: Path) -> DictConfig:
    """The keys in a YAML file of the checkpoint at `path`; `UserError`: damaged."""
    try:
        config = OmegaConf.load(file)
    except Exception as error:  # the errors of YAML, of texts and of OmegaConf
        raise UserError(f"{file.name} in {path} is damaged ({error}); copy it again.") from error
    if not isinstance(config, DictConfig) or not config:
        raise UserError(f"{file.name} in {path} is damaged: it holds no keys; copy it again.")
    return config


def refuse_resolvers(config: DictConfig, path: Path) -> None:
    """`UserError` for interpolations but references to keys: resolvers read the environment."""
    for key, text in _texts(OmegaConf.to_container(config, resolve=False)):
        if "${" in _REFERENCE.sub("", text):
            raise UserError(
                f"{path}: {key}={text[:200]!r} is more than a reference to another key: it could "
                "read the environment of this machine, and a checkpoint may not. If you trust the "
                "file, unpack it, write the value itself in its configuration, and give the "
                "folder."
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts in a container, with their dotted keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _texts(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _texts(child, f"{key}[{index}]")


def leads_out(file: Path, folder: Path) -> bool:
    """Whether `file` or anything in it is outside `folder`, links followed. The cache of the
    Hugging Face hub has links from `snapshots/<revision>/` to `blobs/` beside it.
    """
    roots = [folder.resolve()]
    roots += [p.parent / "blobs" for p in roots[0].parents if p.name == "snapshots"]
    found = [file, *file.rglob("*")] if file.is_dir() else [file]
    return not all(any(f.resolve().is_relative_to(root) for root in roots) for f in found)


def mark_outside(config: DictConfig, folder: Path) -> None:
    """Put `OUTSIDE` before the tokenizer's files that are not in `folder`."""
    for key in (*ARTIFACT_KEYS, TOKENIZER_TYPE):
        value = OmegaConf.select(config, key, throw_on_missing=False)
        if not isinstance(value, str) or not value:
            continue
        # Other types are names: of the hub, or of a kind of tokenizer.
        is_path = key != TOKENIZER_TYPE or value[0] in "/.~" or os.path.exists(value)
        if is_path and leads_out(Path(value).absolute(), folder):
            OmegaConf.update(config, key, OUTSIDE + value)


def unmarked(value: Any) -> Any:
    """`value` as it stands in the checkpoint."""
    return value.removeprefix(OUTSIDE) if isinstance(value, str) else value


def check_not_outside(key: str, value: Any) -> None:
    """`UserError`, with the dotted `key` and the remedy, if `value` is marked as outside."""
    if isinstance(value, str) and value.startswith(OUTSIDE):
        raise UserError(
            f"{key}={unmarked(value)} stands in the checkpoint, but the file is no part of it; "
            "only files in the checkpoint, and those that you name yourself, are read. Give "
            f"{key}=PATH on the command line."
        )
