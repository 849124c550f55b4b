# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The form of conversations that `model.data` asks for: a chat template, NeMo's chat format, or
none.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from nemo_aligner.config.data_rules import check_chat
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import Encoded
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, ChatTokens, NeMoChat


class ConversationForm(Protocol):
    """From records with conversations to tokens. Every method raises `UserError` for a record that
    it cannot use.
    """

    @property
    def end_strings(self) -> tuple[str, ...]:
        """What ends a response besides the eos token."""

    @property
    def state(self) -> list[str]:
        """Everything that the tokens of a record depend on, beside the tokenizer."""

    def prompt(self, record: Record) -> list[int]:
        """The tokens of a prompt, up to where the response begins."""

    def conversation(self, record: Record) -> Encoded:
        """The tokens of a conversation, up to the end of its last response."""

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """The tokens of the two conversations of a preference pair, the better one first."""


def chat_form(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> ConversationForm | None:
    """The form that `model.data` asks for; None: texts are used as they stand.

    Args:
        data_cfg: `chat_template`, `chat` and `chat_prompt_tokens` are read.

    Raises:
        ConfigError: both forms are asked for, or the one cannot be used with this tokenizer.
    """
    data_cfg = data_cfg or {}
    template, chat = data_cfg.get("chat_template"), data_cfg.get("chat")
    check_chat(data_cfg)
    if template:
        return ChatTemplate(tokenizer, str(template))
    if chat:
        given = data_cfg.get("chat_prompt_tokens")
        return NeMoChat(tokenizer, ChatTokens.of(given) if given else NEMO_TOKENS)
    return None


def chat_end_strings(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What ends a response in the form of `model.data`, besides the eos token."""
    form = chat_form(data_cfg, tokenizer)
    return () if form is None else form.end_strings
