# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Forms of data files, `columns` and conversations in `model.data`; checks raise `ConfigError`."""

import datetime
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.config.parallel_rules import virtual_pipeline_group
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import ConfigError

# A value of `model.data.chat_template`; any other is a file.
FROM_TOKENIZER = "tokenizer"
# Key of `model.tokenizer` under which a checkpoint keeps the form of conversations.
KEPT_FORM = "conversations"
# name -> what a file holds
DATA_IMPLS = {
    "jsonl": "texts, one JSON object per line",
    "json": "the same",
    "mmap": "tokens: an indexed dataset of Megatron (<prefix>.bin and <prefix>.idx)",
    "packed_jsonl": "tokens: an array of NumPy (.npy)",
}
TOKENS = "mmap|packed_jsonl"  # those of tokens
PARTS = ("train", "validation", "test")  # of data
# Forms of NeMo-Aligner that are refused, with what replaces them.
OTHER_DATA_IMPLS = {"chunked_jsonl": "name the chunks as a list of files with data_impl=jsonl"}


def check_data_impl(name: str) -> None:
    if name in DATA_IMPLS:
        return
    remedy = OTHER_DATA_IMPLS.get(name, f"use one of {', '.join(DATA_IMPLS)}")
    raise ConfigError(f"model.data.data_impl={name} is not supported; {remedy}.")


def check_parts(files: Mapping) -> None:
    """Raise `ConfigError` unless `model.data.data_prefix` has training data and known parts."""
    known = all(key in PARTS or key.startswith("validation") for key in files)
    if not known or not files.get("train"):
        raise ConfigError(
            f"model.data.data_prefix has the keys {', '.join(files)}; give train, and if need be "
            "validation and test."
        )


def plain_columns(columns: Any, key: str = "model.data.columns") -> dict[str, str | list[str]]:
    if columns is None:
        return {}
    if not hasattr(columns, "items"):
        raise ConfigError(f"{key}={columns!r}: give a mapping, such as {{text: prompt}}.")
    plain: dict[str, str | list[str]] = {}
    for name, form in columns.items():
        is_list = isinstance(form, Iterable) and not isinstance(form, str)
        parts = list(form) if is_list else [form]
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise ConfigError(
                f"{key}.{name}={form!r}: give the name of a column, a text with columns in braces "
                '("{prompt} {response}"), or a list of them.'
            )
        plain[str(name)] = parts if is_list else parts[0]
    return plain


def line_ends(text: str) -> str:
    """A text of the configuration; a line end is written as \\n on a command line."""
    return text.replace("\\n", "\n")


def holds_tokens(name: str) -> bool:
    return name in TOKENS.split("|")


NO_LABELS = (
    "holds tokens only, but a regression reward model needs labels; give jsonl files of "
    '{"text": ..., "label": [number, ...]}'
)
NO_PROMPTS = (
    "holds tokens only, but DPO and KTO need to know where a response begins; give jsonl files, "
    'of {"prompt": ..., "chosen": ..., "rejected": ...} or {"prompt": ..., "response": ..., '
    '"preference": ...}; of packed pairs those that they were made of'
)


def _check_texts(data_impl: str, needed: str) -> None:
    """Raise `ConfigError` if files of this form hold tokens, and not what is `needed`."""
    if holds_tokens(data_impl):
        raise ConfigError(f"model.data.data_impl={data_impl} {needed}.")


check_labels_can_be_read = partial(_check_texts, needed=NO_LABELS)
check_prompts_can_be_read = partial(_check_texts, needed=NO_PROMPTS)


def asked_form(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of conversations that the section `model.data` asks for, as a checkpoint keeps it:
    the keys of that section; none of them: the tokenizer's own template. None: it asks for none.
    """
    template = data.get("chat_template")
    if data.get("chat"):
        return {"chat": True, "chat_prompt_tokens": resolved(data.get("chat_prompt_tokens") or {})}
    if not template:
        return None
    options = data.get("chat_template_kwargs")
    form: dict[str, Any] = {"chat_template_kwargs": resolved(options)} if options else {}
    if template != FROM_TOKENIZER:
        form["chat_template"] = str(Path(str(template)).expanduser().absolute())
    return form


_CHAT_RULES = """
DATA.prompt_end & DATA.chat_template or DATA.chat | is for plain texts; with {} the messages say
    where a prompt ends: set it to null
DATA.chat & DATA.chat_template | and {} are two forms of a conversation; set one of them
DATA.chat_template_kwargs or DATA.one_turn_per_sample & DATA.chat | is not for NeMo's format, {}
DATA.append_eod & DATA.chat_template | contradicts {}; set it to False
DATA.data_impl=TOKENS & DATA.chat_template | holds tokens, which have no place for {}; give jsonl
    files, or set it to null
"""


def check_chat(data: Mapping[str, Any]) -> None:
    """Refuse two forms of conversations in a section `model.data`, or one that cannot be."""
    template, date = data.get("chat_template"), data.get("chat_date")
    Values({"model": {"data": data}}).refuse(_CHAT_RULES, DATA="model.data", TOKENS=TOKENS)
    try:
        datetime.date.fromisoformat(str(date or "2000-01-01"))
    except ValueError:
        raise ConfigError(f"model.data.chat_date={date}: give a date, YYYY-MM-DD.") from None
    if template not in (None, FROM_TOKENIZER) and not Path(str(template)).expanduser().is_file():
        raise ConfigError(
            f"model.data.chat_template={template} does not exist; give tokenizer, or the file of "
            "a template."
        )


def check_sft_data(values: Values, dp: dict[str, int], with_sizes: tuple[str, ...]) -> None:
    """Check `model.data` of jobs that read its sections; those `with_sizes` have batch sizes."""
    check_chat(values.get("model.data", {}))
    for split in ("train_ds", "validation_ds"):
        name = f"model.data.{split}"
        if split in with_sizes:
            values.multiple(
                f"{name}.global_batch_size",
                f"{name}.micro_batch_size",
                times=dp | virtual_pipeline_group(values),
            )
        values.at_most(f"{name}.max_seq_length", "model.encoder_seq_length")
        plain_columns(values.get(f"{name}.columns"), f"{name}.columns")
        values.refuse(
            f"""{name}.packed_sequence & model.context_parallel_size>1 | with {{}}: set one of them
            to False or 1"""
        )
        files = values.get(f"{name}.file_path") if values.get(f"{name}.packed_sequence") else None
        for file in [files] if isinstance(files, str) else files or ():
            if str(file).endswith(".npy"):
                raise ConfigError(
                    f"{name}.file_path={file}: files that were packed beforehand cannot be read; "
                    "give the files that they were made of: packed_sequence=True packs at start."
                )
