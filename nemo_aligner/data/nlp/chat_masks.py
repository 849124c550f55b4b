# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the assistant's turns are in a conversation that a chat template wrote.

Templates rarely mark them. But what a template writes for the messages before a turn, with its
generation prompt, is what the policy sees when it generates that turn; so a turn begins where this
text ends, and ends with the end-of-turn token that follows. Both texts must be the beginning of
the whole conversation, and the tokens of the first the beginning of its tokens: else training
would show the policy something that it never sees in a rollout, and the sample is refused.

A template may also mark the turns itself, with `{% generation %}`. In both cases a turn that is
trained on must be written in full, thoughts and calls of tools included; templates leave out the
thoughts of earlier turns on purpose, which is right for those that are only read.

Example, ChatML; the policy is trained on what is underlined:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ~~~~~~~~~~~~~~~
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import ASSISTANT, THOUGHTS, Message

Tokenize = Callable[[list[str]], list[list[int]]]  # several texts in one call, which is faster
Decode = Callable[[list[int]], str]
# (messages, with the generation prompt) -> text
Render = Callable[[Sequence[Message], bool], str]
Span = tuple[int, int]  # start and end in characters
# What stands around the marked parts of a text: characters that no text has.
MARK_START, MARK_END = "\ufdd0", "\ufdd1"
_THINK = re.compile(r"</?think>")


class Encoded(NamedTuple):
    """The tokens of a conversation."""

    tokens: list[int]  # S ids, up to the end of the last of the assistant's turns
    # S values, True for the assistant's tokens, their end-of-turn tokens included
    is_response: list[bool]


def find_turns(
    text: str, messages: Sequence[Message], trained: Set[int], render: Render, turn_end: "TurnEnd"
) -> list[Span]:
    """The assistant's turns in `text`, which the template wrote for all of `messages`.

    Args:
        trained: places of the messages to find.
        turn_end: finds the end-of-turn token in a turn with what follows it.
    """
    spans: list[Span] = []
    for place in sorted(trained):
        number, is_last = place + 1, place + 1 == len(messages)
        if not place:
            raise UserError("message 1 is the assistant's: there is no prompt before it.")
        before = render(messages[:place], True)
        turn = (text if is_last else render(messages[:number], False))[len(before) :]
        turn = turn[: turn_end(turn)]
        if not text.startswith(before + turn):
            part = "up to that message"
            if not text.startswith(before):
                part = "before that message, with its generation prompt,"
            why = (
                f"what it writes {part} is not the beginning of the conversation: "
                f"{_difference(before + turn, text)}"
            )
            raise _refusal(number, is_last, why)
        if spans and spans[-1][1] > len(before):
            why = "that message begins before the end of the one before it"
            raise _refusal(number, is_last, why)
        check_written(number, messages[place], turn)
        if not turn_end.ends(turn):
            raise UserError(
                f"the chat template writes no special token after message {number}, so that the "
                "policy would not learn to end such a response."
            )
        spans.append((len(before), len(before + turn)))
    return spans


def marked_turns(
    text: str, messages: Sequence[Message], trained: Set[int], turn_end: "TurnEnd"
) -> tuple[str, list[Span]]:
    """`text` without its marks, and the marked parts that are of the messages `trained`, each with
    its end-of-turn token, also where that stands behind the mark. Some templates mark only the
    last turns.
    """
    text = text.replace(MARK_END + MARK_START, "")  # two marked parts of one turn
    borders = [0]
    for piece in re.split(f"[{MARK_START}{MARK_END}]", text):  # every second one is marked
        borders.append(borders[-1] + len(piece))
    text = text.replace(MARK_START, "").replace(MARK_END, "")
    marked = list(zip(borders[1::2], borders[2::2], strict=False))
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    places = turns[-len(marked) :] if marked else []
    if len(marked) > len(turns) or not trained & set(places):
        raise UserError(
            f"the {{% generation %}} markers of the chat template hold {len(marked)} parts of a "
            f"conversation with {len(turns)} turns of the assistant: put them around all that a "
            "response writes, its end-of-turn token included."
        )
    spans: list[Span] = []
    for place, (start, end) in zip(places, marked, strict=True):
        if place in trained:
            check_written(place + 1, messages[place], text[start:end])
            if not turn_end.ends(text[start:end]):
                found = turn_end.follows.match(text, end)
                if found is None:
                    raise UserError(
                        "the {% generation %} markers of the chat template leave out the end of "
                        f"message {place + 1}: {text[end : end + 20]!r} is behind them in place "
                        f"of {turn_end.end_of_turn!r}. Put the end-of-turn token inside them."
                    )
                end = found.end()
            spans.append((start, end))
    return text, spans


