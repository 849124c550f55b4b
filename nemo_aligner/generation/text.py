# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to a batch of tokens, and the ends of responses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import (
    Tokenizer,
    begins_with_bos,
    end_ids,
    keep_special_tokens,
    text_tokens,
)


def tokenize_batch(
    sentences: Sequence[str],
    tokenizer: Tokenizer,
    max_len: int,
    add_BOS: bool | None = None,
    add_EOS: bool = False,
) -> tuple[Tensor, Tensor]:
    """int64 tokens `[b, max_len]`, cut and padded with eos, and lengths `[b]`, on the CPU.
    `add_BOS` None: as the tokenizer does. `UserError`: it is True and the tokenizer has no bos
    token.
    """
    with_bos = begins_with_bos(tokenizer, add_BOS, "add_BOS")
    tokens = torch.full((len(sentences), max_len), tokenizer.eos_id, dtype=torch.int64)
    lengths = torch.empty(len(sentences), dtype=torch.int64)
    for i, sentence in enumerate(sentences):
        ids = text_tokens(tokenizer, sentence, with_bos)
        if add_EOS:
            ids = [*ids, tokenizer.eos_id]
        ids = ids[:max_len]
        tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        lengths[i] = len(ids)
    return tokens, lengths


class EndConditions:
    """Decides when a response has ended: at one of `token_ids` (eos first), or with an end string.
    One that is a token for the tokenizer ends a response as that token only; the other `strings`
    are searched for in the decoded last tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_strings: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._decode_options = keep_special_tokens(tokenizer)
        self.token_ids = end_ids(tokenizer)
        strings = []
        for string in end_strings:
            ids = self._single_token_ids(string)
            self.token_ids += [token for token in ids if token not in self.token_ids]
            if not ids:
                strings.append(string)
        self.strings = tuple(strings)
        self._ends = frozenset(self.token_ids)
        # Number of last tokens to decode. A token covers at least one byte; one more, because some
        # tokenizers drop the space before the first one.
        self._tail = 1 + max((len(string.encode()) for string in self.strings), default=0)
        # By id: whether a response whose last token it is may end with an end string.
        self._may_end: dict[int, bool] = {}

    def _single_token_ids(self, string: str) -> list[int]:
        """The ids of `string` where it follows other text (if not one token: empty) and alone."""
        for prefix in "a1>":  # one of them does not merge with the string into other tokens
            before = self.tokenizer.text_to_ids(prefix)
            both = self.tokenizer.text_to_ids(prefix + string)
            if both[:-1] == before:
                alone = self.tokenizer.text_to_ids(string)
                ids = [both[-1]] + (alone if len(alone) == 1 else [])
                # The unknown token stands for any other unknown string too.
                return [token for token in ids if self._decode([token]).strip() == string.strip()]
        return []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.ids_to_text(ids, **self._decode_options)

    def _candidate(self, token: int) -> bool:
        if token not in self._may_end:
            # Alone, half a character decodes to U+FFFD and some tokens to nothing.
            last = self._decode([token]).rstrip()[-1:]
            self._may_end[token] = last in ("", "\ufffd") or any(
                s.rstrip()[-1:] in ("", last) for s in self.strings
            )
        return self._may_end[token]

    def at_end(self, ids: Sequence[int], first: int = 0) -> bool:
        """Whether the response from `first` on in the sample `ids` ends with its last token."""
        if ids[-1] in self._ends:
            return True
        if not (self.strings and 0 <= ids[-1] < self.vocab_size and self._candidate(ids[-1])):
            return False
        return self._decode(list(ids[max(first, len(ids) - self._tail) :])).endswith(self.strings)


def verify_is_valid_and_clamp_range_(
    response_tokens: Tensor,
    response_lengths: Tensor,
    strategy: object,
    tokenizer: Tokenizer,
    end_strings: Sequence[str] | None = None,
) -> Tensor:
    """bool `[b]`: the response of another engine ends at R-1 and no id of `response_tokens`, int64
    `[b, S]`, is outside the vocabulary; clamps the ids in place. `response_lengths` int64 `[b]`:
    R; `strategy`: not used (NeMo-Aligner's signature).
    """
    inside = ((response_tokens >= 0) & (response_tokens < tokenizer.vocab_size)).all(dim=1)
    response_tokens.clamp_(0, tokenizer.vocab_size - 1)
    end = EndConditions(tokenizer, end_strings or ())
    rows = zip(response_tokens.tolist(), response_lengths.tolist(), strict=True)
    ended = [end.at_end(row[:length]) for row, length in rows]
    return inside & torch.tensor(ended, device=inside.device)
