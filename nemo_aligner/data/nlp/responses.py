# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with responses, for a student that also responds itself (on-policy distillation)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import BESIDE
from nemo_aligner.data.nlp.file_dataset import FileDataset, documents_within, pad
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.data.nlp.records import open_records


class ResponseDataset(FileDataset):
    """Lines `{"prompt": ..., "response": ...}`: texts that follow each other as they stand, or
    conversations, as for `DPOModelDataset`.

    Items: `tokens` and `labels` int64 [S], padded with eos; column t of the labels holds token
    t+1. `loss_mask` float32 [S], 1 where the label is a token of the response (all 0 in an empty
    slot); `lengths` and `prompt_lengths` (scalars); `idx`.

    Raises:
        UserError: a line without prompt or response; an item whose prompt the tokenizer joins with
            its response.
    """

    prompt_field = "prompt"
    read_fields: Sequence[str] = ("prompt", "response", *BESIDE)
    _what = "responses"  # an index of the files that was made for other records is not used

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.encoder = RecordEncoder(tokenizer, data_cfg)
        self.tokenizer, self.name = tokenizer, name
        self.seq_length = seq_length
        self.pad_id = tokenizer.eos_id
        settings = self.encoder.settings(self._what, seq_length)
        self.lines = open_records(paths, data_cfg, self._inspect, settings)
        self.documents = documents_within(
            self.lines.notes, seq_length, name, "samples", "are longer"
        )
        encoder = self.encoder
        self.check_prompts(
            encoder.allow_empty_prompt, encoder.begins, type(self) is ResponseDataset
        )

    def _number(self, record: Record) -> float:
        """What is kept of a sample beside its length."""
        return 0.0

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        """Length of a sample, its number, and whether the prompt is empty."""
        length = self.encoder.response_length(record, self.seq_length)
        return length, self._number(record), self.encoder.prompt_is_empty(record, "response")

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.encoder.with_response(self.lines[int(self.documents[max(index, 0)])])
        start = sample.is_response.index(True)
        if start == 0:
            raise UserError(
                f"{self.name} data: the tokenizer joins a prompt with its response "
                f"({self.tokenizer.ids_to_text(sample.tokens)[:80]!r}), so nothing is left that a "
                "student could respond to. Leave the sample out."
            )
        counts = [int(x and index >= 0) for x in sample.is_response[1:]]
        return {
            "tokens": pad(sample.tokens, self.seq_length, self.pad_id),
            "labels": pad(sample.tokens[1:], self.seq_length, self.pad_id),
            "loss_mask": pad(counts, self.seq_length, 0).float(),
            "lengths": torch.tensor(len(sample.tokens)),
            "prompt_lengths": torch.tensor(start),
            "idx": torch.tensor(index),
        }
