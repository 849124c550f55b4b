# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in the records of data files (docs/data.md), as lists of messages, and what the
forms that make tokens of them share. Every complaint is a `UserError` that the reader of the file
completes with file and line.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.fields import (
    CONVERSATIONS,
    PAIR,
    Encoded,
    EqualPairError,
    Record,
    check_kind,
    conversation_field,
    missing,
)

Message = dict[str, Any]  # role and content, and what else a template reads

# Names of ShareGPT's speakers; other names are roles already.
ASSISTANT = "assistant"
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def conversation_messages(record: Record) -> list[Message]:
    field = conversation_field(record)
    if field is None:
        raise UserError(
            "field 'messages' (or 'conversations') is missing; the line has "
            f"{sorted(record)}, and no list [{{'role': 'user', 'content': ...}}, ...]."
        )
    return _with_system(record, read_messages(record[field], field))


def prompt_messages(record: Record) -> list[Message]:
    """The messages of a prompt: those of `prompt`, else of the record's conversation."""
    has_prompt = record.get("prompt") is not None
    messages = _prompt(record) if has_prompt else conversation_messages(record)
    if messages[-1]["role"] == ASSISTANT:
        raise UserError(
            f"message {len(messages)}, the last, is the assistant's, but the policy responds to "
            "it: remove that message."
        )
    return messages


def is_trained(message: Message) -> bool:
    return message["role"] == ASSISTANT and message.get("weight") != 0


def each_turn(record: Record) -> list[Record]:
    """One record for each turn that is trained on, which ends with it and trains on no other."""
    messages = conversation_messages(record)
    others = {key: value for key, value in record.items() if key not in (*CONVERSATIONS, "system")}
    ends = [number for number, message in enumerate(messages) if is_trained(message)]
    as_history = [m | {"weight": 0} if m["role"] == ASSISTANT else m for m in messages]
    return [{**others, "messages": [*as_history[:end], messages[end]]} for end in ends] or [record]


def pair_messages(record: Record) -> tuple[list[Message], list[Message], int]:
    """The conversations of a pair, the better one first, and the place from which they differ."""
    if any(record.get(field) is None for field in PAIR):
        raise missing(PAIR, record)
    prompt = None if record.get("prompt") is None else _prompt(record)
    chosen, rejected = (_whole(record, field, prompt) for field in PAIR)
    if chosen == rejected:
        raise EqualPairError
    for number, (one, other) in enumerate(zip(chosen, rejected), start=1):
        if one != other:
            if one["role"] != ASSISTANT or other["role"] != ASSISTANT:
                raise UserError(
                    f"'chosen' and 'rejected' differ in message {number}, which is of the role "
                    f"{one['role']!r}, and have no common prompt."
                )
            return chosen, rejected, number - 1
    shorter, longer = PAIR if len(chosen) < len(rejected) else reversed(PAIR)
    raise UserError(
        f"'{shorter}' is the beginning of '{longer}': end both with responses to the same prompt."
    )


def speaks_to_assistant(record: Record) -> bool:
    """Whether anybody but the assistant says something in the prompt of a record."""
    field = next(f for f in ("prompt", *CONVERSATIONS, "chosen") if record.get(f) is not None)
    texts = [record.get("system"), record[field]]
    if isinstance(record[field], list):
        said = map(_said, record[field])
        texts[1:] = [text for speaker, text, _calls in said if speaker != ASSISTANT]
    return any(text and text.strip() for text in texts)


def other_prompt(first: Record, second: Record) -> str:
    """Why the conversations of two records are no responses to one prompt; empty: they are."""
    for field in ("system", "tools", "chat_template_kwargs"):
        if (first.get(field) or None) != (second.get(field) or None):
            return f"they differ in '{field}'"
    one, other = ([_said(m) for m in r[conversation_field(r) or ""]] for r in (first, second))
    for number, (said, also) in enumerate(zip(one, other), start=1):
        if said != also:
            same = said[0] == also[0] == one[-1][0]
            text = f"they differ in message {number}, which is of the role {said[0]!r}"
            return "" if same else text
    return "they are the same" if len(one) == len(other) else "one is the beginning of the other"


