# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a tokenizer, which clients and servers compare."""

import hashlib
import json


def tokenizer_fingerprint(tokenizer) -> str | None:
    """What tells whether two jobs mean the same text by a token id, short enough to be read by
    people.

    Args:
        tokenizer: of NeMo; None, or one that cannot list its tokens, has no fingerprint.

    Returns:
        E.g. "512 tokens, end 0, 3fa9c1d2e4b5": the size of the vocabulary, the id that ends a
        text, and the first 12 hexadecimal digits of the SHA-256 of all tokens with their ids. It
        does not depend on the kind of tokenizer.
    """
    if not hasattr(tokenizer, "ids_to_tokens") or not hasattr(tokenizer, "eos_id"):
        return None
    inner = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "get_vocab"):  # Hugging Face: its ids may have holes
        tokens = sorted((id_, token) for token, id_ in inner.get_vocab().items())
    else:
        tokens = list(enumerate(tokenizer.ids_to_tokens(list(range(tokenizer.vocab_size)))))
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return f"{tokenizer.vocab_size} tokens, end {tokenizer.eos_id}, {digest[:12]}"
