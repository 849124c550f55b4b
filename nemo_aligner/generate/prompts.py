# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a text is a message of a conversation."""

from dataclasses import dataclass

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import Message, holds_conversation
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.sources import Record


@dataclass(frozen=True)
class ChatForm:
    """Whether a text is a user's message in the form of conversations (`data/nlp/chat.py`)."""

    # True: yes; False: a text is continued as it is; None: yes if there is a form
    chat: bool | None
    system: str | None = None  # system message, or None

    @classmethod
    def of_options(cls, chat: bool, plain: bool, system: str | None, terminal: bool) -> "ChatForm":
        """What the command line asks for; without an option a terminal takes the template if there
        is one, and texts of a file, which mostly have a form of their own, are left as they are.
        """
        if chat or plain:
            return cls(chat, system)
        return cls(None if terminal or system else False, system)

    def resolve(self, form: ConversationForm | None) -> bool:
        """Whether texts are written in `form`; `UserError`: it is asked for, and there is none."""
        wanted = self.chat or (self.chat is None and self.system is not None)
        if wanted and form is None:
            raise UserError(
                "the tokenizer has no chat template of Hugging Face, so there is no form for a "
                "message; leave --chat and --system out, and write prompts in the form that the "
                "policy was trained with, or give model.data.chat_template=FILE."
            )
        return form is not None if self.chat is None else self.chat

    def record(self, prompt: Record, form: ConversationForm | None) -> Record:
        """The record of a written prompt: messages where it is one, after the system message."""
        text = prompt_text(prompt)
        if text is not None and self.resolve(form):
            return {"messages": [*self.opening(), {"role": "user", "content": text}]}
        if text is None and self.system is not None:
            return {**prompt, "system": self.system}
        return prompt

    def opening(self) -> list[Message]:
        """The messages that a conversation starts with."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def prompt_text(prompt: Record) -> str | None:
    """The text of a prompt's record; None for a conversation."""
    if holds_conversation(prompt):
        return None
    return str(prompt["text"] if "text" in prompt else prompt["prompt"])