def _said(message: Message) -> tuple[str, str, Any]:
    names = ("from", "value") if "from" in message else ("role", "content")
    speaker, content = (message.get(name) for name in names)
    role = str(speaker).lower()
    return ROLES.get(role, role), _text(content or "", names[1]), message.get("tool_calls")


def response_messages(record: Record) -> tuple[list[Message], int]:
    """`prompt` with `response`, a text or messages, and the place where the response begins."""
    if record.get("prompt") is None or record.get("response") is None:
        raise missing(("prompt", "response"), record)
    prompt = _prompt(record)
    return _whole(record, "response", prompt), len(prompt)


def check_response(messages: list[Message], field: str) -> None:
    role = messages[-1]["role"]
    if role != ASSISTANT:
        raise UserError(
            f"field '{field}' ends with a message of the role {role!r}, not with the assistant's "
            "response: add it, or remove the line."
        )


def record_tools(record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str) and not tools.strip():
        return None
    return _from_json(tools, list, "field 'tools'") or None


def template_options(record: Record) -> dict[str, Any]:
    given = record.get("chat_template_kwargs") or {}
    options: dict[str, Any] = _from_json(given, dict, "field 'chat_template_kwargs'")
    return options


def _from_json(value: Any, kind: type, what: str) -> Any:
    """A value of a type, or the one that a JSON text holds; None stays."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{what} is not valid JSON ({error}): {value[:80]!r}.") from None
    if value is not None and not isinstance(value, kind):
        name = "a list" if kind is list else "a JSON object"
        raise UserError(f"{what} must be {name}, not {type(value).__name__}: {value!r}.")
    return value


def read_messages(value: Any, field: str, as_named: bool = False) -> list[Message]:
    """The messages of a list in either form; `field` is its name in the record. Other keys stay,
    unless they are null. With `as_named` speakers keep their names, and each may be trained on.
    """
    if not isinstance(value, list):
        raise UserError(f"field '{field}' must be a list of messages, not {type(value).__name__}.")
    if not value:
        raise UserError(f"field '{field}' is an empty list: a conversation has messages.")
    items = enumerate(value, start=1)
    return [_message(item, f"message {n} of field '{field}'", as_named) for n, item in items]


def _message(item: Any, where: str, as_named: bool) -> Message:
    check_kind(item, dict, where)
    names = ("from", "value") if "from" in item else ("role", "content")
    role, content = (item.get(name) for name in names)
    if not isinstance(role, str) or not role.strip():
        raise UserError(f"{where} has no '{names[0]}'; it has {sorted(item)}.")
    if names[0] == "from" and not as_named:
        role = ROLES.get(role.lower(), role.lower())
    if content is None and not item.get("tool_calls"):
        given = f"'{names[1]}': null" if names[1] in item else f"no '{names[1]}'"
        raise UserError(f"{where} ({role}) has {given} and no 'tool_calls': {sorted(item)}.")
    more = {key: value for key, value in item.items() if key not in names and value is not None}
    calls = _from_json(more.pop("tool_calls", None), list, f"'tool_calls' of {where}")
    if calls:
        more["tool_calls"] = [_call(call, f"a call in 'tool_calls' of {where}") for call in calls]
    weight = more.pop("weight", None)
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise UserError(f"'weight' of {where} is {weight!r}: use 0 (not trained on) or 1.")
    may_train = as_named or role == ASSISTANT
    if weight == 1 and not may_train:
        raise UserError(
            f"'weight' of {where} is 1, but only the assistant's turns are trained on, and its "
            f"role is {role!r}: remove it."
        )
    more |= {"weight": 0} if weight == 0 and may_train else {}
    text = _text(content or "", f"'{names[1]}' of {where} ({role})")
    return {"role": role, "content": text, **more}


def _text(content: Any, what: str) -> str:
    """A text, or the texts of a list of parts joined; `what` is its name in messages."""
    if not isinstance(content, str | list):
        raise UserError(f"{what} must be text, not {type(content).__name__}.")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{what} has a part of type {kind!r}, but only parts of type 'text' can be used: "
                "remove it, or the line."
            )
    return "".join(part["text"] for part in parts)


def _call(call: Any, what: str) -> Any:
    check_kind(call, dict, what)
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"], what)}
    given = call.get("arguments")
    if given is None:
        return call
    if isinstance(given, str) and not given.strip():
        given = {}
    return call | {"arguments": _from_json(given, dict, f"'arguments' of {what}")}


def _prompt(record: Record) -> list[Message]:
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return _with_system(record, [{"role": "user", "content": prompt}])
    return _with_system(record, read_messages(prompt, "prompt"))


def _with_system(record: Record, messages: list[Message]) -> list[Message]:
    system = record.get("system")
    if system is None or system == "":
        return messages
    check_kind(system, str, "field 'system'")
    if messages[0]["role"] == "system":
        raise UserError("there are two system messages, in field 'system' and in message 1.")
    return [{"role": "system", "content": system}, *messages]


def _whole(record: Record, field: str, prompt: list[Message] | None) -> list[Message]:
    value = record[field]
    if isinstance(value, str):
        if prompt is None:
            raise UserError(
                f"field 'prompt' is missing: '{field}' is a text, the response to it; the line "
                f"has {sorted(record)}."
            )
        return [*prompt, {"role": ASSISTANT, "content": value}]
    messages = read_messages(value, field)
    check_response(messages, field)
    if prompt is not None and messages[0]["role"] in (ASSISTANT, "tool"):
        return [*prompt, *messages]
    whole = _with_system(record, messages)
    if prompt is not None and whole[: len(prompt)] != prompt:
        raise UserError(
            f"field '{field}' is a whole conversation, but does not begin with that of 'prompt'."
        )
    return whole


# --- forms ---

_THINK = re.compile(r"</?think>")


def check_written(number: int, message: Message, text: str) -> None:
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
            "response that counts. Give model.data.chat_template one that writes it; for a turn "
            "before the last set its 'weight' to 0, or model.data.one_turn_per_sample=True (SFT)."
        )


def without_layout(text: str) -> str:
    """`text` with one space in place of blanks and newlines, which templates may tidy."""
    return " ".join(text.split())


def _leaves(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, dict) else ()
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item) if isinstance(item, dict | list) else [item]


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
        that are trained on, up to the end of the last one; `record`: that they stand in.
        """

    def conversation(self, record: Record, last_alone: bool = False) -> Encoded:
        messages = conversation_messages(record)
        check_response(messages, conversation_field(record) or "")
        return self.encode_messages(messages, record, (len(messages) - 1) * last_alone)

    def sample(self, record: Record) -> list[int]:
        """The tokens of a conversation that is scored: its last response counts."""
        return self.conversation(record, last_alone=True).tokens

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """Both conversations of a pair, the better one first."""
        chosen, rejected, first = pair_messages(record)
        better = self.encode_messages(chosen, record, first)
        return better, self.encode_messages(rejected, record, first)

    def response(self, record: Record) -> Encoded:
        messages, first = response_messages(record)
        return self.encode_messages(messages, record, first)


class UnwrittenForm(ConversationForm):
    """Checks messages, before the form is known and whether the last must be the assistant's."""

    end_strings, state = (), []

    def prompt(self, record: Record) -> list[int]:
        return self.encode_messages(prompt_messages(record), record).tokens

    def sample(self, record: Record) -> list[int]:
        return self.encode_messages(conversation_messages(record), record).tokens

    def encode_messages(self, messages: Any, record: Record, first: int = 0) -> Encoded:
        return Encoded([*str(messages).encode()], [])
