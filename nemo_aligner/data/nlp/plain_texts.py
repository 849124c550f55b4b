# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of records that stay as they are: their tokens, and what they have in common."""

import bisect
import importlib.metadata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos, text_tokens
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.records import NO_FORM, check_text, settings_of

# A tokenizer may add a few tokens that stand for no character (bos, eos, SentencePiece's leading
# space).
EXTRA_TOKENS = 8


class TextEncoder:
    """Tokenizes a text without a template; tokens stay as they are.

    Args:
        data_cfg: `model.data`; `add_bos`, `append_eod` and `apply_ftfy` are optional.
    """

    def __init__(self, tokenizer: Tokenizer, data_cfg: Mapping[str, Any] | None = None) -> None:
        data_cfg = data_cfg or {}
        self.tokenizer = tokenizer
        self.add_bos = begins_with_bos(tokenizer, data_cfg.get("add_bos"), "model.data.add_bos")
        self.append_eod = bool(data_cfg.get("append_eod"))
        self.fix_text: Callable[[str], str] | None = None
        if data_cfg.get("apply_ftfy"):
            try:
                from ftfy import fix_text
            except ImportError:
                raise ConfigError(
                    "model.data.apply_ftfy=True needs the package ftfy: pip install ftfy."
                ) from None
            self.fix_text = fix_text

    def settings(self, *others: Any) -> Callable[[], str | None]:
        """`settings` of `Records` for a check that needs lengths, and depends on `others`."""
        ftfy = "" if self.fix_text is None else importlib.metadata.version("ftfy")
        return partial(settings_of, self.tokenizer, self.add_bos, self.append_eod, ftfy, *others)

    def __call__(self, text: str | np.ndarray) -> list[int]:
        if not isinstance(text, str):
            return [int(token) for token in text]
        return self.without_end(text) + [self.tokenizer.eos_id] * self.append_eod

    def without_end(self, text: str) -> list[int]:
        """The tokens of a text that goes on, so without `append_eod`."""
        text = self.fix_text(text) if self.fix_text else text
        return text_tokens(self.tokenizer, text, self.add_bos)

    def length(self, text: str | np.ndarray, limit: int) -> int:
        """Number of tokens: exact if above `limit`, else possibly an upper bound.

        A short ASCII text surely fits and is not tokenized.

        Raises:
            UserError: tokens that the tokenizer does not have.
        """
        if not isinstance(text, str):
            self._check_tokens(text)
            return len(text)
        if text.isascii() and len(text) + EXTRA_TOKENS <= limit:
            return len(text) + EXTRA_TOKENS
        return len(self(text))

    def _check_tokens(self, tokens: np.ndarray) -> None:
        size = self.tokenizer.vocab_size
        if not len(tokens):
            raise UserError("it has no tokens.")
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise UserError(
                f"tokens from {tokens.min()} to {tokens.max()}, but the tokenizer has {size}: the "
                "data were made with another one. Tokenize them with the model's tokenizer."
            )


def common_length(first: Any, second: Any) -> int:
    """How many characters of texts, or tokens of lists or arrays, two begin with in common."""
    one, other = (x.tolist() if isinstance(x, np.ndarray) else x for x in (first, second))
    shorter = range(min(len(one), len(other)))
    return bisect.bisect_left(shorter, True, key=lambda n: one[: n + 1] != other[: n + 1])


def plain_texts(record: Record, *fields: str, allow_blank: bool = False) -> list[str]:
    """Fields that must be texts, as there is no form for conversations."""
    for field in fields:
        if isinstance(record.get(field), list):
            raise UserError(f"field '{field}' holds a conversation. {NO_FORM}")
    check_text(record, *fields, allow_blank=allow_blank)
    return [record[field] for field in fields]
