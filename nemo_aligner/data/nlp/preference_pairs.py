# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: in order or with the preference as a label, for reward models, and with the
place of the response, for a policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_records import holds_pair
from nemo_aligner.data.nlp.constructors import accepts_nemo_aligner_call
from nemo_aligner.data.nlp.file_dataset import FileDataset, documents_within, pad
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.labelled_texts import DEFAULT_MASK_VALUE, label_numbers
from nemo_aligner.data.nlp.record_encoder import Pair, RecordEncoder
from nemo_aligner.data.nlp.records import check_text, open_records


@accepts_nemo_aligner_call(lambda given: {"seq_length": given["seq_length"]})
class RewardModelDataset(FileDataset):
    """Pairs for a binary reward model: two neighbouring lines `{"text": ...}`, the better first,
    or lines `{"prompt": ..., "chosen": ..., "rejected": ...}`.

    The lines may hold conversations (`chat_records.py`), in the form that `data_cfg` asks for.
    A pair with a text longer than `seq_length` is left out; a warning at start counts them.

    Args:
        paths: the files.
        tokenizer: NeMo tokenizer.
        seq_length: S.
        data_cfg: `model.data`, as for `RLHFDataset`.
        name: "train", ...; for messages.

    Items: `chosen`, `rejected` int64 [S], padded with eos; `chosen_length`, `rejected_length`
    (scalars); `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. There
    is no attention mask: attention is causal and the padding is on the right, so no token of the
    text sees it.
    """

    lines_per_document = 2  # 1 if a line holds a pair
    _what = "pairs"

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.encoder = RecordEncoder(tokenizer, data_cfg)
        self.encode = self.encoder.encode_text
        self._pair_in_line: bool | None = None  # unknown before the first line
        self.name = name
        self.seq_length = seq_length
        self.pad_id = tokenizer.eos_id
        settings = self.encoder.settings(self._what, seq_length)
        self.lines = open_records(paths, data_cfg, self._inspect, settings)
        self.pair_in_line = self._holds_pairs()
        self.lines_per_document = 1 if self.pair_in_line else 2
        for path, count in zip(self.lines.paths, self.lines.counts, strict=True):
            if count % self.lines_per_document:
                raise UserError(
                    f"{path} has {count} lines, an odd number: a reward model's data are pairs of "
                    "neighbouring lines, the better one first. A line is missing or one too many."
                )
        lengths = self.lines.notes.reshape(-1, self.lines_per_document).max(axis=1)
        self.documents = documents_within(lengths, seq_length, name, "pairs", "have a text longer")

    def _inspect(self, record: Record) -> tuple[int, float]:
        """Length of a line, and 1.0 if it holds a pair."""
        in_line = holds_pair(record)
        if self._pair_in_line not in (None, in_line):
            raise UserError(
                f"this line holds {'a pair' if in_line else 'one text'}, the lines before it "
                f"{'one text' if in_line else 'a pair'} each: either every line holds 'chosen' "
                "and 'rejected', or two neighbouring lines are a pair."
            )
        self._pair_in_line = in_line
        if in_line:
            return self.encoder.pair_length(record, self.seq_length), 1.0
        if "label" in record:  # neighbours in a file of labelled texts are no pairs
            raise UserError(
                "field 'label': this is data for regression, but pairs of neighbouring lines are "
                "needed. Set model.reward_model_type=regression; if the lines are pairs, remove "
                "the field."
            )
        return self.encoder.sample_length(record, self.seq_length), 0.0

    def _holds_pairs(self) -> bool:
        """Whether each line holds a pair; what an earlier start found counts too."""
        if len(np.unique(self.lines.numbers)) > 1:
            raise UserError(
                f"{self.name} data: some files hold pairs in their lines ('chosen', 'rejected'), "
                "others one text per line; give files of one kind."
            )
        return bool(self.lines.numbers[0])

    def pair_tokens(self, pair: int) -> Pair:
        """The tokens of both samples of a pair, the better one first."""
        if self.pair_in_line:
            return self.encoder.pair(self.lines[pair])
        first, second = self._chosen_first(pair)
        return self.encoder.sample(self.lines[first]), self.encoder.sample(self.lines[second])

    def _chosen_first(self, pair: int) -> tuple[int, int]:
        """Numbers of the lines of a pair, the better one first."""
        return 2 * pair, 2 * pair + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._item(index, *self.pair_tokens(int(self.documents[max(index, 0)])))

    def _item(self, index: int, chosen: list[int], rejected: list[int]) -> dict[str, torch.Tensor]:
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


