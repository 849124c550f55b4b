# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the datasets over jsonl files share: tokenizing, the choice of documents, padding."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from typing_extensions import Self

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer

# A tokenizer may add a few tokens that stand for no character (bos, eos, SentencePiece's leading
# space).
EXTRA_TOKENS = 8


class TextEncoder:
    """Tokenizes a text without a template and without bos.

    Args:
        tokenizer: NeMo tokenizer.
        data_cfg: `model.data`; `append_eod` and `apply_ftfy` are optional.
    """

    def __init__(self, tokenizer: Tokenizer, data_cfg: Mapping[str, Any] | None = None) -> None:
        data_cfg = data_cfg or {}
        self.tokenizer = tokenizer
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

    def __call__(self, text: str) -> list[int]:
        text = self.fix_text(text) if self.fix_text else text
        return self.tokenizer.text_to_ids(text) + [self.tokenizer.eos_id] * self.append_eod

    def length(self, text: str, limit: int) -> int:
        """Number of tokens: exact if above `limit`, else possibly an upper bound.

        A short ASCII text surely fits and is not tokenized.
        """
        if text.isascii() and len(text) + EXTRA_TOKENS <= limit:
            return len(text) + EXTRA_TOKENS
        return len(self(text))


class FileDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset over files that serves some of their documents.

    Index -1 is an empty slot of a padded validation batch: it returns the first item, masked.

    Attributes:
        name: "train", ...; for messages.
        documents: int64 [number of items], the numbers of the documents served, in order.
    """

    name: str
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, documents: np.ndarray) -> Self:
        """Return the same dataset with only `documents`, without reading the files again."""
        other = copy.copy(self)
        other.documents = documents
        return other


def documents_within(
    lengths: np.ndarray, seq_length: int, name: str, what: str, are_longer: str
) -> np.ndarray:
    """Numbers of the documents of at most `seq_length` tokens; a warning counts the others.

    Args:
        lengths: int64 [number of documents], in tokens.
        seq_length: limit.
        name: of the dataset, for messages.
        what: plural of what a document is, for messages: "all 3 <what> <are_longer> than ...".
        are_longer: verb of that message.

    Raises:
        UserError: no document fits.
    """
    documents = np.flatnonzero(lengths <= seq_length)
    if not len(documents):
        raise UserError(
            f"{name} data: all {len(lengths)} {what} {are_longer} than seq_length={seq_length} "
            f"tokens; the longest has {lengths.max()}. Shorten the texts or raise "
            "model.data.seq_length (model.encoder_seq_length)."
        )
    if len(documents) < len(lengths):
        logging.warning(
            f"{name} data: {len(lengths) - len(documents)} of {len(lengths)} {what} are left out: "
            f"they {are_longer} than seq_length={seq_length} tokens (the longest has "
            f"{lengths.max()})."
        )
    return documents


def pad(tokens: list[int], width: int, pad_id: int) -> torch.Tensor:
    """int64 [width]: `tokens`, then `pad_id`."""
    return torch.tensor(tokens + [pad_id] * (width - len(tokens)), dtype=torch.int64)
