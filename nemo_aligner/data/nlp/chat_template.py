# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in a chat template of Hugging Face: the tokens of a prompt, and of a conversation
with the mask of the assistant's turns.

Templates rarely mark them. But what a template writes for the messages before a turn, with its
generation prompt, is what the policy sees when it generates that turn; so a turn begins where this
text ends, and ends with the end-of-turn token that follows. Both texts must be the beginning of
the whole conversation, and the tokens of the first the beginning of its tokens, as in a rollout.
A template may also mark the turns itself, with `{% generation %}`. Turns that count must be
written in full. Example, ChatML; the policy is trained on what is underlined:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ~~~~~~~~~~~~~~~
"""

import datetime
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from nemo_aligner.config.data_rules import FROM_TOKENIZER
from nemo_aligner.config.values import resolved
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import own_chat_template
from nemo_aligner.data.nlp.chat_records import (
    ASSISTANT,
    ConversationForm,
    Message,
    check_written,
    is_trained,
    prompt_messages,
    record_tools,
    template_options,
    without_layout,
)
from nemo_aligner.data.nlp.fields import Encoded, Record

Tokenize = Callable[[list[str]], list[list[int]]]  # several texts in one call, which is faster
Decode = Callable[[list[int]], str]
# (messages, with the generation prompt) -> text
Render = Callable[[Sequence[Message], bool], str]
Span = tuple[int, int]  # start and end in characters
# Around the marked parts of a text: characters that no text has.
MARK_START, MARK_END = "\ufdd0", "\ufdd1"
A_RESPONSE = "\ufdd2"  # what stands for one


def find_turns(
    text: str, messages: Sequence[Message], trained: Set[int], render: Render, turn_end: "TurnEnd"
) -> list[Span]:
    spans: list[Span] = []
    for place in sorted(trained):
        number, is_last = place + 1, place + 1 == len(messages)
        if not place:
            raise UserError("message 1 is the assistant's: there is no prompt before it.")
        before = render(messages[:place], True)
        turn = (text if is_last else render(messages[:number], False))[len(before) :]
        turn = turn[: turn_end(turn)]
        if not text.startswith(before + turn):
            part = "before that message, with its generation prompt,"
            if text.startswith(before):
                part = "up to that message"
            same = len(os.path.commonprefix([before + turn, text]))
            shown = slice(max(same - 20, 0), same + 30)
            where = f"{(before + turn)[shown]!r} against {text[shown]!r}"
            why = f"what it writes {part} is not the beginning of the conversation: {where}"
            raise _refusal(number, is_last, why)
        if spans and spans[-1][1] > len(before):
            why = "that message begins before the end of the one before it"
            raise _refusal(number, is_last, why)
        check_written(number, messages[place], turn)
        if not turn_end.ends(turn):
            raise UserError(
                f"the chat template writes no special token after message {number}, so nothing "
                "would teach the policy to end such a response."
            )
        spans.append((len(before), len(before + turn)))
    return spans


def marked_turns(
    text: str, messages: Sequence[Message], trained: Set[int], turn_end: "TurnEnd"
) -> tuple[str, list[Span]]:
    """`text` without its marks, and the marked parts that are of the messages `trained`, each with
    its end-of-turn token. Some templates mark only the last turns.
    """
    text = text.replace(MARK_END + MARK_START, "")  # two marked parts of one turn
    parts = re.split(f"[{MARK_START}{MARK_END}]", text)  # every second one is marked
    borders = list(itertools.accumulate(map(len, parts), initial=0))
    text = text.replace(MARK_START, "").replace(MARK_END, "")
    marked = list(zip(borders[1::2], borders[2::2], strict=False))
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    places = turns[-len(marked) :] if marked else []
    if len(marked) > len(turns) or not trained & set(places):
        raise UserError(
            f"the {{% generation %}} markers of the chat template hold {len(marked)} parts of a "
            f"conversation with {len(turns)} turns of the assistant: put them around all of these."
        )
    spans: list[Span] = []
    for place, (start, end) in zip(places, marked, strict=True):
        if place in trained:
            check_written(place + 1, messages[place], text[start:end])
            if not turn_end.ends(text[start:end]):
                found = turn_end.follows.match(text, end)
                if found is None:
                    raise UserError(
                        "the {% generation %} markers leave out the end of message "
                        f"{place + 1}: {text[end : end + 20]!r} is behind them in place of "
                        f"{turn_end.end_of_turn!r}. Put that token inside them."
                    )
                end = found.end()
            spans.append((start, end))
    return text, spans


def encode_turns(text: str, spans: Sequence[Span], tokenize: Tokenize, decode: Decode) -> Encoded:
    """The tokens of `text` up to the last of its `spans`, with the mask of the spans. Where a
    tokenizer joins characters on both sides of a border, in pieces, as in a rollout.
    """
    cuts = [0, *(border for span in spans for border in span)]
    parts = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    tokens, *pieces = tokenize([text[: spans[-1][1]], *parts])
    joined = [token for piece in pieces for token in piece]
    borders = list(itertools.accumulate(map(len, pieces)))
    if joined != tokens:
        # Some tokenizers add a space before each piece; what counts is the text before a turn.
        before = tokenize([text[:border] for border in cuts[1:]])
        if all(tokens[: len(part)] == part for part in before):
            joined, borders = tokens, [len(part) for part in before]
        elif decode(joined) != decode(tokens):
            raise UserError(
                "the tokenizer joins the text before and after a response's beginning or end: put "
                "a special token, a space or a newline between them in the chat template."
            )
    is_response = [False] * len(joined)
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        is_response[start:end] = [True] * (end - start)
    return Encoded(joined, is_response)


class TurnEnd:
    """From the text of a turn with what follows it to the end of its last `end_of_turn`, behind
    which are blanks or other tokens of the expression `control`; else of its last token of these.
    """

    def __init__(self, end_of_turn: str, control: str) -> None:
        self.usual = re.compile(rf"({re.escape(end_of_turn)})(?:\s|{control})*\Z")
        self.other = re.compile(rf"({control})\s*\Z")
        self.end_of_turn = end_of_turn
        self.follows = re.compile(rf"\s*{re.escape(end_of_turn)}")

    def __call__(self, turn: str) -> int:
        found = self.usual.search(turn) or self.other.search(turn)
        return len(turn) if found is None else found.end(1)

    def ends(self, turn: str) -> bool:
        return self.other.search(turn) is not None


def _refusal(number: int, is_last: bool, why: str) -> UserError:
    remedy = (
        "Give model.data.chat_template one whose generation prompt is how a response begins, or "
        "mark the assistant's text in it with {% generation %} ... {% endgeneration %}."
        if is_last
        else "Set model.data.one_turn_per_sample=True (SFT), or cut the conversation after its "
        "first response."
    )
    return UserError(
        f"the chat template does not show which tokens of message {number} are the assistant's: "
        f"{why}. {remedy}"
    )


_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARKS = f"{{%- macro marked_turn() %}}{MARK_START}{{{{ caller() }}}}{MARK_END}{{%- endmacro +%}}"
_DATE, _LETTERS = "strftime_now", "aAbBcdDeFHIjmMpSTuUwWxXyYZ"
_PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"})


class ChatTemplate(ConversationForm):
    """A chat template and the tokenizer that it is for. `ConfigError`: it is not of Hugging Face,
    or has no template.

    Args:
        source: "tokenizer" for the tokenizer's own template, else the file of one (Jinja).
        options: `model.data.chat_template_kwargs`.
        date: that a template takes for today, as YYYY-MM-DD; None: today's.
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
                "the file of one, or null."
            )
        self.options = dict(resolved(options or {}))
        self.date = str(date or datetime.date.today())
        written = self.template or str(own_chat_template(tokenizer))
        self.state = ["chat template", written, json.dumps(self.options, sort_keys=True)]
        self.state += [self.date] if _DATE in written else []

    @property
    def end_strings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The first control token after a response, as the template writes it; empty without."""
        before, whole = self.render(_PROBE[:1], True), self.render(_PROBE, False)
        turn = whole.removeprefix(before)
        found = re.search(self._control_pattern(), turn[turn.rfind(_PROBE[1]["content"]) :])
        return () if found is None else (found.group(),)

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        inputs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; without `inputs` the template gets those of the job."""
        text = self._write(messages, generation_prompt, self.options if inputs is None else inputs)
        return text.replace(MARK_START, "").replace(MARK_END, "")

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts that hold their control tokens already."""
        return [list(ids) for ids in self.inner(texts, add_special_tokens=False)["input_ids"]]

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the policy's next message begins."""
        return self.tokenize([self.render(messages, True)])[0]

    def prompt(self, record: Record) -> list[int]:
        messages = prompt_messages(record)
        text = self.render(messages, True, self._inputs(record))
        _check_contents(text, messages)
        return self.tokenize([text])[0]

    def continuation(
        self, messages: Sequence[Message], record: Record, response: Sequence[int]
    ) -> list[int]:
        """The tokens that follow the assistant's last message, up to where its next one begins,
        without the token that ended it as a `response`, ids; `record`: of the prompt.
        """
        last = max(n for n, message in enumerate(messages) if message["role"] == ASSISTANT)
        more = messages[last + 1 :]
        whole = [*messages[:last], {"role": ASSISTANT, "content": A_RESPONSE}, *more]
        _, found, text = self.render(whole, True, self._inputs(record)).rpartition(A_RESPONSE)
        if not found:
            raise UserError(f"the chat template leaves out message {last + 1}, a response.")
        _check_contents(text, more)
        ids = self.tokenize([text])[0]
        return ids[1:] if ids[:1] == list(response[-1:]) else ids

    def encode_messages(
        self, messages: Sequence[Message], record: Record, first: int = 0
    ) -> Encoded:
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

    def _inputs(self, record: Record) -> dict[str, Any]:
        return {"tools": record_tools(record), **self.options, **template_options(record)}

    def _write(
        self, messages: Sequence[Message], generation_prompt: bool, inputs: Mapping[str, Any]
    ) -> str:
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
        tokens = {*self.inner.all_special_tokens, *self.inner.get_added_vocab()}
        return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"

    @functools.cached_property
    def _turn_end(self) -> TurnEnd:
        if not self.end_strings:
            raise UserError(
                "the chat template writes no special token after a response; give one with "
                "{{ eos_token }} after the assistant's content as model.data.chat_template."
            )
        return TurnEnd(self.end_strings[0], self._control_pattern())


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
        day = datetime.datetime.fromisoformat(date)
        asked = [f"%{flag}{letter}" for flag in ("-", "") for letter in _LETTERS]
        text = " | ".join(["part", *(f"replace({e!r}, {day.strftime(e)!r})" for e in asked)])
        macros += (
            f"{{%- macro {_DATE}(format) %}}{{%- for part in format.split('%%') %}}"
            f"{{%- set text = {text} %}}{{%- if '%' in text %}}{{{{ raise_exception('{_DATE} has "
            "no directive %' ~ text.split('%')[1][:2]) }}{%- endif %}{{ text }}"
            "{{ '' if loop.last else '%' }}{%- endfor %}{%- endmacro +%}"
        )
    return macros + calls


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
