# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a tokenizer: clients send it, servers compare it with their own."""

import hashlib
import json
from typing import Any

from nemo_aligner.core.tokenizer import PADDING


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return a short text that is equal for two tokenizers if their ids mean the same tokens.

    Args:
        tokenizer: of NeMo, of any kind.

    Returns:
        E.g. "512 tokens, end 0, 3fa9c1d2e4b5": the size of the vocabulary, the id of the end
        token, and the first 12 hexadecimal digits of the SHA-256 of all tokens with their ids.
        It does not depend on the kind of tokenizer, nor on a padding token that the export of a
        reward model has added at its end. None if there is no tokenizer, or it cannot list its
        tokens.
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
