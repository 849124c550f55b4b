# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to one padded batch of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos, text_tokens


def tokenize_batch(
    sentences: Sequence[str],
    tokenizer: Tokenizer,
    max_len: int,
    add_BOS: bool | None = None,
    add_EOS: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokenize texts, cut each to `max_len` tokens and pad with eos to exactly `max_len`.

    Args:
        add_BOS: begin each with bos; None: as the tokenizer itself does it.

    Returns:
        tokens int64 `[b, max_len]` and lengths int64 `[b]`, on the CPU.

    Raises:
        UserError: `add_BOS` with a tokenizer that has no bos token.
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
