# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo's chat format, `model.data.chat=True`: conversations between special tokens, and the tokens
of them that are trained on.

With the tokens of `conf/gpt_sft.yaml` (SYS is system_turn_start, TURN turn_start, and so on) a
conversation is the text

    SYS System NAME_END {system} TURN_END
    TURN User NAME_END {value} TURN_END
    TURN Assistant NAME_END {value} TURN_END TURN

without the spaces and newlines in between. The last TURN follows if the last turn is one that is
trained on. What is trained on is the value of the turns of every speaker whom the record's field
`mask` does not name, TURN_END and the TURN that follows included; never the first turn.

Turns may have labels (SteerLM). Of `type` VALUE_TO_TEXT, LABEL_START {label} NAME_END stands
before the value and is not trained on; of TEXT_TO_VALUE after TURN_END, and it alone is trained
on, without LABEL_START. Without a type labels are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import (
    ASSISTANT,
    ConversationForm,
    Message,
    check_written,
    is_trained,
    prompt_messages,
    read_messages,
    template_options,
)
from nemo_aligner.data.nlp.fields import Encoded, Record, check_kind

SYSTEM, USER, RESPONDER = "System", "User", "Assistant"
VALUE_TO_TEXT, TEXT_TO_VALUE = "VALUE_TO_TEXT", "TEXT_TO_VALUE"
# Tokens are counted behind this text: at the beginning of a text some tokenizers add a space.
_BEHIND = "\x00"


@dataclass(frozen=True)
class Turn:
    """What one speaker says; `label` may be None. Without `counts` it is not trained on."""

    speaker: str
    value: str
    label: str | None = None
    counts: bool = True


@dataclass(frozen=True)
class Source:
    system: str  # text of the system turn
    turns: tuple[Turn, ...]  # in order
    masked: tuple[str, ...] = (USER,)  # speakers who are not trained on
    kind: str | None = None  # None, `VALUE_TO_TEXT` or `TEXT_TO_VALUE`

    def trains(self, turn: Turn) -> bool:
        """Whether a turn is trained on, if it is not the first."""
        return turn.counts and turn.speaker not in self.masked


@dataclass(frozen=True)
class ChatTokens:
    """The texts between turns, `model.data.chat_prompt_tokens`; see the module."""

    system_turn_start: str
    turn_start: str
    label_start: str
    end_of_turn: str
    end_of_name: str

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> "ChatTokens":
        """From a section of the configuration; `ConfigError`: one of them is missing or empty."""
        found: dict[str, Any] = {field.name: texts.get(field.name) for field in fields(cls)}
        for name, value in found.items():
            if not isinstance(value, str) or not value:
                raise ConfigError(f"model.data.chat_prompt_tokens.{name}={value!r}: give a text.")
        return cls(**found)


