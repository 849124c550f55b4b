# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the project uses of NeMo's tokenizers, and the text of a response."""

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """A tokenizer of NeMo: Hugging Face, SentencePiece or byte-level."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, without the padding of the model's vocabulary."""

    @property
    def eos_id(self) -> int:
        """The id that ends a response and pads batches."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, if there is one."""

    def text_to_ids(self, text: str) -> list[int]:
        """Tokenize a text."""

    def ids_to_text(self, ids: list[int], **options: Any) -> str:
        """Decode ids; the options depend on the kind of tokenizer."""


def response_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a response: without its end token, and without special tokens where a Hugging
    Face tokenizer decodes.
    """
    ids = list(ids)
    if ids[-1:] == [tokenizer.eos_id]:
        ids.pop()
    return tokenizer.ids_to_text(ids) if ids else ""
