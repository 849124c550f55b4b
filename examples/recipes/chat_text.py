# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of conversations for the recipes: the chat template of a model's tokenizer, or plain turns
where it has none. What a template writes before a response is part of the prompt.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Message = dict[str, str]  # role and content


class ChatText:
    """Conversations as text.

    Args:
        model: Hugging Face folder with the tokenizer.
    """

    def __init__(self, model: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def prompt(self, messages: list[Message]) -> str:
        """Everything up to the next response."""
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        return "\n\n".join([*turns, "Assistant:"])

    def response(self, content: str) -> str:
        """A response as it follows `prompt`; the end token is not part of it."""
        return content if self.tokenizer.chat_template else f" {content}"


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SystemExit(f"error: {file}, line {number} is not JSON: {error}") from error


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Write a jsonl file; returns the number of its lines."""
    count = 0
    with file.open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    print(f"{file}: {count} lines")
    return count
