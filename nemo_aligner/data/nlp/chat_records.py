# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in the records of data files, as lists of messages.

A conversation stands in the field `messages`, OpenAI's form `[{"role": ..., "content": ...}]`, or
in `conversations`, ShareGPT's `[{"from": ..., "value": ...}]`; a prompt in `prompt`, a text or
messages; a pair in `prompt`, `chosen` and `rejected`; a labelled response in `prompt` and
`response`. A text in the field `system` comes first, and `tools` is handed to the template.

This module knows no tokens; every complaint is a `UserError` that the reader of the file completes
with file and line.
"""

import json
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.json_lines import Record

Message = dict[str, Any]  # role and content, and what else a template reads

# Names of ShareGPT's speakers; other names are roles already.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
ASSISTANT = "assistant"


def conversation_field(record: Record) -> str | None:
    """`messages` or `conversations`, which of them a record has; None: neither."""
    return next((field for field in ("messages", "conversations") if field in record), None)


def holds_pair(record: Record) -> bool:
    """Whether a record is a preference pair."""
    return "chosen" in record or "rejected" in record


def conversation_messages(record: Record) -> list[Message]:
    """The messages of a record's conversation, its system message first.

    Raises:
        UserError: there is no conversation, or a message is broken.
    """
    field = conversation_field(record)
    if field is None:
        raise UserError(
            "field 'messages' (or 'conversations') is missing; the line has "
            f"{sorted(record)}. A conversation is a list of messages, "
            '{"messages": [{"role": "user", "content": ...}, ...]}.'
        )
    return _with_system(record, read_messages(record[field], field))


def prompt_messages(record: Record) -> list[Message]:
    """The messages of a prompt: those of `prompt`, else of the record's conversation.

    Raises:
        UserError: there is none, a message is broken, or the last one is the assistant's.
    """
    messages = (
        _with_system(record, _prompt(record))
        if record.get("prompt") is not None
        else conversation_messages(record)
    )
    if messages[-1]["role"] == ASSISTANT:
        raise UserError(
            f"message {len(messages)}, the last, is the assistant's, but the policy responds to a "
            "prompt: remove that message."
        )
    return messages


def pair_messages(record: Record) -> tuple[list[Message], list[Message]]:
    """The conversations of a pair, the better one first.

    `chosen` and `rejected` are texts or messages that continue `prompt`, or whole conversations.

    Raises:
        UserError: a field is missing or broken, a conversation does not end with a response, or
            the two are the same, one begins with the other, or they respond to different prompts.
    """
    for field in ("chosen", "rejected"):
        if record.get(field) is None:
            raise UserError(f"field '{field}' is missing; the line has {sorted(record)}.")
    prompt = None if record.get("prompt") is None else _with_system(record, _prompt(record))
    chosen, rejected = (_whole(record, field, prompt) for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise UserError("'chosen' and 'rejected' are equal, so there is nothing to prefer.")
    for number, (one, other) in enumerate(zip(chosen, rejected), start=1):
        if one != other:
            if one["role"] != ASSISTANT or other["role"] != ASSISTANT:
                raise UserError(
                    f"'chosen' and 'rejected' differ in message {number}, which is of the role "
                    f"{one['role']!r}: they are no responses to the same prompt."
                )
            return chosen, rejected
    fields = ("chosen", "rejected")
    shorter, longer = fields if len(chosen) < len(rejected) else reversed(fields)
    raise UserError(
        f"'{shorter}' is the beginning of '{longer}', so there is no other response to the same "
        "prompt: end both with the responses that are to be compared."
    )


def response_messages(record: Record) -> tuple[list[Message], int]:
    """The conversation of `prompt` and `response`, a text or the messages that follow, and how
    many messages of the assistant are in the response.

    Raises:
        UserError: a field is missing or broken, or the conversation does not end with a response.
    """
    for field in ("prompt", "response"):
        if record.get(field) is None:
            raise UserError(f"field '{field}' is missing; the line has {sorted(record)}.")
    prompt = _with_system(record, _prompt(record))
    messages = _whole(record, "response", prompt)
    return messages, sum(message["role"] == ASSISTANT for message in messages[len(prompt) :])


def check_response(messages: list[Message], field: str) -> None:
    """Raise `UserError` unless a conversation ends with a message of the assistant."""
    role = messages[-1]["role"]
    if role != ASSISTANT:
        raise UserError(
            f"field '{field}' ends with a message of the role {role!r}, but the last one must be "
            "the assistant's, the response: add it, or remove the line."
        )


def record_tools(record: Record) -> list[Any] | None:
    """The tools that a template is told of; None without.

    Raises:
        UserError: the field holds no list.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise UserError(f"field 'tools' is not valid JSON ({error}).") from None
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"field 'tools' must be a list, not {type(tools).__name__}.")
    return tools or None


def read_messages(value: Any, field: str) -> list[Message]:
    """The messages of a list in either form; `field` is its name in the record.

    Keys other than role and content (`tool_calls`, `name`, ...) stay, unless they are null.

    Raises:
        UserError: it is no list of messages, is empty, or a message lacks its role or content.
    """
    if not isinstance(value, list):
        raise UserError(f"field '{field}' must be a list of messages, not {type(value).__name__}.")
    if not value:
        raise UserError(f"field '{field}' is an empty list: a conversation has messages.")
    return [_message(item, number, field) for number, item in enumerate(value, start=1)]


def _message(item: Any, number: int, field: str) -> Message:
    where = f"message {number} of field '{field}'"
    if not isinstance(item, dict):
        raise UserError(f"{where} must be an object, not {type(item).__name__}.")
    names = ("from", "value") if "from" in item else ("role", "content")
    role, content = (item.get(name) for name in names)
    if not isinstance(role, str) or not role.strip():
        raise UserError(f"{where} has no '{names[0]}'; it has {sorted(item)}.")
    if names[0] == "from":
        role = ROLES.get(role.lower(), role.lower())
    if content is None and not item.get("tool_calls"):
        raise UserError(f"{where} ({role}) has no '{names[1]}'; it has {sorted(item)}.")
    if content is not None and not isinstance(content, str):
        raise UserError(
            f"'{names[1]}' of {where} ({role}) must be text, not {type(content).__name__}."
        )
    more = {key: value for key, value in item.items() if key not in names and value is not None}
    return {"role": role, "content": content or "", **more}


def _prompt(record: Record) -> list[Message]:
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return read_messages(prompt, "prompt")


def _with_system(record: Record, messages: list[Message]) -> list[Message]:
    """`messages` after what the field `system` says."""
    system = record.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise UserError(f"field 'system' must be text, not {type(system).__name__}.")
    if messages[0]["role"] == "system":
        raise UserError("there are two system messages, in field 'system' and in message 1.")
    return [{"role": "system", "content": system}, *messages]


def _whole(record: Record, field: str, prompt: list[Message] | None) -> list[Message]:
    """The conversation that ends with the response in `field`."""
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
            f"field '{field}' is a whole conversation, but it does not begin with that of "
            "'prompt'."
        )
    return whole