class LabelledPairDataset(RewardModelDataset):
    """Pairs with a preference: two neighbouring lines `{"text": ..., "label": [number, ...]}`.

    The first number of the label, the same in both lines, says which of the two is better, and its
    absolute value by how much: below 0 the first, else the second (NeMo-Aligner's form of
    HelpSteer2-Preference, arXiv:2410.01257, whose preferences go from -3 to 3). A pair with a text
    longer than `seq_length` is left out; a warning at start counts them.

    Args:
        paths, tokenizer, seq_length, data_cfg, name: as for the base class.
        mask_value: `model.regression.loss_mask_val`: the number that means "no label".

    Items: those of the base class, and `margin` float32 (a scalar, at least 0).

    Raises:
        UserError: a pair without a preference, or whose two lines disagree.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        mask_value: float = DEFAULT_MASK_VALUE,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.mask_value = mask_value
        self._what = f"labelled pairs {mask_value}"
        super().__init__(paths, tokenizer, seq_length, data_cfg, name)
        labels = self.lines.numbers.astype(np.float32).reshape(-1, 2)
        self.preferences = labels[:, 0]
        self._check_labels(labels)

    def _inspect(self, record: Record) -> tuple[int, float]:
        if holds_pair(record):
            raise UserError(
                "a line with 'chosen' and 'rejected' says which is better, so a label has no "
                "place: set model.reward_model_type=binary_ranking."
            )
        number = label_numbers(record)[0]
        if number == self.mask_value:
            raise UserError(
                f"field 'label' begins with {number:g} (model.regression.loss_mask_val), which "
                "means no label. A Bradley-Terry loss needs the preference of the pair there, "
                "below 0 if the first of the two texts is better, above 0 if the second is. "
                "Remove the pair, or use model.regression.loss_func=regression."
            )
        return self.encoder.sample_length(record, self.seq_length), number

    def _holds_pairs(self) -> bool:
        return False

    def _check_labels(self, labels: np.ndarray) -> None:
        disagree = np.flatnonzero(labels[:, 0] != labels[:, 1])
        if len(disagree):
            first = int(disagree[0])
            raise UserError(
                f"{self.name} data: the two lines of pair {first} have the labels "
                f"{labels[first, 0]:g} and {labels[first, 1]:g}. Both must hold the preference of "
                "the pair as their first number; if these are labels of single texts, use "
                "model.regression.loss_func=regression."
            )
        undecided = int((labels[:, 0] == 0).sum())
        if undecided:
            logging.warning(
                f"{self.name} data: {undecided} of {len(labels)} pairs have the label 0, no "
                "preference; as in NeMo-Aligner the second text counts as the better one, with "
                "margin 0."
            )

    def _chosen_first(self, pair: int) -> tuple[int, int]:
        first, second = super()._chosen_first(pair)
        return (first, second) if self.preferences[pair] < 0 else (second, first)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = int(self.documents[max(index, 0)])
        margin = torch.tensor(abs(float(self.preferences[pair])))
        return {**super().__getitem__(index), "margin": margin}


DEFAULT_REWARDS = {"chosen_reward": 1.0, "rejected_reward": 0.0}


@accepts_nemo_aligner_call(lambda given: {"seq_length": given["seq_length"]})
class DPOModelDataset(RewardModelDataset):
    """Pairs that a policy learns from directly: lines with `prompt`, `chosen` and `rejected` (or
    NeMo-Aligner's `chosen_response` and `rejected_response`), and optionally `chosen_reward` and
    `rejected_reward`.

    The texts may be conversations, as for the base class, or follow each other as they stand. A
    pair with a text longer than `seq_length` is left out; a warning at start counts them.

    Args:
        data_cfg: also `default_chosen_reward` and `default_rejected_reward`, of pairs without.

    Items: those of the base class, `chosen_mask` and `rejected_mask` float32 [S], 1 on the tokens
    of the responses (all 0 in an empty slot), and the rewards, float32.

    Raises:
        UserError: a line without a pair, or a pair without a prompt or a difference.
    """

    _what = "pairs with prompts"

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        given = {key: (data_cfg or {}).get(f"default_{key}") for key in DEFAULT_REWARDS}
        self.rewards = {
            key: value if given[key] is None else given[key]
            for key, value in DEFAULT_REWARDS.items()
        }
        super().__init__(paths, tokenizer, seq_length, data_cfg, name)

    def _inspect(self, record: Record) -> tuple[int, float]:
        record = by_our_names(record)
        if not holds_pair(record):
            raise UserError(
                "the line holds no pair: DPO learns from lines with 'prompt', 'chosen' and "
                f"'rejected', but it has {sorted(record)}. (model.data.columns can give other "
                "names.)"
            )
        length = self.encoder.pair_length(record, self.seq_length)
        if self.encoder.form_of(record) is None:
            check_text(record, "prompt")
        for key in DEFAULT_REWARDS:
            reward = record.get(key, 0.0)
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
            if not is_number or not np.isfinite(reward):
                raise UserError(f"field '{key}' is {reward!r}, not a number.")
        return length, 1.0

    def _holds_pairs(self) -> bool:
        return True

    def pair_tokens(self, pair: int) -> Pair:
        """The tokens of both samples of a pair, the better one first."""
        return self.encoder.pair(by_our_names(self.lines[pair]))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        record = by_our_names(self.lines[int(self.documents[max(index, 0)])])
        chosen, rejected = self.encoder.pair_with_responses(record)
        item = self._item(index, chosen.tokens, rejected.tokens)
        for name, sample in (("chosen", chosen), ("rejected", rejected)):
            counts = [int(x and index >= 0) for x in sample.is_response]
            item[f"{name}_mask"] = pad(counts, self.seq_length, 0).float()
            reward: Any = record.get(f"{name}_reward", self.rewards[f"{name}_reward"])
            item[f"{name}_reward"] = torch.tensor(float(reward))
        return item


def by_our_names(record: Record) -> Record:
    """A record with the fields `chosen` and `rejected`; NeMo-Aligner's hold one message each."""
    record = dict(record)
    for field in ("chosen", "rejected"):
        value = record.pop(f"{field}_response", None)
        if value is not None:
            record[field] = [value] if isinstance(value, dict) else value
    return record
