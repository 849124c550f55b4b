# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of prompts and files of responses. Imports nothing heavy.

A file of responses has one JSON object per line, in the order of the prompts; several responses to
one prompt follow each other:

    {"prompt": a text, of a conversation what its tokens say, "response": ...,
     "length": tokens of the response with its end token, "is_end": it ended by itself,
     "logprob_sum": of its tokens, at the sampling temperature, "prompt_tokens": [...],
     "response_tokens": [...], "tokenizer": fingerprint}

and other columns of the prompt's record, for reward functions. Of lines written by others,
"prompt" and "response" are needed.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nemo_aligner.core.errors import UserError

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.sources import Record


@dataclasses.dataclass(frozen=True)
class Response:
    """One line of a file of responses; the module says what the fields hold."""

    prompt: str
    response: str
    length: int | None = None
    is_end: bool | None = None
    logprob_sum: float | None = None
    prompt_tokens: list[int] | None = None
    response_tokens: list[int] | None = None
    tokenizer: str | None = None
    columns: "Record" = dataclasses.field(default_factory=dict)  # others, of the prompt's record

    @property
    def line(self) -> "Record":
        return self.columns | {k: v for k, v in vars(self).items() if k != "columns"}


def read_prompts(path: str | Path) -> "Sequence[Record]":
    """The prompts of a file, as PPO reads them: texts and conversations (docs/data.md).
    `UserError`: no such file, no line, or a line without a prompt.
    """
    from nemo_aligner.data.nlp.chat_records import prompt_messages
    from nemo_aligner.data.nlp.fields import check_text, holds_conversation
    from nemo_aligner.data.nlp.records import Records

    def check(record: "Record") -> int:
        if holds_conversation(record):
            return len(prompt_messages(record))
        check_text(record, "text" if "text" in record or "prompt" not in record else "prompt")
        return 0

    return Records([str(path)], (), check)


def read_responses(path: str | Path) -> list[Response]:
    """`UserError`: no such file, no line, or a line that is no response."""
    from nemo_aligner.data.nlp.records import Records

    kinds: dict[str, type | tuple[type, ...]] = {
        "length": int,
        "is_end": bool,
        "logprob_sum": (int, float),
        "prompt_tokens": list,
        "response_tokens": list,
        "tokenizer": str,
    }

    def check(record: "Record") -> int:
        for name, kind in kinds.items():
            if record.get(name) is not None and not isinstance(record[name], kind):
                raise UserError(
                    f"field '{name}' is {record[name]!r}; nemo-aligner generate writes such files."
                )
        return 0

    records = Records([str(path)], ("prompt", "response"), check, allow_blank=True)
    names = ("prompt", "response", *kinds)
    return [Response(**{n: r.pop(n, None) for n in names}, columns=r) for r in records]


def write_records(path: str | Path, records: "Iterable[Record]") -> int:
    """Write a jsonl file, which takes the place of `path` when it is complete; its length.
    `UserError`: it cannot be written.
    """
    count = 0
    with replaced(path) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def check_writable(path: str | Path) -> None:
    """Raise `UserError` if a file cannot be written at `path`; nothing is created."""
    path = Path(path).absolute()
    folder = next(folder for folder in path.parents if folder.exists())
    why = "it is a folder" if path.is_dir() else None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = why or f"{folder} is no folder that can be written to"
    if why is not None:
        raise UserError(f"{path} cannot be written: {why}; give another place.")


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[TextIO]:
    """A file to write, which takes the place of `path` when it is complete; after an error `path`
    is as before. `UserError`: it cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}; give another place.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
