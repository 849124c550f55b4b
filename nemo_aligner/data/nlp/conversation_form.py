# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From records with conversations to tokens: what the forms of a conversation share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from nemo_aligner.data.nlp.chat_masks import Encoded
from nemo_aligner.data.nlp.chat_records import (
    Message,
    check_response,
    conversation_field,
    conversation_messages,
    pair_messages,
    response_messages,
)
from nemo_aligner.data.nlp.json_lines import Record


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
        that are trained on, up to the end of the last one.

        Args:
            record: that the messages stand in.
        """

    def conversation(self, record: Record) -> Encoded:
        """A conversation, with every turn that is trained on."""
        return self.encode_messages(_conversation(record), record)

    def sample(self, record: Record) -> list[int]:
        """The tokens of a conversation that is scored: its last response counts."""
        messages = _conversation(record)
        return self.encode_messages(messages, record, len(messages) - 1).tokens

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """Both conversations of a pair, the better one first; responses count from where they
        differ.
        """
        chosen, rejected, first = pair_messages(record)
        better = self.encode_messages(chosen, record, first)
        return better, self.encode_messages(rejected, record, first)

    def response(self, record: Record) -> Encoded:
        """`prompt` with `response`, and which tokens are of the response."""
        messages, first = response_messages(record)
        return self.encode_messages(messages, record, first)


def _conversation(record: Record) -> list[Message]:
    """The messages of a conversation, which ends with a response."""
    messages = conversation_messages(record)
    check_response(messages, conversation_field(record) or "")
    return messages
