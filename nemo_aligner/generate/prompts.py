# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a prompt is a message of a conversation."""

from dataclasses import dataclass

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import Message
from nemo_aligner.data.nlp.chat_template import ChatTemplate, own_chat_template


@dataclass(frozen=True)
class ChatForm:
    """Whether a prompt is a user's message in a chat template.

    Attributes:
        chat: True: yes; False: a prompt is continued as it is; None: yes if there is a template.
        system: system message, or None.
    """

    chat: bool | None
    system: str | None = None

    @classmethod
    def of_options(cls, chat: bool, plain: bool, system: str | None, terminal: bool) -> "ChatForm":
        """What the command line asks for; without an option a terminal takes the template if there
        is one, and prompts of a file, which mostly have a form of their own, are left as they are.
        """
        if chat or plain:
            return cls(chat, system)
        return cls(None if terminal or system else False, system)

    def resolve(self, tokenizer: Tokenizer) -> bool:
        """Whether to use the template.

        Raises:
            UserError: it is asked for and the tokenizer has none.
        """
        has_template = own_chat_template(tokenizer) is not None
        wanted = self.chat or (self.chat is None and self.system is not None)
        if wanted and not has_template:
            raise UserError(
                "the tokenizer has no chat template of Hugging Face, so there is no form for a "
                "message; leave --chat and --system out, and write prompts in the form that the "
                "policy was trained with."
            )
        return has_template if self.chat is None else self.chat

    def end_strings(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """What ends a response besides the eos token: the template's end-of-turn token."""
        return ChatTemplate(tokenizer).end_strings if self.resolve(tokenizer) else ()

    def opening(self) -> list[Message]:
        """The messages that a conversation starts with."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]
