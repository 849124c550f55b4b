# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels of SteerLM, "quality:4,toxicity:0,...", and the conversations that have them: what the
scripts beside this module share.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.fields import Record
from nemo_aligner.data.nlp.nemo_chat import RESPONDER, USER, VALUE_TO_TEXT
from nemo_aligner.data.nlp.steerlm import SYSTEM_PROMPT

LOWEST, HIGHEST = 0, 4  # values are whole numbers


def encode_label(values: Mapping[str, Any]) -> str:
    return ",".join(f"{name}:{value}" for name, value in values.items())


def rounded_label(values: Sequence[float], attributes: Sequence[str]) -> str:
    """The label of what a reward model predicts: whole numbers from `LOWEST` to `HIGHEST`."""
    numbers = [round(min(max(float(value), LOWEST), HIGHEST)) for value in values]
    return encode_label(dict(zip(attributes, numbers, strict=True)))


def read_attributes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--attributes {text}: give different names with commas between them.")
    return names


def with_labels(record: Record, labels: Mapping[int, str]) -> Record:
    """A conversation with labels for the turns of these numbers, of type VALUE_TO_TEXT."""
    turns = [
        {**turn, "label": labels.get(number, turn.get("label"))}
        for number, turn in enumerate(record["conversations"])
    ]
    return {**record, "conversations": turns, "type": VALUE_TO_TEXT}


def labelled_conversation(turns: Sequence[Mapping[str, Any]]) -> Record:
    """A record of conversations for attribute-conditioned fine-tuning."""
    how = {"system": SYSTEM_PROMPT, "mask": USER, "type": VALUE_TO_TEXT}
    return {"conversations": list(turns), **how}


def help_steer_record(row: Mapping[str, Any], attributes: Sequence[str]) -> Record:
    """The conversation of a row of HelpSteer or HelpSteer2 with the `attributes` that it has."""
    values = {name: row[name] for name in attributes if row.get(name) is not None}
    absent = [name for name in ("prompt", "response") if not isinstance(row.get(name), str)]
    if absent or not values:
        what = " and ".join(absent) or f"all of {', '.join(attributes)}"
        raise UserError(f"{what} missing; the row has {sorted(row)}.")
    prompt = {"from": USER, "value": row["prompt"], "label": None}
    response = {"from": RESPONDER, "value": row["response"], "label": encode_label(values)}
    return labelled_conversation([prompt, response])
