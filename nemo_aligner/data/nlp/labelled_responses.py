# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses with a label, desirable or not, for a policy that learns from them directly (KTO)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from typing_extensions import Self

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import Encoded
from nemo_aligner.data.nlp.columns import missing
from nemo_aligner.data.nlp.constructors import accepts_nemo_aligner_call
from nemo_aligner.data.nlp.file_dataset import pad, slot
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.responses import ResponseDataset

# Value of the field `preference` -> desirable
PREFERENCES = {"chosen": True, "rejected": False}
# How far apart the prompt and the response of a mismatched sample are, as a share of the data
# set: the golden section, so that no number of equal blocks of a file puts them in the same place.
PARTNER = 0.381966


@accepts_nemo_aligner_call(lambda given: {"seq_length": given["seq_length"]})
class KTOModelDataset(ResponseDataset):
    """Lines `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}`; true and
    false are accepted as preferences too.

    The texts may be conversations, as for `DPOModelDataset`, or follow each other as they stand.

    Each item also holds a mismatched sample, its prompt with the response of another document,
    from which the distance of policy and reference is estimated. Which one is fixed, so the batch
    that an item is in and the split over ranks do not matter. It is cut to `seq_length`.

    Items: `samples`, `kl_samples` int64 [S], padded with eos; `sample_length`, `kl_sample_length`
    (scalars); `sample_mask`, `kl_sample_mask` float32 [S], 1 on the tokens of the responses (all 0
    in an empty slot); `preference` float32 (a scalar), 1 or 0; `loss_mask` float32 [S], all 0 for
    an empty slot; `position_ids` [S]; `idx`.

    Raises:
        UserError: a line without prompt, response or preference, another preference, or fewer than
            two documents.
    """

    _what = "labelled responses"
    read_fields = (*ResponseDataset.read_fields, "preference")

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        super().__init__(paths, tokenizer, seq_length, data_cfg, name)
        self.encode = self.encoder.encode_text
        self._check_size()
        desirable = int(self.lines.numbers[self.documents].sum())
        if desirable in (0, len(self.documents)):
            logging.warning(
                f"{name} data: all {len(self.documents)} samples are "
                f"{'chosen' if desirable else 'rejected'}. KTO then moves the policy in one "
                "direction only, from or to all of them; add samples of the other kind."
            )

    def select(self, documents: np.ndarray) -> Self:
        """See `FileDataset.select`.

        Raises:
            UserError: it is less than two documents.
        """
        other = super().select(documents)
        other._check_size()
        return other

    def _check_size(self) -> None:
        different = len(np.unique(self.documents))
        if different < 2:
            raise UserError(
                f"{self.name} data: KTO needs at least two samples, each with another's response "
                f"to compare with, but a part has {different} of {len(self.lines)}."
            )

    def _number(self, record: Record) -> float:
        """1 if the response is desirable."""
        return float(_preference(record))

    def _sample(self, index: int) -> Encoded:
        return self.encoder.with_response(self.lines[int(self.documents[index])])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = max(index, 0)
        size = len(self.documents)
        sample = self._sample(place)
        step = max(1, round(PARTNER * size))
        others = ((place + step + n) % size for n in range(size))
        # A part with more samples than documents has some of them several times.
        other = self._sample(next(n for n in others if self.documents[n] != self.documents[place]))
        item = {
            "preference": torch.tensor(float(self.lines.numbers[int(self.documents[place])])),
            **slot(index, len(sample.tokens), self.seq_length),
        }
        prompt, first = _start(sample), _start(other)
        mismatched = Encoded(
            (sample.tokens[:prompt] + other.tokens[first:])[: self.seq_length],
            ([False] * prompt + other.is_response[first:])[: self.seq_length],
        )
        for key, (tokens, is_response) in {"sample": sample, "kl_sample": mismatched}.items():
            counts = [int(x and index >= 0) for x in is_response]
            item[f"{key}s"] = pad(tokens, self.seq_length, self.pad_id)
            item[f"{key}_length"] = torch.tensor(len(tokens))
            item[f"{key}_mask"] = pad(counts, self.seq_length, 0).float()
        return item


def _start(sample: Encoded) -> int:
    """Where the response begins."""
    return sample.is_response.index(True)


def _preference(record: Record) -> bool:
    """Whether the response of a record is desirable."""
    value = record.get("preference")
    if isinstance(value, str) and value in PREFERENCES:
        return PREFERENCES[value]
    if isinstance(value, bool):
        return value
    if value is None:
        more = 'The preference says whether the response is "chosen" or "rejected".'
        raise missing(("response", "preference"), record, more)
    raise UserError(
        f"field 'preference' is {json.dumps(value, default=str)}; it must be \"chosen\" or "
        '"rejected", or true or false.'
    )