def check_written(number: int, message: Message, text: str) -> None:
    """Raise `UserError` unless `text`, which a template wrote for a message, holds all of it."""
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
            "response that counts. Give model.data.chat_template the file of one that writes it, "
            "or take it out of the data; for a turn before the last one set its 'weight' to 0, or "
            "model.data.one_turn_per_sample=True (SFT)."
        )


def without_layout(text: str) -> str:
    """`text` with one space in place of blanks and newlines, which templates may tidy."""
    return " ".join(text.split())


def _leaves(value: Any) -> Iterator[Any]:
    """The names and values in a call of a tool."""
    yield from value if isinstance(value, dict) else ()
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item) if isinstance(item, dict | list) else [item]


def encode_turns(text: str, spans: Sequence[Span], tokenize: Tokenize, decode: Decode) -> Encoded:
    """The tokens of `text` up to the last of its `spans`, with the mask of the spans.

    A tokenizer may join characters on both sides of a span's border into one token (two newlines,
    say). Such a conversation is tokenized in pieces, as in a rollout, whose prompt is tokenized
    before there is a response.
    """
    cuts = [0, *(border for span in spans for border in span)]
    parts = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    tokens, *pieces = tokenize([text[: spans[-1][1]], *parts])
    joined = [token for piece in pieces for token in piece]
    if joined != tokens:
        # Some tokenizers add a space before each piece; what counts is the text before a turn.
        before = tokenize([text[:border] for border in cuts[1:]])
        if all(tokens[: len(part)] == part for part in before):
            return _masked(tokens, [len(part) for part in before])
        if decode(joined) != decode(tokens):
            raise UserError(
                "the tokenizer joins the text before and after a response's beginning or end, and "
                "writes something else for the two parts alone: put a special token, a space or a "
                "newline between them in the chat template."
            )
    borders = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
    return _masked(joined, borders)


def _masked(tokens: list[int], borders: Sequence[int]) -> Encoded:
    """`borders` are the starts and ends of the turns in tokens, in turn."""
    is_response = [False] * len(tokens)
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        is_response[start:end] = [True] * (end - start)
    return Encoded(tokens, is_response)


class TurnEnd:
    """From the text of a turn with what follows it to the end of its end-of-turn token.

    What may follow is blank, or other control tokens (an end of the text). A turn that ends with
    another token (calls of tools do, in some templates) ends with its last control token.

    Args:
        end_of_turn: what mostly ends a turn.
        control: regular expression of the tokens that are no ordinary text.
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
        """Whether a turn ends with a control token."""
        return self.other.search(turn) is not None


def _refusal(number: int, is_last: bool, why: str) -> UserError:
    remedy = (
        "Give model.data.chat_template a file with a template whose generation prompt is how a "
        "response begins, or mark the assistant's text and its end-of-turn token in it with "
        "{% generation %} ... {% endgeneration %}."
        if is_last
        else "Set model.data.one_turn_per_sample=True (SFT): each response is then the last of a "
        "sample of its own, as it will be seen in use. Or cut the conversation after its first "
        "response."
    )
    return UserError(
        f"the chat template does not show which tokens of message {number} are the assistant's: "
        f"{why}. {remedy}"
    )


def _difference(part: str, text: str) -> str:
    """Where `part` leaves `text`, for a message."""
    same = next(
        (n for n, (one, other) in enumerate(zip(part, text)) if one != other),
        min(len(part), len(text)),
    )
    start = max(same - 20, 0)
    return f"{part[start : same + 30]!r} against {text[start : same + 30]!r}"
