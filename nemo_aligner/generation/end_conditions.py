# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""When a generated response has ended."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import Tokenizer, end_ids, keep_special_tokens


class EndConditions:
    """Decides when a response has ended: at an end token, or with one of the end strings.

    An end string that is one token for the tokenizer (mostly a special token) ends a response as
    that token, not as the same characters spelled by others. Any other is searched for in the
    decoded last tokens.

    Attributes:
        token_ids: ids that end a response by themselves, eos first.
        strings: end strings that are searched for in the decoded tokens.
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
        """The ids of `string` where it follows other text and, if that is one token, alone.

        Empty if it is several tokens where it follows other text.
        """
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
        """Whether `token` may be the end of an end string."""
        if token not in self._may_end:
            # Alone, a part of a character decodes to U+FFFD and some tokens to nothing: these need
            # the whole tail.
            last = self._decode([token]).rstrip()[-1:]
            self._may_end[token] = last in ("", "\ufffd") or any(
                s.rstrip()[-1:] in ("", last) for s in self.strings
            )
        return self._may_end[token]

    def at_end(self, ids: Sequence[int], first: int = 0) -> bool:
        """Whether the response of the sample `ids` has ended with its last token.

        Args:
            first: where the response begins: an end string must not begin in the prompt.
        """
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
    """Find the responses of another engine that are fit for training; clamp their ids in place.

    Args:
        response_tokens: int64 `[b, S]`, prompt and response.
        response_lengths: int64 `[b]`, R.
        strategy: not used (NeMo-Aligner's signature).
        tokenizer: NeMo tokenizer; ids are clamped to its vocabulary.
        end_strings: strings that end a response, besides eos.

    Returns:
        bool `[b]`: the response ends at R-1 and no id of the sample is outside the vocabulary.
    """
    inside = ((response_tokens >= 0) & (response_tokens < tokenizer.vocab_size)).all(dim=1)
    response_tokens.clamp_(0, tokenizer.vocab_size - 1)
    end = EndConditions(tokenizer, end_strings or ())
    rows = zip(response_tokens.tolist(), response_lengths.tolist(), strict=True)
    ended = [end.at_end(row[:length]) for row, length in rows]
    return inside & torch.tensor(ended, device=inside.device)
