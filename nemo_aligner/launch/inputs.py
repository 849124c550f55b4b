# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The files that a configuration names, checked before the packages of a job are imported: whether
models and data are there and have a form that loads, and the first records of the data. The same
functions check all of it when the job reads them. Imports nothing heavy.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.places import check_complete, check_restore_path
from nemo_aligner.config.rules import PREFIX_DATA_JOBS, restore_key
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import (
    PAIR,
    conversation_field,
    conversation_messages,
    holds_conversation,
    holds_pair,
    pair_messages,
    prompt_messages,
)
from nemo_aligner.data.nlp.columns import Columns
from nemo_aligner.data.nlp.data_files import CHUNK_ID, DataFile, data_paths, open_quickly
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.records import check_text
from nemo_aligner.servers.user_code import split_spec

ROWS = 100  # that are looked at in each data file
SECTIONS = {  # with a key `file_path`
    "gpt_sft": ("model.data.train_ds", "model.data.validation_ds"),
    "gpt_spin": ("model.data.train_ds", "model.data.validation_ds"),
    "compute_topk_logits": ("data.data",),
}
CODE = {  # of users, with what the file holds
    "inference.reward_fn": "function",
    **{f"trainer.{kind}.reward_fn": "function" for kind in ("ppo", "rs", "reinforce")},
    **{f"model.{kind}.environment.path": "class" for kind in ("ppo", "rs", "reinforce")},
}
TOKENIZER_FILES = ("model", "vocab_file", "merge_file")


def check_inputs(cfg: DictConfig, config_name: str) -> None:
    """Check the models and data that a complete configuration names.

    Raises:
        UserError: one is not there, or cannot be used; with the key or the line.
    """
    for key in (restore_key(config_name), "model.peft.restore_from_path"):
        path = OmegaConf.select(cfg, key)
        if path is not None:
            check_restore_path(path, key)
    resumed = OmegaConf.select(cfg, "exp_manager.resume_from_checkpoint")
    if resumed:
        check_complete(Path(resumed))
    for name in TOKENIZER_FILES:
        path = OmegaConf.select(cfg, f"model.tokenizer.{name}")
        if path is not None and not Path(path).is_file():
            raise UserError(f"model.tokenizer.{name}={path} does not exist; give a file.")
    for key, kind in CODE.items():
        spec = OmegaConf.select(cfg, key)
        if spec is not None and "://" not in str(spec):
            split_spec(spec, key, kind, "code.py:name")
    for file, section in _data_files(cfg, config_name):
        columns = Columns(section.columns if file.columns is None else file.columns)
        form = section.get("data_impl") or "jsonl"
        form = "jsonl" if form == "chunked_jsonl" else form
        for source in open_quickly(Path(file.path), form, section.index_mapping_dir):
            for number, row in itertools.islice(source.scan(), ROWS):
                try:
                    _check_record(columns(row), cfg, section, config_name)
                except UserError as error:
                    where = f"{source.path}, {source.unit} {number}"
                    raise UserError(f"{where}: {error}") from None


def _data_files(cfg: DictConfig, config_name: str) -> Iterator[tuple[DataFile, DictConfig]]:
    """Each data file, with the section that says how it is read."""
    for key in SECTIONS.get(config_name, ()):
        section = OmegaConf.select(cfg, key)
        if section.file_path:
            for file in data_paths(section.file_path, f"{key}.file_path")[0]:
                yield file, section
    if config_name in PREFIX_DATA_JOBS:
        prefix = OmegaConf.to_container(cfg.model.data, resolve=True)["data_prefix"]  # type: ignore[index, call-overload]
        parts = prefix if isinstance(prefix, Mapping) else {"": prefix}
        for part, files in parts.items():
            key = f"model.data.data_prefix.{part}".rstrip(".")
            for file in data_paths(files, key)[0] if files else ():
                yield file._replace(path=file.path.replace(CHUNK_ID, "0")), cfg.model.data


def _check_record(record: Record, cfg: DictConfig, section: DictConfig, config_name: str) -> None:
    """Raise `UserError` if a record lacks a field, or a conversation in it is broken."""
    data: Any = cfg.get("data") or cfg.model.data
    talks = holds_conversation(record)
    if data.chat:  # NeMo's format, whose parts have other names, or that of SteerLM 2
        if config_name in SECTIONS and not talks and "prompt_turns" not in record:
            conversation_messages(record)
    elif config_name in SECTIONS:
        if data.chat_template or (conversation_field(record) and section.label_key not in record):
            conversation_messages(record)
            return
        for field in re.findall(r"{(\w+)}", section.prompt_template):
            check_text(record, field, allow_blank=True)
    elif config_name in ("training_rm", "gpt_dpo", "gpt_kto", "gpt_knowledge_distillation"):
        for field in _fields(record, cfg, config_name):
            if field not in record and f"{field}_response" not in record:
                raise UserError(f"field '{field}' is missing; the line has {sorted(record)}.")
        if all(isinstance(record.get(field), list) for field in PAIR):
            pair_messages(record)
    elif talks or (data.chat_template and "text" not in record):
        prompt_messages(record)
    else:
        is_prompt = "text" not in record and "prompt" in record
        check_text(record, "prompt" if is_prompt else "text")


def _fields(record: Record, cfg: DictConfig, config_name: str) -> tuple[str, ...]:
    """What a record of this job must have."""
    if config_name == "gpt_dpo":
        return PAIR
    if config_name == "gpt_kto":
        return ("response", "preference")
    if config_name == "gpt_knowledge_distillation":
        on_policy = cfg.model.knowledge_distillation.on_policy.fraction is not None
        return ("prompt", "response") if on_policy else ("topk_logits",)
    if holds_pair(record):
        return PAIR
    sample = () if holds_conversation(record) or cfg.model.data.chat_template else ("text",)
    return (*sample, "label") if cfg.model.reward_model_type == "regression" else sample
