# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The form of conversations that `model.data` asks for."""

import functools
from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.file_references import check_not_outside
from nemo_aligner.config.data_rules import FROM_TOKENIZER, KEPT_FORM, check_chat, holds_tokens
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import conversation_field, holds_conversation
from nemo_aligner.data.nlp.chat_template import ChatTemplate, own_chat_template
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.data_files import CHUNK_ID, DataFile, data_paths
from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, ChatTokens, NeMoChat
from nemo_aligner.data.nlp.records import first_record

DEFAULT_FORM = "conversations are written in {}, as model.data.chat_template is not set"


def chat_form(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> ConversationForm | None:
    """The form that `model.data` asks for; else, for conversations alone, the checkpoint's or the
    tokenizer's chat template, or None. `ConfigError`: two, or one that the tokenizer cannot use.
    """
    data_cfg = data_cfg or {}
    check_chat(data_cfg)
    is_default = not (data_cfg.get("chat") or data_cfg.get("chat_template"))
    options, name = data_cfg.get("chat_template_kwargs"), "the tokenizer's chat template"
    kept = getattr(tokenizer, KEPT_FORM, None)
    if is_default and kept and not (options and kept.get("chat")):  # those are of no such format
        name = "NeMo's chat format" if kept.get("chat") else "a chat template"
        name += " that the checkpoint keeps"
        check_not_outside("model.data.chat_template", kept.get("chat_template"))
        data_cfg = {**data_cfg, **kept}
        options = options or kept.get("chat_template_kwargs")
    form: ConversationForm
    if data_cfg.get("chat"):
        given = data_cfg.get("chat_prompt_tokens")
        form = NeMoChat(tokenizer, ChatTokens.of(given) if given else NEMO_TOKENS)
    else:
        template = data_cfg.get("chat_template")
        if not (template or options) and own_chat_template(tokenizer) is None:
            return None
        source, date = str(template or FROM_TOKENIZER), data_cfg.get("chat_date")
        form = ChatTemplate(tokenizer, source, options, date)
    if is_default:
        form.default = DEFAULT_FORM.format(name)
    return form


def sft_chat_options(data: Mapping[str, Any]) -> dict[str, Any]:
    form = ("chat_template", "chat_template_kwargs", "chat_date")
    options = {key: data.get(key) for key in (*form, "one_turn_per_sample", "allow_empty_prompt")}
    return {"is_chat": data["chat"], "special_tokens": data["chat_prompt_tokens"], **options}


@functools.cache
def say_default(text: str) -> None:
    """Say, once, that conversations get a form that nobody has asked for."""
    from nemo.utils import logging  # heavy

    logging.info(text)


def chat_end_strings(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What ends a response, besides the eos token; the form that nobody has asked for does only
    where a training file begins with a conversation.
    """
    form = chat_form(data_cfg, tokenizer)
    if form is None or form.default and not _trains_on_conversations(data_cfg or {}):
        return ()
    return form.end_strings


def begins_with_conversation(file: DataFile, section: Mapping[str, Any]) -> bool:
    """Whether the first record of a data file of `section` is a conversation."""
    first = first_record(file, section)
    label_key = section.get("label_key")
    if label_key is None:
        return holds_conversation(first)
    return conversation_field(first) is not None and label_key not in first


def _trains_on_conversations(data_cfg: Mapping[str, Any]) -> bool:
    files, section = data_cfg.get("data_prefix"), data_cfg
    if isinstance(files, Mapping):
        files = files.get("train")
    if data_cfg.get("train_ds"):
        section = data_cfg["train_ds"]
        files = section.get("file_path")
    if not files or holds_tokens(str(data_cfg.get("data_impl"))):
        return False
    paths, _weights = data_paths(files, "model.data")
    first = (file._replace(path=file.path.replace(CHUNK_ID, "0")) for file in paths)
    return any(begins_with_conversation(file, section) for file in first)
