# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in a chat template of Hugging Face: the tokens of a prompt, and of a conversation
with the mask of the assistant's turns.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.config.data_rules import FROM_TOKENIZER
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import (
    Encoded,
    TurnEnd,
    encode_turns,
    find_turns,
)
from nemo_aligner.data.nlp.chat_records import (
    Message,
    check_response,
    conversation_messages,
    pair_messages,
    prompt_messages,
    record_tools,
)
from nemo_aligner.data.nlp.json_lines import Record

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"})


class ChatTemplate:
    """A chat template and the tokenizer that it is for.

    Args:
        tokenizer: NeMo tokenizer around one of Hugging Face.
        source: "tokenizer" for the tokenizer's own template, else the file of one (Jinja).

    Raises:
        ConfigError: the tokenizer is of another kind, or has no template.
    """

    def __init__(self, tokenizer: Any, source: str = FROM_TOKENIZER) -> None:
        self.inner: Any = getattr(tokenizer, "tokenizer", None)
        if not hasattr(self.inner, "apply_chat_template"):
            raise ConfigError(
                f"model.data.chat_template={source} needs a tokenizer of Hugging Face; for a "
                f"{type(tokenizer).__name__} use NeMo's chat format (model.data.chat=True)."
            )
        self.template: str | None = None
        if source != FROM_TOKENIZER:
            self.template = Path(source).expanduser().read_text(encoding="utf-8")
        elif own_chat_template(tokenizer) is None:
            raise ConfigError(
                "model.data.chat_template=tokenizer, but the tokenizer has no chat template; give "
                "the file of one, or train on texts (null)."
            )
        self.state = ["chat template", self.template or str(own_chat_template(tokenizer))]
        self._turn_end: TurnEnd | None = None

    @property
    def end_strings(self) -> tuple[str, ...]:
        """What ends a response besides the eos token; empty if the template writes no end."""
        end = self.end_of_turn()
        return () if end is None else (end,)

    def end_of_turn(self) -> str | None:
        """The first control token after a response, as the template writes it; None without."""
        before, whole = self.render(_PROBE[:1], True), self.render(_PROBE, False)
        turn = whole.removeprefix(before)
        found = re.search(self._control_pattern(), turn[turn.rfind(_PROBE[1]["content"]) :])
        return None if found is None else found.group()

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: list[Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            generation_prompt: append what stands before the assistant's next message.

        Raises:
            UserError: the template refuses the messages (some know no system message).
        """
        return str(self._apply(messages, tools, generation_prompt, tokenize=False))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts that hold their control tokens already."""
        return [list(ids) for ids in self.inner(texts, add_special_tokens=False)["input_ids"]]

    def prompt_tokens(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation, up to where the policy's next message begins.

        Raises:
            UserError: the template refuses the messages.
        """
        return self.tokenize([self.render(messages, True, tools)])[0]

    def conversation_tokens(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> Encoded:
        """The tokens of a conversation, up to the end of the assistant's last message.

        Raises:
            UserError: the template refuses the messages, leaves one out, has no end of a turn, or
                does not show where a turn is.
        """
        if self._turn_end is None:
            self._turn_end = self._end_finder()
        if _MARKERS.search(self.inner.get_chat_template(self.template, tools)):
            return self._by_markers(messages, tools)
        text = self.render(messages, False, tools)
        _check_contents(text, messages)

        def render(part: Sequence[Message], generation_prompt: bool) -> str:
            return self.render(part, generation_prompt, tools)

        spans = find_turns(text, messages, render, self._turn_end)
        return encode_turns(text, spans, self.tokenize, self.inner.decode)

    # --- records --------------------------------------------------------------------------------

    def prompt(self, record: Record) -> list[int]:
        """The tokens of a record's prompt."""
        return self.prompt_tokens(prompt_messages(record), record_tools(record))

    def conversation(self, record: Record) -> Encoded:
        """The tokens of a record's conversation, which ends with a response."""
        messages = conversation_messages(record)
        check_response(messages, "messages" if "messages" in record else "conversations")
        return self.conversation_tokens(messages, record_tools(record))

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """The tokens of a record's two conversations, the better one first."""
        tools = record_tools(record)
        chosen, rejected = (
            self.conversation_tokens(messages, tools) for messages in pair_messages(record)
        )
        return chosen, rejected

    # --- the template ---------------------------------------------------------------------------

    def _apply(
        self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool, **options: Any
    ) -> Any:
        try:
            return self.inner.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **options,
            )
        except Exception as error:  # jinja2's own classes; a template raises what it likes
            raise UserError(f"the chat template refuses the conversation: {error}") from error

    def _control_pattern(self) -> str:
        tokens = sorted(self._control_tokens(), key=len, reverse=True)
        return "|".join(map(re.escape, tokens)) or r"(?!)"

    def _control_tokens(self) -> set[str]:
        return {*self.inner.all_special_tokens, *self.inner.get_added_vocab()}

    def _end_finder(self) -> TurnEnd:
        end = self.end_of_turn()
        if end is None:
            raise UserError(
                "the chat template writes no special token after a response, so that nothing "
                "would teach the policy to end one; write {{ eos_token }} after the assistant's "
                "content in a template file and give it as model.data.chat_template."
            )
        return TurnEnd(end, sorted(self._control_tokens()))

    def _by_markers(self, messages: Sequence[Message], tools: list[Any] | None) -> Encoded:
        found = self._apply(
            messages,
            tools,
            False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens = list(found["input_ids"])
        is_response = [bool(value) for value in found["assistant_masks"]]
        if not any(is_response):
            raise UserError(
                "the {% generation %} markers of the chat template hold no token of this "
                "conversation."
            )
        end = len(tokens) - is_response[::-1].index(True)
        return Encoded(tokens[:end], is_response[:end])


def own_chat_template(tokenizer: Tokenizer) -> Any:
    """The chat template of the Hugging Face tokenizer behind a NeMo tokenizer, if there is one."""
    return getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)


def _check_contents(text: str, messages: Sequence[Message]) -> None:
    """Raise `UserError` if the template left out what a message says.

    Thoughts are an exception: templates of models that reason drop those of earlier turns.
    """
    for number, message in enumerate(messages, start=1):
        content = message["content"].strip()
        if message["role"] == "tool" or "</think>" in content or content in text:
            continue
        raise UserError(
            f"the chat template leaves out what message {number} (role {message['role']!r}) says."
        )
