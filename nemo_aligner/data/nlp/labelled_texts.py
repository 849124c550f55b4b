# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for a regression reward model."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import A_SAMPLE, response_messages
from nemo_aligner.data.nlp.columns import missing
from nemo_aligner.data.nlp.constructors import accepts_nemo_aligner_call
from nemo_aligner.data.nlp.file_dataset import FileDataset, documents_within, pad, slot
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.data.nlp.records import first_record, open_records

# Default of `model.regression.loss_mask_val`: the number that means "no label".
DEFAULT_MASK_VALUE = -100.0


def _attributes(given: dict[str, Any]) -> dict[str, Any]:
    """What NeMo-Aligner's arguments say about the labels."""
    regression = given["cfg"]["regression"]
    return {
        "seq_length": given["seq_length"],
        "num_attributes": regression["num_attributes"],
        "mask_value": regression.get("loss_mask_val", DEFAULT_MASK_VALUE),
    }


@accepts_nemo_aligner_call(_attributes)
class RegressionRewardModelDataset(FileDataset):
    """Labelled texts for a regression reward model: lines `{"text": ..., "label": [number, ...]}`,
    or with a conversation (`chat_records.py`) in the place of the text, in the form that
    `data_cfg` asks for.

    A record whose `text` is a list holds the steps of a response to `prompt`, with a label each: a
    sample of each step is made, which ends with it (`each_step`).

    With one attribute the label may be a bare number. A number equal to `mask_value` means that
    the attribute has no label.

    Args:
        num_attributes: A, numbers in each label.
        mask_value: `model.regression.loss_mask_val`.

    Items: `inputs` int64 [S], padded with eos; `lengths` (a scalar); `labels` float32 [A];
    `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. There is no
    attention mask, see `RewardModelDataset`.
    """

    read_fields = (*A_SAMPLE, "label")

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        num_attributes: int,
        mask_value: float = DEFAULT_MASK_VALUE,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.encoder = RecordEncoder(tokenizer, data_cfg)
        self.encode = self.encoder.encode_text
        self.name = name
        self.seq_length = seq_length
        self.num_attributes = num_attributes
        self.pad_id = tokenizer.eos_id

        def inspect(record: Record) -> tuple[int, float]:
            labels = sum(number != mask_value for number in _label(record, num_attributes))
            return self.encoder.sample_length(record, seq_length), labels

        settings = self.encoder.settings("labelled texts", seq_length, num_attributes, mask_value)
        steps = isinstance(first_record(paths[0], data_cfg).get("text"), list)
        form = self.encoder.form
        expand = partial(each_step, is_chat=form is not None and not form.default)
        self.lines = open_records(paths, data_cfg, inspect, settings, expand if steps else None)
        self.say_unread()
        if not self.lines.numbers.any():
            raise UserError(
                f"{name} data: every label is model.regression.loss_mask_val={mask_value}, which "
                f"means no label. Files: {', '.join(map(str, self.lines.paths))}"
            )
        self.documents = documents_within(
            self.lines.notes, seq_length, name, "texts", "are longer"
        )

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        record = self.lines[int(self.documents[max(index, 0)])]
        tokens = self.encoder.sample(record)
        return {
            "inputs": pad(tokens, self.seq_length, self.pad_id),
            "lengths": torch.tensor(len(tokens)),
            "labels": torch.tensor(_label(record, self.num_attributes), dtype=torch.float32),
            **slot(index, len(tokens), self.seq_length),
        }


def each_step(record: Record, is_chat: bool = False) -> list[Record]:
    """The samples of a record with a list of steps in `text`, and as many in `label`: `prompt`, a
    text or messages, and the steps up to each one, on lines of their own.

    Args:
        is_chat: `prompt` is a message of the user's, also where it is a text.
    """
    steps, labels, prompt = record.get("text"), record.get("label"), record.get("prompt")
    if not isinstance(steps, list):
        raise UserError("field 'text' must be a list of steps, as in the first record.")
    if not isinstance(labels, list) or len(labels) != len(steps) or not steps:
        raise UserError(f"field 'label' must be a list of {len(steps)} labels, one of each step.")
    if not all(isinstance(step, str) for step in steps):
        raise UserError("field 'text' must be a list of texts, the steps.")
    made, start = [], [prompt] if isinstance(prompt, str) and not is_chat else []
    for number, label in enumerate(labels, start=1):
        text = "\n".join([*start, *steps[:number]])
        sample: Record = {"text": text}
        if is_chat or isinstance(prompt, list):
            sample = {"messages": response_messages({**record, "response": text})[0]}
        made.append({**sample, "label": int(label) if isinstance(label, bool) else label})
    return made


def label_numbers(record: Record) -> list[float]:
    """The numbers of a record's label, at least one.

    Raises:
        UserError: there is no label, or not of finite numbers.
    """
    label = record.get("label")
    numbers: list[Any] = label if isinstance(label, list) else [label]
    if label is None:
        raise missing(["label"], record)
    if not numbers:
        raise UserError("field 'label' has 0 numbers.")
    for number in numbers:
        # The bound, that of float32, also keeps NaN and infinity out.
        if (
            isinstance(number, bool)
            or not isinstance(number, (int, float))
            or not abs(number) < 3e38
        ):
            raise UserError(
                f"field 'label' is {json.dumps(label)}: it must hold finite numbers. Write"
                " model.regression.loss_mask_val (-100) for an attribute that has none."
            )
    return [float(number) for number in numbers]


def _label(record: Record, num_attributes: int) -> list[float]:
    """The label of a record as `num_attributes` numbers."""
    numbers = label_numbers(record)
    if len(numbers) != num_attributes:
        raise UserError(
            f"field 'label' has {len(numbers)} number{'' if len(numbers) == 1 else 's'}, but"
            f" model.regression.num_attributes={num_attributes}."
        )
    return numbers
