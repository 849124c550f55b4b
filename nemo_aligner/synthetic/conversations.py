# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in NeMo's chat format that are mixed, and cut down to a length."""

from collections.abc import Sequence

from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, NeMoChat
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.synthetic.annotation import check_conversation
from nemo_aligner.synthetic.command_line import open_records


def check_conversations(path: str) -> list[Record]:
    """The conversations of a file; `UserError` names file and line."""
    return list(open_records(path, check_conversation))


def without_long(
    records: Sequence[Record],
    max_seq_length: int,
    tokenizer: Tokenizer | None,
    library: str | None,
    model: str | None,
) -> list[Record]:
    """The conversations of which something of a response lies within `max_seq_length` tokens.

    Args:
        tokenizer: that counts; None, or if `library` and `model` are given: that of them.
    """
    if library is not None and model is not None:
        from omegaconf import OmegaConf

        from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

        kind = "type" if library == "huggingface" else "model"
        tokenizer = build_tokenizer(OmegaConf.create({"library": library, kind: model}))
    assert tokenizer is not None
    form = NeMoChat(tokenizer, NEMO_TOKENS)
    limit = max_seq_length + 1  # the last token of an example is predicted, but not read
    return [record for record in records if any(form.conversation(record).is_response[:limit])]
