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
from nemo_aligner.data.nlp.chat_records import A_SAMPLE, PAIR, by_our_names, holds_pair
from nemo_aligner.data.nlp.constructors import accepts_nemo_aligner_call
from nemo_aligner.data.nlp.file_dataset import FileDataset, documents_within, pad, slot
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.labelled_texts import DEFAULT_MASK_VALUE, label_numbers
from nemo_aligner.data.nlp.record_encoder import SURE, Pair, RecordEncoder
from nemo_aligner.data.nlp.records import open_records

# Values of `Records.extra`: what a pair has in common (`RecordEncoder.in_common`), or that it has
# two prompts; more by `IN_LINE` where it stands in one line.
DIFFERENT, IN_LINE = 1 << 31, 1 << 32


@accepts_nemo_aligner_call(lambda given: {"seq_length": given["seq_length"]})
class RewardModelDataset(FileDataset):
    """Pairs for a binary reward model: two neighbouring lines `{"text": ...}`, the better first,
    or lines `{"prompt": ..., "chosen": ..., "rejected": ...}`.

    The lines may hold conversations (`chat_records.py`), in the form that `data_cfg` asks for.

    Items: `chosen`, `rejected` int64 [S], padded with eos; `chosen_length`, `rejected_length`
    (scalars); `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. There
    is no attention mask: attention is causal and the padding is on the right, so no token of the
    text sees it.
    """

    lines_per_document = 2  # 1 if a line holds a pair
    prompt_field = "prompt"
    read_fields: Sequence[str] = (*A_SAMPLE, *PAIR, *(f"{field}_response" for field in PAIR))
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
        self._before: Record | None = None
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
        self._check_prompts_of_pairs()
        lengths = self.lines.notes.reshape(-1, self.lines_per_document).max(axis=1)
        self.documents = documents_within(lengths, seq_length, name, "pairs", "have a text longer")

    def as_pair(self, record: Record) -> Record:
        """A record with the fields `chosen` and `rejected`, if a pair stands in it."""
        return by_our_names(record)

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        """Length of a line, its number, and what its pair has in common (`_in_common`)."""
        record = self.as_pair(record)
        in_line = holds_pair(record)
        if self._pair_in_line not in (None, in_line):
            raise UserError(
                f"this line holds {'a pair' if in_line else 'one text'}, the lines before it "
                f"{'one text' if in_line else 'a pair'} each: either every line holds 'chosen' "
                "and 'rejected', or two neighbouring lines are a pair."
            )
        self._pair_in_line = in_line
        number = self._number(record, in_line)
        if in_line:
            length = self.encoder.pair_length(record, self.seq_length)
            return length, number, IN_LINE + self.encoder.pair_in_common(record)
        length = self.encoder.sample_length(record, self.seq_length)
        before, self._before = self._before, record
        # Of every line with the one before it, as it is not known yet where pairs begin.
        return length, number, self._in_common(before or record, record)

    def _number(self, record: Record, in_line: bool) -> float:
        """What is kept of a line beside its length."""
        if "label" in record and not in_line:  # neighbours among labelled texts are no pairs
            raise UserError(
                "field 'label': this is data for regression, but pairs of neighbouring lines are "
                "needed. Set model.reward_model_type=regression; if the lines are pairs, remove "
                "the field."
            )
        return 0.0

    def _in_common(self, first: Record, second: Record) -> int:
        try:
            return self.encoder.in_common(first, second)
        except UserError:
            return DIFFERENT

    def _holds_pairs(self) -> bool:
        """Whether each line holds a pair; what an earlier start found counts too."""
        in_line = self.lines.extra >= IN_LINE
        if in_line.any() != in_line.all():
            raise UserError(
                f"{self.name} data: some files hold pairs in their lines ('chosen', 'rejected'), "
                "others one text per line; give files of one kind."
            )
        return bool(in_line[0])

    def _check_prompts_of_pairs(self) -> None:
        """Refuse pairs with different prompts, and count those that begin differently."""
        lines, starts = self.lines, self.lines.starts
        found = lines.extra % IN_LINE
        known = np.delete(found, starts)
        common = 0 if self.pair_in_line or len(known) < 2 else int(known.min())  # to all texts
        if not self.pair_in_line:
            found = found[1::2].copy()
            for start in starts[starts % 2 == 1]:
                found[start // 2] = self._in_common(lines[start - 1], lines[start])
        different = np.flatnonzero(found == DIFFERENT)
        self.unlike = np.flatnonzero((found <= common) & (found < SURE))
        bad = different if len(different) else self.unlike
        self.lacks_prompts = len(bad) > 0
        unread = self.say_unread(is_refused=self.lacks_prompts)
        if not len(bad):
            return
        first = int(bad[0]) * self.lines_per_document
        text = f"{self.name} data: {len(bad)} of {len(found)} pairs "
        where = f", the first in {lines.where(first)}"
        remedy = (
            f"{unread}Two neighbouring lines are a pair, responses to one prompt, unless each has "
            "'chosen' and 'rejected'. Conversations for supervised fine-tuning are no pairs; "
            "texts without prompts are if both stand in one line, in 'chosen' and 'rejected', and "
            "those of one prompt if model.data.prompt_end says where it ends."
        )
        if self.pair_in_line:
            remedy = f"{unread}If there is a prompt, give it in the field 'prompt'."
        if len(different):
            try:
                self.encoder.in_common(lines[first], lines[first + 1])
            except UserError as error:
                where += f" and {lines.where(first + 1)}: {error}"
                raise UserError(f"{text}have two prompts{where} {remedy}") from None
        begin = "no beginning, so no prompt"
        if common:
            head = lines[first]["text"][: min(common, 40)]
            begin = f"nothing but {head!r}, with which all begin"
        text += f"share {begin}{where}. {remedy}"
        can_be_given = not self.pair_in_line and isinstance(lines[first]["text"], str)
        # A beginning of all texts may be one prompt of all pairs.
        if can_be_given and not common and 2 * len(bad) > len(found):
            raise UserError(text)
        logging.warning(text)

    def pair_tokens(self, pair: int) -> Pair:
        """The tokens of both samples of a pair, the better one first."""
        if self.pair_in_line:
            return self.encoder.pair(self.as_pair(self.lines[pair]))
        first, second = 2 * pair, 2 * pair + 1
        return self.encoder.sample(self.lines[first]), self.encoder.sample(self.lines[second])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._item(index, *self.pair_tokens(int(self.documents[max(index, 0)])))

    def _item(self, index: int, chosen: list[int], rejected: list[int]) -> dict[str, torch.Tensor]:
        return {
            "chosen": pad(chosen, self.seq_length, self.pad_id),
            "rejected": pad(rejected, self.seq_length, self.pad_id),
            "chosen_length": torch.tensor(len(chosen)),
            "rejected_length": torch.tensor(len(rejected)),
            **slot(index, max(len(chosen), len(rejected)), self.seq_length),
        }


class LabelledPairDataset(RewardModelDataset):
    """Pairs with a preference: two neighbouring lines `{"text": ..., "label": [number, ...]}`, or
    lines `{"prompt": ..., "responses": [..., ...], "label": ...}`.

    The first number of the label, the same in two lines, says which of the two is better, and its
    absolute value by how much: below 0 the first, else the second (NeMo-Aligner's form of
    HelpSteer2-Preference, arXiv:2410.01257, whose preferences go from -3 to 3).

    Args:
        mask_value: `model.regression.loss_mask_val`: the number that means "no label".

    Items: those of the base class, and `margin` float32 (a scalar, at least 0).
    """

    read_fields = (*RewardModelDataset.read_fields, "label", "responses")

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
        labels = self.lines.numbers.astype(np.float32).reshape(-1, self.lines_per_document)
        self.preferences = labels[:, 0]
        self._check_labels(labels)

    def as_pair(self, record: Record) -> Record:
        """See the base class."""
        if holds_pair(by_our_names(record)):
            raise UserError(
                "a line with 'chosen' and 'rejected' says which is better, so a label has no "
                "place: set model.reward_model_type=binary_ranking, or call the field of both "
                "'responses' (model.data.columns)."
            )
        both = record.get("responses")
        if both is None:
            return record
        if not isinstance(both, list) or len(both) != 2:
            raise UserError("field 'responses' must be a list of two responses to the prompt.")
        return {**record, "chosen": both[0], "rejected": both[1]}

    def _number(self, record: Record, in_line: bool) -> float:
        number = label_numbers(record)[0]
        if number == self.mask_value:
            raise UserError(
                f"field 'label' begins with {number:g} (model.regression.loss_mask_val), which "
                "means no label. A Bradley-Terry loss needs the preference of the pair there, "
                "below 0 if the first of the two texts is better, above 0 if the second is. "
                "Remove the pair, or use model.regression.loss_func=regression."
            )
        return number

    def _check_labels(self, labels: np.ndarray) -> None:
        disagree = np.flatnonzero(labels[:, 0] != labels[:, -1])
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

    def pair_tokens(self, pair: int) -> Pair:
        """The tokens of both samples of a pair, the better one first."""
        first, second = super().pair_tokens(pair)
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

    The texts may be conversations, as for the base class, or follow each other as they stand.

    Args:
        data_cfg: also `default_chosen_reward` and `default_rejected_reward`, of pairs without.

    Items: those of the base class, `chosen_mask` and `rejected_mask` float32 [S], 1 on the tokens
    of the responses (all 0 in an empty slot), and the rewards, float32.
    """

    _what = "pairs with prompts"
    read_fields = (*RewardModelDataset.read_fields, *DEFAULT_REWARDS)

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

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        record = by_our_names(record)
        length = self.encoder.pair_length(record, self.seq_length)
        is_empty = self.encoder.prompt_is_empty(record, "chosen", "rejected")
        for key in DEFAULT_REWARDS:
            reward = record.get(key, 0.0)
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
            if not is_number or not np.isfinite(reward):
                raise UserError(f"field '{key}' is {reward!r}, not a number.")
        return length, 0.0, is_empty

    def _holds_pairs(self) -> bool:
        return True

    def _check_prompts_of_pairs(self) -> None:
        self.check_prompts(self.encoder.allow_empty_prompt, self.encoder.begins)

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
