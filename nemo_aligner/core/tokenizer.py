# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the project uses of NeMo's tokenizers, and the text of a response."""

import hashlib
import inspect
import json
from collections.abc import Sequence
from typing import Any, Protocol

from nemo_aligner.core.errors import ConfigError, UserError

# What an exported reward model pads with, added to a tokenizer that has no token to spare for it.
PADDING = "<|pad|>"


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


def begins_with_bos(tokenizer: Tokenizer, asked: bool | None, key: str = "add_bos") -> bool:
    """Whether plain texts begin with bos: `asked`, the value of `key`, or if it is None what a
    Hugging Face tokenizer does itself (others: no). `UserError`: there is none to put.
    """
    if asked and tokenizer.bos_id is None:
        raise UserError(f"{key}=True, but the tokenizer has no bos token; set it to null.")
    inner: Any = getattr(tokenizer, "tokenizer", None)
    if asked is not None or tokenizer.bos_id is None or not hasattr(inner, "all_special_ids"):
        return bool(asked)
    return list(inner("a")["input_ids"])[:1] == [tokenizer.bos_id]


def text_tokens(tokenizer: Tokenizer, text: str, add_bos: bool) -> list[int]:
    """The tokens of a plain text; with `add_bos` they begin with bos, once."""
    ids = tokenizer.text_to_ids(text)
    bos = tokenizer.bos_id if add_bos else None
    return list(ids) if bos is None or list(ids[:1]) == [bos] else [bos, *ids]


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a response: eos first, then those that `set_end_ids` has added."""
    return [tokenizer.eos_id, *getattr(tokenizer, "more_end_ids", ())]


def set_end_ids(tokenizer: Any, ids: Sequence[int]) -> None:
    """Let those of `ids` that `tokenizer` has end responses too; `ConfigError`: no list of ids."""
    if not isinstance(ids, Sequence) or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ConfigError(
            f"model.tokenizer.end_token_ids={ids!r} must be a list of token ids, such as [2, 7]."
        )
    size, eos = tokenizer.vocab_size, tokenizer.eos_id
    tokenizer.more_end_ids = [id_ for id_ in dict.fromkeys(ids) if id_ < size and id_ != eos]


def own_chat_template(tokenizer: Tokenizer) -> Any:
    return getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)


def response_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a response without its end token (Hugging Face: without special tokens)."""
    ids = list(ids)
    if ids and ids[-1] in end_ids(tokenizer):
        ids.pop()
    return tokenizer.ids_to_text(ids) if ids else ""


def keep_special_tokens(tokenizer: Tokenizer) -> dict[str, bool]:
    """Options of `ids_to_text` to write special tokens too (Hugging Face leaves them out)."""
    options = inspect.signature(tokenizer.ids_to_text).parameters
    return {"remove_special_tokens": False} if "remove_special_tokens" in options else {}


def decode_with_special_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.ids_to_text(list(ids), **keep_special_tokens(tokenizer)) if ids else ""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that are no ordinary text: bos, eos and all that were added."""
    found = {tokenizer.eos_id, tokenizer.bos_id}
    inner: Any = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "get_added_vocab"):  # of Hugging Face
        found |= {*inner.all_special_ids, *inner.get_added_vocab().values()}
    found |= set(getattr(tokenizer, "special_token_to_id", {}).values())  # added to SentencePiece
    return frozenset(id_ for id_ in found if id_ is not None)


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """A short text that is equal for tokenizers, of any kind, whose ids mean the same tokens, e.g.
    "512 tokens, end 0, 3fa9c1d2e4b5": vocabulary size, end id, and 12 digits of the SHA-256 of all
    tokens with their ids, but for a padding token that the export of a reward model has added at
    its end. None: there is no tokenizer, or it cannot list its tokens.
    """
    if not hasattr(tokenizer, "ids_to_tokens") or not hasattr(tokenizer, "eos_id"):
        return None
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is not None and hasattr(inner, "get_vocab"):  # Hugging Face: its ids may have holes
        tokens = sorted((id_, token) for token, id_ in inner.get_vocab().items())
    else:
        tokens = list(enumerate(tokenizer.ids_to_tokens(list(range(tokenizer.vocab_size)))))
    size = tokenizer.vocab_size
    if tokens and tokens[-1][1] == PADDING:  # no sample has it
        tokens.pop()
        size -= 1
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return f"{size} tokens, end {tokenizer.eos_id}, {digest[:12]}"
