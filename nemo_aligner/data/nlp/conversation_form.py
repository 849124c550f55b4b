# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the forms of conversations share."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import (
    THOUGHTS,
    Message,
    check_response,
    conversation_field,
    conversation_messages,
    pair_messages,
    response_messages,
)
from nemo_aligner.data.nlp.sources import Record

_THINK = re.compile(r"</?think>")


class Encoded(NamedTuple):
    tokens: list[int]  # S ids, up to the end of the last of the assistant's turns
    # S values, True for the assistant's tokens, their end-of-turn tokens included
    is_response: list[bool]


def check_written(number: int, message: Message, text: str) -> None:
    written = without_layout(text)
    parts = _THINK.split(message["content"])
    parts += [message[name] for name in THOUGHTS if isinstance(message.get(name), str)]
    missing = [part.strip() for part in parts if without_layout(part) not in written]
    for call in [*message.get("tool_calls", []), message.get("function_call") or {}]:
        function = call.get("function", call)
        said = [function[key] for key in ("name", "arguments") if function.get(key)]
        for leaf in _leaves(said):
            forms = {str(leaf), json.dumps(leaf), json.dumps(leaf, ensure_ascii=False)}
            said_so = (without_layout(form.strip('"')).lower() for form in forms)
            if not any(form in written.lower() for form in said_so):
                missing.append(str(leaf))
    if missing:
        raise UserError(
            f"the form of conversations leaves out {missing[0][:60]!r} of message {number}, a "
            "response that counts. Give model.data.chat_template one that writes it; for a turn "
            "before the last set its 'weight' to 0, or model.data.one_turn_per_sample=True (SFT)."
        )


def without_layout(text: str) -> str:
    """`text` with one space in place of blanks and newlines, which templates may tidy."""
    return " ".join(text.split())


def _leaves(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, dict) else ()
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item) if isinstance(item, dict | list) else [item]


class ConversationForm(ABC):
    """Every method raises `UserError` for a record that it cannot use.

    Attributes:
        end_strings: what ends a response besides the eos token.
        state: everything that the tokens of a record depend on, beside the tokenizer.
        default: nobody asked for this form, so that texts stay as they are: what to say of that.
    """

    end_strings: tuple[str, ...]
    state: list[str]
    default: str | None = None

    @abstractmethod
    def prompt(self, record: Record) -> list[int]:
        """The tokens of a prompt, up to where the response begins."""

    @abstractmethod
    def encode_messages(
        self, messages: Sequence[Message], record: Record, first: int = 0
    ) -> Encoded:
        """The tokens of a conversation, with the mask of the assistant's messages from `first` on
        that are trained on, up to the end of the last one; `record`: that they stand in.
        """

    def conversation(self, record: Record) -> Encoded:
        return self.encode_messages(_conversation(record), record)

    def sample(self, record: Record) -> list[int]:
        """The tokens of a conversation that is scored: its last response counts."""
        messages = _conversation(record)
        return self.encode_messages(messages, record, len(messages) - 1).tokens

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """Both conversations of a pair, the better one first."""
        chosen, rejected, first = pair_messages(record)
        better = self.encode_messages(chosen, record, first)
        return better, self.encode_messages(rejected, record, first)

    def response(self, record: Record) -> Encoded:
        messages, first = response_messages(record)
        return self.encode_messages(messages, record, first)


def _conversation(record: Record) -> list[Message]:
    messages = conversation_messages(record)
    check_response(messages, conversation_field(record) or "")
    return messages
