# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From texts and conversations to the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer

Message = dict[str, str]  # role and content, as chat templates want them


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
        has_template = chat_template(tokenizer) is not None
        wanted = self.chat or (self.chat is None and self.system is not None)
        if wanted and not has_template:
            raise UserError(
                "the tokenizer has no chat template of Hugging Face, so there is no form for a "
                "message; leave --chat and --system out, and write prompts in the form that the "
                "policy was trained with."
            )
        return has_template if self.chat is None else self.chat

    def opening(self) -> list[Message]:
        """The messages that a conversation starts with."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def chat_template(tokenizer: Any) -> str | None:
    """The chat template of the Hugging Face tokenizer behind a NeMo tokenizer, if there is one."""
    return getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation, up to where the policy's next message begins.

    Raises:
        UserError: the template refuses the messages (some know no system message).
    """
    try:
        return list(
            tokenizer.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as error:  # jinja2's own classes; a template raises what it likes
        raise UserError(
            f"the tokenizer's chat template refuses the conversation: {error}"
        ) from error


def plain_tokens(tokenizer: Tokenizer, text: str, add_bos: bool) -> list[int]:
    """The tokens of a text as it is.

    Raises:
        UserError: `add_bos` with a tokenizer that has no bos token.
    """
    ids = tokenizer.text_to_ids(text)
    if not add_bos:
        return ids
    if tokenizer.bos_id is None:
        raise UserError(
            "sampling_params.add_BOS=True, but the tokenizer has no bos token; set it to False."
        )
    return [tokenizer.bos_id, *ids]