NEMO_TOKENS = ChatTokens("<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "\n", "\n")


def header_text(source: Source, marks: ChatTokens) -> str:
    return marks.system_turn_start + SYSTEM + marks.end_of_name + source.system + marks.end_of_turn


def turn_text(turn: Turn, kind: str | None, marks: ChatTokens) -> str:
    """One turn, with its label where the type of the conversation has a place for it."""
    label = "" if turn.label is None else marks.label_start + turn.label + marks.end_of_name
    before = label if kind == VALUE_TO_TEXT else ""
    after = label if kind == TEXT_TO_VALUE else ""
    name = marks.turn_start + turn.speaker + marks.end_of_name
    return name + before + turn.value + marks.end_of_turn + after


def chat_text(source: Source, marks: ChatTokens) -> str:
    """A conversation, with the TURN that ends its last response."""
    turns = "".join(turn_text(turn, source.kind, marks) for turn in source.turns)
    trained = source.turns[-1].speaker not in source.masked
    return header_text(source, marks) + turns + marks.turn_start * trained


class NeMoChat(ConversationForm):
    """NeMo's chat format for one tokenizer; `marks`: the texts between turns."""

    def __init__(self, tokenizer: Tokenizer, marks: ChatTokens) -> None:
        self.tokenizer = tokenizer
        self.marks = marks
        self.end_strings = (marks.turn_start,)
        self.state = ["NeMo's chat format", *astuple(marks)]
        self._behind = len(tokenizer.text_to_ids(_BEHIND))
        self._turn_start_ids = self._ids(marks.turn_start)
        self._label_start_ids = self._ids(marks.label_start)
        self._end_of_name_ids = self._ids(marks.end_of_name)

    def prompt(self, record: Record) -> list[int]:
        if record.get("prompt") is None and "conversations" in record:
            source = source_of_record(record)
            if source.turns[-1].speaker not in source.masked:
                raise UserError(
                    f"the last turn is that of {source.turns[-1].speaker}, but the policy "
                    "responds: remove that turn."
                )
        else:
            _check_options(record)
            source = source_of_messages(prompt_messages(record))
        text = chat_text(source, self.marks)  # which ends with the turn of someone who is masked
        text += self.marks.turn_start + RESPONDER + self.marks.end_of_name
        return self.tokenizer.text_to_ids(text)

    def conversation(self, record: Record, last_alone: bool = False) -> Encoded:
        if "conversations" in record:  # with speakers of its own
            return self.encode(source_of_record(record))
        return super().conversation(record, last_alone)

    def encode_messages(
        self, messages: Sequence[Message], record: Record, first: int = 0
    ) -> Encoded:
        _check_options(record)
        return self.encode(source_of_messages(messages, first))

    def encode(self, source: Source) -> Encoded:
        tokens = self.tokenizer.text_to_ids(chat_text(source, self.marks))
        header = self.tokenizer.text_to_ids(header_text(source, self.marks))
        parts = [self._ids(turn_text(turn, source.kind, self.marks)) for turn in source.turns]
        joined = [token for part in (header, *parts) for token in part]
        more = len(tokens) - len(joined)  # TURN
        if list(tokens[: len(joined)]) != joined or more not in (0, len(self._turn_start_ids)):
            raise UserError(
                "the tokenizer joins characters of two turns into one token. Choose other "
                "model.data.chat_prompt_tokens: special tokens of the tokenizer are never joined."
            )
        is_response = [False] * len(header)
        for number, (turn, part) in enumerate(zip(source.turns, parts, strict=True)):
            start, end = self._trained(source, number, turn, part)
            is_response += [start <= place < end for place in range(len(part))]
        ends = source.turns[-1].counts  # and so does the TURN at the end
        is_response += [ends] * (len(tokens) - len(is_response))
        if not any(is_response):
            raise UserError(
                f"no turn of the conversation is trained on: all but the first are masked "
                f"({', '.join(source.masked)}) or of weight 0."
            )
        return Encoded(tokens, is_response)

    def _trained(
        self, source: Source, number: int, turn: Turn, part: Sequence[int]
    ) -> tuple[int, int]:
        context = 0 if source.kind == TEXT_TO_VALUE else 1
        if number < context:
            return 0, 0  # it is the context of the others, whoever speaks
        if not source.trains(turn):
            # Its TURN ends the response before it. NeMo trains on it behind a masked turn too,
            # such as between two tools' replies, where no response ends.
            follows_response = number > context and source.trains(source.turns[number - 1])
            return 0, len(self._turn_start_ids) * follows_response
        name = len(self._ids(self.marks.turn_start + turn.speaker + self.marks.end_of_name))
        label = -1 if turn.label is None else _find(self._label_start_ids, part)
        if label >= 0 and source.kind == TEXT_TO_VALUE:
            return label + len(self._label_start_ids), len(part)
        if label >= 0 and source.kind == VALUE_TO_TEXT:
            end = _find(self._end_of_name_ids, part[name:])
            if end < 0:
                return 0, 0
            name += end + len(self._end_of_name_ids)
        return name, len(part)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.text_to_ids(_BEHIND + text)[self._behind :]


def source_of_record(record: Record) -> Source:
    """The conversation in the fields `system`, `conversations`, `mask` and `type` of a record."""
    _check_options(record)
    messages = list(enumerate(read_messages(record["conversations"], "conversations", True), 1))
    for number, message in messages:
        if message.get("label") is not None:
            check_kind(message["label"], str, f"'label' of message {number}")
    turns = tuple(
        Turn(m["role"], m["content"], m.get("label"), m.get("weight") != 0) for _, m in messages
    )
    system, kind = record.get("system") or "", record.get("type")
    check_kind(system, str, "field 'system'")
    if kind not in (None, VALUE_TO_TEXT, TEXT_TO_VALUE):
        raise UserError(f"field 'type' is {kind!r}: use {VALUE_TO_TEXT}, {TEXT_TO_VALUE} or none.")
    mask = record.get("mask") or USER
    masked = tuple(str(mask).split(","))
    speakers = list(dict.fromkeys(turn.speaker for turn in turns))
    absent = [name for name in masked if name not in speakers]
    if absent:
        raise UserError(
            f"nobody in the conversation is called {absent[0]!r} (field 'mask', User if absent); "
            f"its speakers are {', '.join(speakers)}."
        )
    return _written(Source(system, turns, masked, kind), messages)


def source_of_messages(messages: Sequence[Message], first: int = 0) -> Source:
    """The conversation of messages with roles, of which those before `first` do not count."""
    system, rest = "", list(enumerate(messages, start=1))
    if messages[0]["role"] == "system":
        system = rest.pop(0)[1]["content"]
    if any(message["role"] == "system" for _number, message in rest):
        raise UserError("NeMo's chat format has one system message, the first.")
    if not rest:
        raise UserError("the conversation has nothing but a system message.")
    turns = tuple(
        Turn(each["role"].capitalize(), each["content"], None, number > first and is_trained(each))
        for number, each in rest
    )
    masked = dict.fromkeys(turn.speaker for turn in turns if turn.speaker.lower() != ASSISTANT)
    return _written(Source(system, turns, tuple(masked) or (USER,)), rest)


def _written(source: Source, messages: list[tuple[int, Message]]) -> Source:
    """`source`, unless a turn that is trained on has more than a text, such as calls of tools."""
    for (number, message), turn in zip(messages, source.turns, strict=True):
        if source.trains(turn):
            check_written(number, message, turn.value)
    return source


def _check_options(record: Record) -> None:
    if template_options(record):
        raise UserError(
            "field 'chat_template_kwargs' is for chat templates, and NeMo's chat format is none: "
            "remove it."
        )


def _find(part: Sequence[int], whole: Sequence[int]) -> int:
    """Where `part` begins in `whole`; -1: nowhere."""
    places = range(len(whole) - len(part) + 1)
    return next((n for n in places if list(whole[n : n + len(part)]) == list(part)), -1)
