# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference pairs in one row, `{"chosen": text, "rejected": text}`, as neighbouring records."""

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.columns import kind_of
from nemo_aligner.data.nlp.json_lines import Record


def pair_texts(record: Record) -> list[Record]:
    """The two texts of a pair as records `{"text": ...}`, the better first.

    Args:
        record: with `chosen` and `rejected`, texts, and optionally `prompt`, a text that stands
            before both; its other fields go to both records. A record that has a `text` is
            returned as it is.

    Raises:
        UserError: one of the three is no text, or only one of the two responses is there.
    """
    if "text" in record or not ("chosen" in record or "rejected" in record):
        return [record]
    fields = ("prompt", "chosen", "rejected")
    others = {name: value for name, value in record.items() if name not in fields}
    texts = []
    for name in fields[1:]:
        if name not in record:
            raise UserError(f"field '{name}' is missing; there are {sorted(record)}.")
        for part in (name, "prompt"):
            if not isinstance(record.get(part, ""), str):
                raise UserError(f"field '{part}' must be text, not {kind_of(record[part])}.")
        if not record[name].strip():
            raise UserError(f"field '{name}' is empty.")
        texts.append(record.get("prompt", "") + record[name])
    return [{**others, "text": text} for text in texts]
