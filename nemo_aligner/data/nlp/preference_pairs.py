# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference pairs for a reward model of pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.constructors import accepts_nemo_aligner_call
from nemo_aligner.data.nlp.file_dataset import FileDataset, TextEncoder, documents_within, pad
from nemo_aligner.data.nlp.json_lines import JsonLines, Record


@accepts_nemo_aligner_call(lambda given: {"seq_length": given["seq_length"]})
class RewardModelDataset(FileDataset):
    """Pairs for a binary reward model: two neighbouring lines `{"text": ...}`, the better first.

    A pair with a text longer than `seq_length` is left out; a warning at start counts them.

    Args:
        paths: jsonl files.
        tokenizer: NeMo tokenizer.
        seq_length: S.
        data_cfg: `model.data`.
        name: "train", ...; for messages.

    Items: `chosen`, `rejected` int64 [S], padded with eos; `chosen_length`, `rejected_length`
    (scalars); `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. There
    is no attention mask: attention is causal and the padding is on the right, so no token of the
    text sees it.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.encode = TextEncoder(tokenizer, data_cfg)
        self.name = name
        self.seq_length = seq_length
        self.pad_id = tokenizer.eos_id
        self.lines = JsonLines(paths, ["text"], self._inspect)
        for path, count in zip(self.lines.paths, self.lines.counts, strict=True):
            if count % 2:
                raise UserError(
                    f"{path} has {count} lines, an odd number: a reward model's data are pairs of "
                    "neighbouring lines, the better one first. A line is missing or superfluous."
                )
        lengths = self.lines.notes.reshape(-1, 2).max(axis=1)
        self.documents = documents_within(lengths, seq_length, name, "pairs", "have a text longer")

    def _inspect(self, record: Record) -> int:
        if "label" in record:  # neighbours in a file of labelled texts are no pairs
            raise UserError(
                "field 'label': this is data for regression, but pairs of neighbouring lines are "
                "needed. Set model.reward_model_type=regression; if the lines are pairs, remove "
                "the field."
            )
        return self.encode.length(record["text"], self.seq_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = int(self.documents[max(index, 0)])
        chosen, rejected = (
            self.encode(self.lines[line]["text"]) for line in (2 * pair, 2 * pair + 1)
        )
        longest = max(len(chosen), len(rejected))
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[: longest if index >= 0 else 0] = 1.0
        return {
            "chosen": pad(chosen, self.seq_length, self.pad_id),
            "rejected": pad(rejected, self.seq_length, self.pad_id),
            "chosen_length": torch.tensor(len(chosen)),
            "rejected_length": torch.tensor(len(rejected)),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_length),
            "idx": torch.tensor(index),
        }
