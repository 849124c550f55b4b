# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The form of conversations that `model.data` asks for: a chat template, NeMo's chat format, or
the template that the tokenizer has.
"""

import functools
from collections.abc import Mapping
from typing import Any

from nemo.utils import logging

from nemo_aligner.config.data_rules import FROM_TOKENIZER, check_chat
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_template import ChatTemplate, own_chat_template
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, ChatTokens, NeMoChat

# Keys of `model.data` for conversations of supervised fine-tuning, beside those of NeMo's format.
SFT_KEYS = ("chat_template", "chat_template_kwargs", "chat_date", "one_turn_per_sample")
DEFAULT_FORM = (
    "conversations are written in the tokenizer's chat template, as model.data.chat_template is "
    "not set"
)


def chat_form(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> ConversationForm | None:
    """The form that `model.data` asks for; the tokenizer's chat template, for conversations alone,
    if it asks for none; None: the tokenizer has no template either.

    Args:
        data_cfg: `chat_template`, `chat_template_kwargs`, `chat_date`, `chat` and
            `chat_prompt_tokens` are read.

    Raises:
        ConfigError: two forms are asked for, or one that cannot be used with this tokenizer.
    """
    data_cfg = data_cfg or {}
    check_chat(data_cfg)
    if data_cfg.get("chat"):
        given = data_cfg.get("chat_prompt_tokens")
        return NeMoChat(tokenizer, ChatTokens.of(given) if given else NEMO_TOKENS)
    template = data_cfg.get("chat_template")
    options, date = data_cfg.get("chat_template_kwargs"), data_cfg.get("chat_date")
    if not (template or options) and own_chat_template(tokenizer) is None:
        return None
    form = ChatTemplate(tokenizer, str(template or FROM_TOKENIZER), options, date)
    form.is_default = not template
    return form


def sft_chat_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `build_sft_dataset` is told of the form of conversations by a section `model.data`."""
    return {
        "is_chat": data["chat"],
        "special_tokens": data["chat_prompt_tokens"],
        **{key: data.get(key) for key in SFT_KEYS},
    }


@functools.cache
def say_default() -> None:
    """Say, once, that conversations get a form that nobody has asked for."""
    logging.info(DEFAULT_FORM)


def chat_end_strings(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What ends a response in the form of `model.data`, besides the eos token."""
    form = chat_form(data_cfg, tokenizer)
    return () if form is None else form.end_strings
