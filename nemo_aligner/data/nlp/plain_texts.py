# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of records that stay as they are: prompts, and how they go on. Imports nothing heavy."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_aligner.config.data_rules import line_ends
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.columns import missing
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.records import NO_FORM, check_text


class PlainTexts:
    """Takes prompts and responses from records, by `prompt_end` and `allow_empty_prompt` of
    `data_cfg`, which is `model.data`.
    """

    def __init__(self, data_cfg: Mapping[str, Any]) -> None:
        self.prompt_end = line_ends(data_cfg.get("prompt_end") or "")
        self.allow_empty_prompt = bool(data_cfg.get("allow_empty_prompt"))

    def parts(self, record: Record, *fields: str, whole: bool = False) -> list[str]:
        """The text of a prompt, and of the fields that continue it.

        Args:
            whole: without a prompt, and `prompt_end`, the prompt is empty, as it also is where
                `allow_empty_prompt` says so.
        """
        texts = [plain_text(record, field) for field in fields]
        if record.get("prompt") is not None:
            return [plain_text(record, "prompt", allow_blank=True), *texts]
        if self.prompt_end:
            return self.split(texts, " and ".join(map(repr, fields)))
        if whole or self.allow_empty_prompt:
            return ["", *texts]
        raise missing(
            "prompt",
            record,
            "(Where the texts begin with their prompts, model.data.prompt_end says how these end: "
            "'\\n\\nAssistant:'. model.data.allow_empty_prompt=True: there are none.)",
        )

    def split(self, texts: Sequence[str], what: str) -> list[str]:
        """What whole texts begin with, up to the last `prompt_end` that all share, and how each
        of them goes on.
        """
        shared = texts[0][: common_length(texts[0], texts[-1])]
        place = shared.rfind(self.prompt_end) + len(self.prompt_end)
        if self.prompt_end not in shared or not all(text[place:].strip() for text in texts):
            raise UserError(
                f"{what} have no beginning in common that ends with model.data.prompt_end="
                f"{self.prompt_end!r}, with a response behind it."
            )
        return [shared[:place], *(text[place:] for text in texts)]


def common(first: list[int], second: list[int]) -> int:
    """How many tokens the two begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def common_length(first: str | np.ndarray, second: str | np.ndarray) -> int:
    """How many characters (or tokens) the two begin with in common."""
    if not (isinstance(first, str) and isinstance(second, str)):
        return common([*map(int, first)], [*map(int, second)])
    shorter = range(min(len(first), len(second)))
    return bisect.bisect_left(shorter, True, key=lambda n: first[: n + 1] != second[: n + 1])


def plain_text(record: Record, field: str, allow_blank: bool = False) -> str:
    """A field that must be a text, as there is no form for conversations."""
    if isinstance(record.get(field), list):
        raise UserError(f"field '{field}' holds a conversation. {NO_FORM}")
    check_text(record, field, allow_blank)
    text: str = record[field]
    return text
