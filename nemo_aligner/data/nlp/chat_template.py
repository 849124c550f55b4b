# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in a chat template of Hugging Face: the tokens of a prompt, and of a conversation
with the mask of the assistant's turns.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.config.data_rules import FROM_TOKENIZER
from nemo_aligner.config.values import resolved
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import (
    MARK_END,
    MARK_START,
    Encoded,
    TurnEnd,
    encode_turns,
    find_turns,
    marked_turns,
    without_layout,
)
from nemo_aligner.data.nlp.chat_records import (
    ASSISTANT,
    Message,
    is_trained,
    prompt_messages,
    record_tools,
    template_options,
)
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.json_lines import Record

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARKS = f"{{%- macro marked_turn() %}}{MARK_START}{{{{ caller() }}}}{MARK_END}{{%- endmacro +%}}"
_DATE, _LETTERS = "strftime_now", "aAbBcdDeFHIjmMpSTuUwWxXyYZ"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = """January February March April May June July August September October November
    December""".split()
_PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"})


class ChatTemplate(ConversationForm):
    """A chat template and the tokenizer that it is for.

    Args:
        tokenizer: NeMo tokenizer around one of Hugging Face.
        source: "tokenizer" for the tokenizer's own template, else the file of one (Jinja).
        options: given to the template by name, `model.data.chat_template_kwargs`; those of a
            record come before them.
        date: that a template takes for today, as YYYY-MM-DD; None: today's.

    Raises:
        ConfigError: the tokenizer is of another kind, or has no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: str = FROM_TOKENIZER,
        options: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        inner: Any = getattr(tokenizer, "tokenizer", None)
        self.inner = inner
        if not hasattr(inner, "apply_chat_template"):
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
        self.options = dict(resolved(options or {}))
        self.date = str(date or datetime.date.today())
        written = self.template or str(own_chat_template(tokenizer))
        self.state = ["chat template", written, json.dumps(self.options, sort_keys=True)]
        self.state += [self.date] if _DATE in written else []

    @property
    def end_strings(self) -> tuple[str, ...]:  # type: ignore[override]
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
        inputs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; with `generation_prompt` also what stands before the
        assistant's next message. Without `inputs` the template gets those of the job.
        """
        text = self._write(messages, generation_prompt, self.options if inputs is None else inputs)
        return text.replace(MARK_START, "").replace(MARK_END, "")

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts that hold their control tokens already."""
        return [list(ids) for ids in self.inner(texts, add_special_tokens=False)["input_ids"]]

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the policy's next message begins."""
        return self.tokenize([self.render(messages, True)])[0]

    def prompt(self, record: Record) -> list[int]:
        """The tokens of a record's prompt, all of whose messages the template writes."""
        messages = prompt_messages(record)
        text = self.render(messages, True, self._inputs(record))
        _check_contents(text, messages)
        return self.tokenize([text])[0]

    def encode_messages(
        self, messages: Sequence[Message], record: Record, first: int = 0
    ) -> Encoded:
        """See `ConversationForm`; `UserError` also where the template leaves out a part of a
        message, has no end of a turn, or does not show where a turn is.
        """
        trained = {n for n, message in enumerate(messages) if n >= first and is_trained(message)}
        if not trained:
            raise UserError("every response of the conversation has 'weight' 0: remove the line.")
        inputs = self._inputs(record)
        text = self._write(messages, False, inputs)
        if MARK_START in text:
            text, spans = marked_turns(text, messages, trained, self._turn_end)
        else:
            render = functools.partial(self.render, inputs=inputs)
            spans = find_turns(text, messages, trained, render, self._turn_end)
        _check_contents(text, messages)
        return encode_turns(text, spans, self.tokenize, self.inner.decode)

    # --- the template ---------------------------------------------------------------------------

    def _inputs(self, record: Record) -> dict[str, Any]:
        """What the template gets for a record, beside its messages."""
        return {"tools": record_tools(record), **self.options, **template_options(record)}

    def _write(
        self, messages: Sequence[Message], generation_prompt: bool, inputs: Mapping[str, Any]
    ) -> str:
        """The text of a conversation, with marks where the template has them."""
        template = self.inner.get_chat_template(self.template, inputs.get("tools"))
        try:
            text = self.inner.apply_chat_template(
                list(messages),
                chat_template=_prepared(template, self.date),
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **inputs,
            )
        except Exception as error:  # jinja2's own classes; a template raises what it likes
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def _control_pattern(self) -> str:
        """Of the tokens that are no ordinary text."""
        tokens = {*self.inner.all_special_tokens, *self.inner.get_added_vocab()}
        return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"

    @functools.cached_property
    def _turn_end(self) -> TurnEnd:
        end = self.end_of_turn()
        if end is None:
            raise UserError(
                "the chat template writes no special token after a response, so that nothing "
                "would teach the policy to end one; write {{ eos_token }} after the assistant's "
                "content in a template file and give it as model.data.chat_template."
            )
        return TurnEnd(end, self._control_pattern())


def own_chat_template(tokenizer: Tokenizer) -> Any:
    """The chat template of the Hugging Face tokenizer behind a NeMo tokenizer, if there is one."""
    return getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)


@functools.lru_cache(maxsize=16)
def _prepared(template: str, date: str) -> str:
    """`template` with marks around what it says is generated, and with `date` for today."""
    calls = _GENERATION.sub(
        lambda found: (
            f"{{%{found[1]} {'endcall' if found[2] else 'call marked_turn()'} {found[3]}%}}"
        ),
        template,
    )
    macros = "" if calls == template else _MARKS
    if _DATE in template:
        # transformers hands no function to a template
        values = _date_values(datetime.datetime.fromisoformat(date)).items()
        text = " | ".join(["part", *(f"replace({each!r}, {value!r})" for each, value in values)])
        macros += (
            f"{{%- macro {_DATE}(format) %}}{{%- for part in format.split('%%') %}}"
            f"{{%- set text = {text} %}}{{%- if '%' in text %}}{{{{ raise_exception('{_DATE} has "
            "no directive %' ~ text.split('%')[1][:2]) }}{%- endif %}{{ text }}"
            "{{ '' if loop.last else '%' }}{%- endfor %}{%- endmacro +%}"
        )
    return macros + calls


def _date_values(day: datetime.datetime) -> dict[str, str]:
    """What the directives of `strftime` stand for, in English on every machine."""
    name, month = _DAYS[day.weekday()], _MONTHS[day.month - 1]
    english = {"A": name, "a": name[:3], "B": month, "b": month[:3], "p": "AM"}
    english |= {"c": f"{name[:3]} {month[:3]} %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S"}
    return {
        f"%{flag}{letter}": day.strftime(english.get(letter, f"%{flag}{letter}"))
        for flag in ("-", "")
        for letter in _LETTERS
    }


def _check_contents(text: str, messages: Sequence[Message]) -> None:
    """Raise `UserError` if the template left out what a message says, but for earlier thoughts."""
    written = without_layout(text)
    for number, message in enumerate(messages, start=1):
        role, content = message["role"], message["content"]
        said = content.split("</think>")[-1] if role == ASSISTANT else content
        if role != "tool" and without_layout(said) not in written:
            raise UserError(
                f"the chat template leaves out what message {number} (role {role!r}) says."
            )
