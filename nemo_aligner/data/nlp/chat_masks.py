# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the assistant's turns are in a conversation that a chat template wrote.

Templates rarely mark them. But what a template writes for the messages before a turn, with its
generation prompt, is what the policy sees when it generates that turn; so a turn begins where this
text ends, and ends with the end-of-turn token that follows. Both texts must be the beginning of
the whole conversation, and the tokens of the first the beginning of its tokens: else training
would show the policy something that it never sees in a rollout, and the sample is refused.

Example, ChatML; the policy is trained on what is underlined:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ~~~~~~~~~~~~~~~
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import ASSISTANT, Message

Tokenize = Callable[[list[str]], list[list[int]]]  # several texts in one call, which is faster
Decode = Callable[[list[int]], str]
# (messages, with the generation prompt) -> text
Render = Callable[[Sequence[Message], bool], str]
Span = tuple[int, int]  # start and end in characters


class Encoded(NamedTuple):
    """The tokens of a conversation.

    Attributes:
        tokens: S ids, up to the end of the last of the assistant's turns.
        is_response: S values, True for the assistant's tokens, their end-of-turn tokens included.
    """

    tokens: list[int]
    is_response: list[bool]


def find_turns(
    text: str, messages: Sequence[Message], render: Render, turn_end: Callable[[str], int]
) -> list[Span]:
    """The assistant's turns in `text`, which the template wrote for all of `messages`.

    Args:
        turn_end: of the text of a turn with what follows it, the end of its end-of-turn token.

    Raises:
        UserError: the turns cannot be found.
    """
    spans: list[Span] = []
    for number, message in enumerate(messages, start=1):
        if message["role"] != ASSISTANT:
            continue
        if number == 1:
            raise UserError("message 1 is the assistant's: there is no prompt before it.")
        before = render(messages[: number - 1], True)
        if not text.startswith(before):
            raise _refusal(
                number,
                "what it writes before that message, with its generation prompt, is not the "
                f"beginning of the conversation: {_difference(before, text)}",
            )
        after = text if number == len(messages) else render(messages[:number], False)
        end = len(before) + turn_end(after[len(before) :])
        if not after.startswith(before) or not text.startswith(after[:end]) or end > len(text):
            raise _refusal(
                number,
                "what it writes up to that message is not the beginning of the whole "
                f"conversation: {_difference(after[:end], text)}",
            )
        if spans and spans[-1][1] > len(before):
            raise _refusal(number, "that message begins before the end of the one before it")
        spans.append((len(before), end))
    return spans


def encode_turns(text: str, spans: Sequence[Span], tokenize: Tokenize, decode: Decode) -> Encoded:
    """The tokens of `text` up to the last of its `spans`, with the mask of the spans.

    A tokenizer may join characters on both sides of a span's border into one token (two newlines,
    say). Such a conversation is tokenized in pieces, as in a rollout, whose prompt is tokenized
    before there is a response.

    Raises:
        UserError: the tokenizer writes something else for the pieces than for the whole.
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
        control_tokens: the tokens of the tokenizer that are no ordinary text.
    """

    def __init__(self, end_of_turn: str, control_tokens: Sequence[str]) -> None:
        ordered = sorted(control_tokens, key=len, reverse=True)
        control = "|".join(re.escape(token) for token in ordered)
        self.usual = re.compile(rf"({re.escape(end_of_turn)})(?:\s|{control})*\Z")
        self.other = re.compile(rf"({control})\s*\Z")

    def __call__(self, turn: str) -> int:
        found = self.usual.search(turn) or self.other.search(turn)
        return len(turn) if found is None else found.end(1)


def _refusal(number: int, why: str) -> UserError:
    return UserError(
        f"the chat template does not show which tokens of message {number} are the assistant's: "
        f"{why}. Mark them in the template with {{% generation %}} ... {{% endgeneration %}} "
        "around the assistant's text and its end-of-turn token, give that file as "
        "model.data.chat_template, or cut the conversation after its first response."
    )


def _difference(part: str, text: str) -> str:
    """Where `part` leaves `text`, for a message."""
    same = next(
        (n for n, (one, other) in enumerate(zip(part, text)) if one != other),
        min(len(part), len(text)),
    )
    start = max(same - 20, 0)
    return f"{part[start : same + 30]!r} against {text[start : same + 30]!r}"
