# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The files that a configuration names, checked before the packages of a job are imported: whether
models and data are there and have a form that loads, and the first records of the data. The same
functions check all of it when the job reads them. Imports nothing heavy.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.places import check_complete, check_restore_path
from nemo_aligner.config.rules import PREFIX_DATA_JOBS, restore_key
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import (
    CONVERSATIONS,
    PAIR,
    conversation_field,
    conversation_messages,
    holds_conversation,
    holds_pair,
    other_prompt,
    pair_messages,
    prompt_messages,
    response_messages,
    speaks_to_assistant,
)
from nemo_aligner.data.nlp.columns import Columns, missing, prompt_hint
from nemo_aligner.data.nlp.data_files import CHUNK_ID, DataFile, data_paths, open_quickly
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.plain_texts import PlainTexts
from nemo_aligner.data.nlp.records import check_text
from nemo_aligner.servers.user_code import split_spec

ROWS = 100  # that are looked at in each data file
SECTIONS = dict.fromkeys(  # with a key `file_path`
    ("gpt_sft", "gpt_spin"), ("model.data.train_ds", "model.data.validation_ds")
) | {"compute_topk_logits": ("data.data",)}
FIELDS = {  # of records
    "training_rm": PAIR,
    "gpt_dpo": PAIR,
    "gpt_kto": ("response", "preference"),
    "gpt_knowledge_distillation": ("topk_logits",),
}
RESUME = "exp_manager.resume_from_checkpoint"
TOKENIZER = [f"model.tokenizer.{name}" for name in ("model", "vocab_file", "merge_file")]
MODELS = ("model.peft.restore_from_path", RESUME, *TOKENIZER)
CODE = {"inference.reward_fn": "function"}  # of users, with what the file holds
for _kind in ("ppo", "rs", "reinforce"):
    CODE |= {f"trainer.{_kind}.reward_fn": "function", f"model.{_kind}.environment.path": "class"}


def check_inputs(cfg: DictConfig, config_name: str) -> None:
    """Raise `UserError` if a model, a file or a record that a complete configuration names is not
    there or cannot be used.
    """
    given = {key: OmegaConf.select(cfg, key) for key in (restore_key(config_name), *MODELS, *CODE)}
    for key, value in given.items():
        if value is None or "://" in str(value):
            continue
        if key in CODE:
            split_spec(value, key, CODE[key], "code.py:name")
        elif key == RESUME:
            check_complete(Path(value))
        elif key in TOKENIZER:
            if not Path(value).is_file():
                raise UserError(f"{key}={value} does not exist; give a file.")
        else:
            check_restore_path(value, key)
    for file, section in _data_files(cfg, config_name):
        columns = Columns(section.columns if file.columns is None else file.columns)
        form = section.get("data_impl") or "jsonl"
        form = "jsonl" if form == "chunked_jsonl" else form
        for source in open_quickly(Path(file.path), form, section.index_mapping_dir):
            before: Record = {}
            for place, (number, row) in enumerate(itertools.islice(source.scan(), ROWS)):
                try:
                    record = columns(row)
                    others = set(row) - columns.sources
                    _check_record(record, others, cfg, section, config_name)
                    if place % 2 and config_name == "training_rm":
                        _check_neighbours(before, record, cfg)
                    before = record
                except UserError as error:
                    where = f"{source.path}, {source.unit} {number}"
                    raise UserError(f"{where}: {error}") from None


def _data_files(cfg: DictConfig, config_name: str) -> Iterator[tuple[DataFile, DictConfig]]:
    """Each data file, with the section that says how it is read."""
    lists = {
        f"{key}.file_path": OmegaConf.select(cfg, key) for key in SECTIONS.get(config_name, ())
    }
    if config_name in PREFIX_DATA_JOBS:
        prefix, key = cfg.model.data.data_prefix, "model.data.data_prefix"
        parts = [f"{key}.{part}" for part in prefix] if isinstance(prefix, DictConfig) else [key]
        lists = dict.fromkeys(parts, cfg.model.data)
    for key, section in lists.items():
        files = OmegaConf.select(cfg, key)
        for file in data_paths(files, key)[0] if files else ():
            yield file._replace(path=file.path.replace(CHUNK_ID, "0")), section


def _check_record(
    record: Record, others: set[str], cfg: DictConfig, section: DictConfig, config_name: str
) -> None:
    """Raise `UserError` if a record lacks a field, a conversation in it is broken, or its prompt
    is empty and no key allows it; `others` are columns that may hold the prompt.
    """
    data: Any = cfg.get("data") or cfg.model.data
    talks, names, said = holds_conversation(record), ["prompt", "text"], True
    fields: tuple[str, ...] = FIELDS.get(config_name, ())
    if "prompt_turns" in record:  # of SteerLM 2
        return
    if data.chat:  # NeMo's format, whose parts have other names
        if config_name in SECTIONS and not talks:
            conversation_messages(record)
    elif config_name in SECTIONS:
        in_field = conversation_field(record) and section.label_key not in record
        talks = bool(data.chat_template or in_field)
        if talks:
            conversation_messages(record)
            said = speaks_to_assistant(record)
        else:
            names = re.findall(r"{(\w+)}", section.prompt_template)
            for field in names:
                check_text(record, field, allow_blank=True)
            names = [field for field in names if field != section.label_key]
            said = not names or any(record[field].strip() for field in names)
    elif config_name in FIELDS:
        if config_name == "training_rm":
            is_known = talks or not {"prompt", "responses", *CONVERSATIONS}.isdisjoint(record)
            fields = PAIR if holds_pair(record) else ("text",) * (not is_known)
            fields += ("label",) * (cfg.model.reward_model_type == "regression")
        elif (
            config_name == "gpt_knowledge_distillation"
            and cfg.model.knowledge_distillation.on_policy.fraction is not None
        ):
            fields = ("prompt", "response")
        for field in fields:
            if field not in record and f"{field}_response" not in record:
                raise missing(field, record)
        if config_name in ("gpt_dpo", "gpt_kto") and set(fields) <= set(record):  # by our names
            responses = [field for field in fields if field != "preference"]
            if talks:
                (pair_messages if config_name == "gpt_dpo" else response_messages)(record)
                said = speaks_to_assistant(record)
            elif not data.chat_template:
                said = bool(PlainTexts(data).parts(record, *responses)[0].strip())
        elif all(isinstance(record.get(field), list) for field in PAIR):
            pair_messages(record)
    elif talks or (data.chat_template and "text" not in record):
        prompt_messages(record)
        said = speaks_to_assistant(record)
    else:
        field = "prompt" if "text" not in record and "prompt" in record else "text"
        check_text(record, field, allow_blank=True)
        said = bool(record[field].strip())
    if not said and not data.allow_empty_prompt:
        hint = "" if talks else prompt_hint(names[0], record, others.difference(names))
        raise UserError(
            f"the prompt is empty.{hint} Remove the line, or set "
            "model.data.allow_empty_prompt=True."
        )


def _check_neighbours(first: Record, second: Record, cfg: DictConfig) -> None:
    """Raise `UserError` if two lines that are a pair are conversations with two prompts."""
    others = {"text", "prompt", *PAIR}
    talks = all(conversation_field(each) and others.isdisjoint(each) for each in (first, second))
    if not talks or cfg.model.data.chat or cfg.model.reward_model_type == "regression":
        return
    for record in (first, second):
        conversation_messages(record)
    why = other_prompt(first, second)
    if why:
        raise UserError(
            f"no pair with the line before: {why}. Two neighbouring lines are responses to one "
            "prompt; conversations for supervised fine-tuning are no pairs."
        )
