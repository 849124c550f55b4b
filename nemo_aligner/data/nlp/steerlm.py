# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of SteerLM: conversations whose responses have a label with the values of attributes,
"quality:4,toxicity:0,...", in NeMo's chat format (`nemo_chat.py`).

Dong et al. 2023, arXiv:2310.05344. A regression reward model learns the attributes from labelled
texts (`regression_records`), gives them to other conversations (`scored_turns`, `with_labels`),
and the policy learns responses behind their labels (type VALUE_TO_TEXT).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.labelled_texts import DEFAULT_MASK_VALUE
from nemo_aligner.data.nlp.nemo_chat import (
    NEMO_TOKENS,
    RESPONDER,
    USER,
    VALUE_TO_TEXT,
    Source,
    Turn,
    header_text,
    source_of_record,
    turn_text,
)

# As NeMo-Aligner orders the numbers of a label. Values are whole numbers from 0 to 4.
OPEN_ASSISTANT_ATTRIBUTES = ("quality", "toxicity", "humor", "creativity")
HELPSTEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
ALL_STEERLM_ATTRIBUTES = OPEN_ASSISTANT_ATTRIBUTES + HELPSTEER_ATTRIBUTES
LOWEST, HIGHEST = 0, 4
# What published SteerLM models were trained with; a part of the format.
SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


# --- labels -------------------------------------------------------------------------------------


def encode_label(values: Mapping[str, Any]) -> str:
    """The text of a label: "name:value" with commas between them, in the order of `values`."""
    return ",".join(f"{name}:{value}" for name, value in values.items())


def parse_label(text: str, attributes: Sequence[str]) -> dict[str, float]:
    """The values of a label by attribute."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not colon or number != number:
            raise UserError(
                f"the label {text!r} is not one of attributes: write name:number, with commas "
                f"between them, such as {encode_label(dict.fromkeys(attributes[:2], HIGHEST))}."
            )
        if name not in attributes:
            raise UserError(
                f"the label {text!r} has the attribute {name!r}, which is none of "
                f"{', '.join(attributes)}; correct it, or name your own with --attributes."
            )
        values[name] = number
    return values


def rounded_label(values: Sequence[float], attributes: Sequence[str]) -> str:
    """The label of what a reward model predicts: whole numbers from `LOWEST` to `HIGHEST`."""
    numbers = [round(min(max(float(value), LOWEST), HIGHEST)) for value in values]
    return encode_label(dict(zip(attributes, numbers, strict=True)))


def read_attributes(text: str) -> tuple[str, ...]:
    """The attributes of a list with commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--attributes {text}: give different names with commas between them.")
    return names


# --- texts for a reward model -------------------------------------------------------------------


def scored_turns(record: Record) -> list[tuple[int, str]]:
    """What a regression reward model reads for each response of a conversation: the number of its
    turn, and the text up to its end with the token that a label follows.

    A response is a turn of a speaker whom the field `mask` does not name, but for the first turn.
    The texts name speakers User and Assistant, and hold no labels.
    """
    source = source_of_record(record)
    # Null and absent mean the prompt of the published models, "" means none.
    system = record.get("system")
    system = SYSTEM_PROMPT if system is None else source.system
    text = header_text(Source(system, source.turns), NEMO_TOKENS)
    found = []
    for number, turn in enumerate(source.turns):
        responds = turn.speaker not in source.masked
        text += turn_text(Turn(RESPONDER if responds else USER, turn.value), None, NEMO_TOKENS)
        if responds and number:
            found.append((number, text + NEMO_TOKENS.label_start))
    if not found:
        raise UserError(
            "the conversation has no response: all speakers behind the first turn are masked "
            f"({', '.join(source.masked)})."
        )
    return found


def with_labels(record: Record, labels: Mapping[int, str]) -> Record:
    """A conversation with labels for the turns of these numbers, of type VALUE_TO_TEXT."""
    turns = [
        {**turn, "label": labels.get(number, turn.get("label"))}
        for number, turn in enumerate(record["conversations"])
    ]
    return {**record, "conversations": turns, "type": VALUE_TO_TEXT}


def regression_records(
    record: Record, attributes: Sequence[str] = ALL_STEERLM_ATTRIBUTES
) -> list[Record]:
    """A record `{"text": ..., "label": [number, ...]}` for each response that has a label; an
    attribute without a value gets `model.regression.loss_mask_val`.
    """
    found = []
    for number, text in scored_turns(record):
        label = record["conversations"][number].get("label")
        if label:
            values = parse_label(label, attributes)
            numbers = [values.get(name, DEFAULT_MASK_VALUE) for name in attributes]
            found.append({"text": text, "label": numbers})
    return found


# --- data sets ----------------------------------------------------------------------------------


def labelled_conversation(turns: Sequence[Mapping[str, Any]]) -> Record:
    """A record of conversations for attribute-conditioned fine-tuning."""
    return {
        "conversations": list(turns),
        "system": SYSTEM_PROMPT,
        "mask": USER,
        "type": VALUE_TO_TEXT,
    }


def open_assistant_records(tree: Mapping[str, Any]) -> list[Record]:
    """The conversations of a message tree of OpenAssistant, one for each path from its prompt to
    a message without replies; a prompt without a reply is none.
    """
    try:
        return [labelled_conversation(path) for path in _paths(tree["prompt"]) if len(path) > 1]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this is no message tree of OpenAssistant ({type(error).__name__}: {error})."
        ) from None


def _paths(message: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    if message["role"] not in ("prompter", "assistant"):
        raise ValueError(f"role {message['role']!r}")
    responds = message["role"] == "assistant"
    turn: dict[str, Any] = {"from": RESPONDER if responds else USER, "value": message["text"]}
    labels = message.get("labels")
    if not responds:
        turn["label"] = None
    elif labels is not None:
        turn["label"] = encode_label(
            {
                name: round(labels[name]["value"] * HIGHEST)  # they are from 0 to 1
                for name in OPEN_ASSISTANT_ATTRIBUTES
                if name in labels
            }
        )
    if not message["replies"]:
        yield [turn]
    for reply in message["replies"]:
        for path in _paths(reply):
            yield [turn, *path]


def help_steer_record(row: Mapping[str, Any], attributes: Sequence[str]) -> Record:
    """The conversation of a row of HelpSteer or HelpSteer2 with the `attributes` that it has."""
    values = {name: row[name] for name in attributes if row.get(name) is not None}
    missing = [name for name in ("prompt", "response") if not isinstance(row.get(name), str)]
    if missing or not values:
        what = " and ".join(missing) or f"all of {', '.join(attributes)}"
        raise UserError(f"{what} missing; the row has {sorted(row)}.")
    return labelled_conversation(
        [
            {"from": USER, "value": row["prompt"], "label": None},
            {"from": RESPONDER, "value": row["response"], "label": encode_label(values)},
        ]
    )
