# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The datasets, at NeMo-Aligner's module path."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from typing_extensions import Self

from nemo_aligner.config.data_rules import check_labels_can_be_read, check_prompts_can_be_read
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.keys.model import DEFAULT_MASK_VALUE
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.builders import build_train_valid_test_datasets
from nemo_aligner.data.nlp.chat_records import Message, response_messages
from nemo_aligner.data.nlp.fields import (
    A_SAMPLE,
    BESIDE,
    PAIR,
    Encoded,
    Record,
    by_our_names,
    holds_pair,
    is_number,
    missing,
)
from nemo_aligner.data.nlp.file_dataset import (
    EncodedDataset,
    Part,
    accepts_nemo_aligner_call,
    labelled_part,
    pad,
    response_mask,
    sequence_part,
    slot,
)
from nemo_aligner.data.nlp.prompts import RLHFDataset as RLHFDataset
from nemo_aligner.data.nlp.record_encoder import SURE
from nemo_aligner.data.nlp.records import Records as Records
from nemo_aligner.data.nlp.records import first_record


@accepts_nemo_aligner_call
class RegressionRewardModelDataset(EncodedDataset):
    """Labelled texts for a regression reward model: lines `{"text": ..., "label": [number, ...]}`,
    or with a conversation in the place of the text. A list in `text` holds the steps of a response
    to `prompt`, with a label each (`each_step`).

    Args:
        num_attributes: A, numbers in each label; a single one may be bare.
        mask_value: `model.regression.loss_mask_val`, of an attribute without a label.

    Items: `inputs` int64 [S], padded with eos; `lengths` (a scalar); `labels` float32 [A];
    `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. There is no
    attention mask, see `RewardModelDataset`.
    """

    read_fields = (*A_SAMPLE, "label")
    check_form = staticmethod(check_labels_can_be_read)

    @classmethod
    def arguments(cls, cfg: Any, seq_length: int) -> dict[str, Any]:
        given = complete(cfg.get("regression"), "training_rm", "model.regression")
        return {
            "seq_length": seq_length,
            "num_attributes": given.num_attributes,
            "mask_value": given.loss_mask_val,
        }

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        num_attributes: int,
        mask_value: float = DEFAULT_MASK_VALUE,
        **options: Any,
    ) -> None:
        self.num_attributes, self.mask_value = num_attributes, mask_value
        self.what = ["labelled texts", num_attributes, mask_value]
        super().__init__(paths, tokenizer, seq_length, **options)

    def _prepare(self, paths: Sequence[Any]) -> None:
        if isinstance(first_record(paths[0], self.data_cfg).get("text"), list):
            form = self.encoder.form
            is_chat = form is not None and not form.default
            self.expand = partial(each_step, is_chat=is_chat)

    def _choose_documents(self) -> None:
        self.say_unread()
        if not self.lines.numbers.any():
            raise UserError(
                f"{self.name} data: every label is model.regression.loss_mask_val="
                f"{self.mask_value}, no label. Files: {', '.join(map(str, self.lines.paths))}"
            )
        self.keep_within("texts")

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        numbers = label_numbers(record, self.num_attributes)
        labels = sum(number != self.mask_value for number in numbers)
        return self.encoder.sample_length(record, self.seq_length), labels, 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        record = self.lines[int(self.documents[max(index, 0)])]
        tokens = self.encoder.sample(record)
        return {
            "inputs": pad(tokens, self.seq_length, self.pad_id),
            "lengths": torch.tensor(len(tokens)),
            "labels": torch.tensor(label_numbers(record, self.num_attributes)),
            **slot(index, len(tokens), self.seq_length),
        }

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        return (sequence_part("text", item["inputs"], item["lengths"], None, padding),)

    def note(self, item: dict[str, Any]) -> str:
        return f"label {item['labels'].tolist()}"


def each_step(record: Record, is_chat: bool = False) -> list[Record]:
    """The samples of a record with a list of steps in `text`, and as many in `label`: `prompt`, a
    text or messages (with `is_chat` a text is one too), and the steps up to each, on own lines.
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


def label_numbers(record: Record, num_attributes: int | None = None) -> list[float]:
    """The numbers of a record's label, `num_attributes` finite ones (None: at least one)."""
    label = record.get("label")
    numbers: list[Any] = label if isinstance(label, list) else [label]
    if label is None:
        raise missing(["label"], record)
    if not numbers:
        raise UserError("field 'label' has 0 numbers.")
    if not all(map(is_number, numbers)):
        raise UserError(
            f"field 'label' is {json.dumps(label)}: it must hold finite numbers. Write"
            " model.regression.loss_mask_val (-100) for an attribute that has none."
        )
    if num_attributes not in (None, len(numbers)):
        raise UserError(
            f"field 'label' has {len(numbers)} number{'s' * (len(numbers) != 1)}, but "
            f"model.regression.num_attributes={num_attributes}."
        )
    return [float(number) for number in numbers]


# Of `Records.extra`, what a pair has in common (`RecordEncoder.in_common`): it has two prompts.
DIFFERENT = 1 << 31


class RewardModelDataset(EncodedDataset):
    """Pairs for a binary reward model: two neighbouring lines `{"text": ...}`, the better first,
    or lines `{"prompt": ..., "chosen": ..., "rejected": ...}`; or conversations.

    Items: `chosen`, `rejected` int64 [S], padded with eos; `chosen_length`, `rejected_length`
    (scalars); `loss_mask` float32 [S], all 0 for an empty slot; `position_ids` [S]; `idx`. No
    attention mask: attention is causal and the padding is on the right.
    """

    prompt_field = "prompt"
    pair_fields: Sequence[str] = (*PAIR, *(f"{field}_response" for field in PAIR))
    read_fields: Sequence[str] = (*A_SAMPLE, *pair_fields)
    what: Any = "pairs"
    _before: Record | None = None

    def _prepare(self, paths: Sequence[Any]) -> None:
        """Each line holds a pair if the first one does."""
        first = first_record(paths[0], self.data_cfg)
        self.pair_in_line = any(field in first for field in self.pair_fields)
        self.lines_per_document = 1 if self.pair_in_line else 2
        self.what = [self.what, self.pair_in_line]

    def _choose_documents(self) -> None:
        for path, count in zip(self.lines.paths, self.lines.counts, strict=True):
            if count % self.lines_per_document:
                raise UserError(
                    f"{path} has {count} lines, an odd number, but two neighbouring lines are a "
                    "pair, the better one first: a line is missing or one too many."
                )
        self._check_prompts_of_pairs()
        lengths = self.lines.notes.reshape(-1, self.lines_per_document).max(axis=1)
        self.keep_within("pairs", "have a text longer", lengths)

    def as_pair(self, record: Record) -> Record:
        return by_our_names(record)

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        record = self.as_pair(record)
        in_line = holds_pair(record)
        if in_line != self.pair_in_line:
            raise UserError(
                f"this line holds {'a pair' if in_line else 'one text'}, the lines before it "
                f"{'one text' if in_line else 'a pair'} each: give lines of one kind."
            )
        number = self._number(record)
        if in_line:
            length = self.encoder.pair_length(record, self.seq_length)
            return length, number, self.encoder.pair_in_common(record)
        length = self.encoder.sample_length(record, self.seq_length)
        before, self._before = self._before, record
        # Of every line with the one before it, as it is not known yet where pairs begin.
        return length, number, self._in_common(before or record, record)

    def _number(self, record: Record) -> float:
        if "label" in record and not self.pair_in_line:
            raise UserError(
                "field 'label': this is data for regression, but pairs of lines are needed. Set "
                "model.reward_model_type=regression; if the lines are pairs, remove the field."
            )
        return 0.0

    def _in_common(self, first: Record, second: Record) -> int:
        try:
            return self.encoder.in_common(first, second)
        except UserError:
            return DIFFERENT

    def _check_prompts_of_pairs(self) -> None:
        lines, starts, found = self.lines, self.lines.starts, self.lines.extra
        common = 0  # to all texts
        if not self.pair_in_line:
            known = np.delete(found, starts)
            common = int(known.min()) if len(known) > 1 else 0
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
            f"{unread}Two neighbouring lines are a pair, responses to one prompt, unless both "
            "stand in one line, in 'chosen' and 'rejected', or model.data.prompt_end says where "
            "the prompt ends. Conversations for supervised fine-tuning are no pairs."
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

    def pair_tokens(self, pair: int) -> tuple[list[int], list[int]]:
        """The tokens of both samples of a pair, the better one first."""
        if self.pair_in_line:
            chosen, rejected = self.encoder.pair(self.as_pair(self.lines[pair]))
            return chosen.tokens, rejected.tokens
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

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        return tuple(
            sequence_part(n, item[n], item[f"{n}_length"], item.get(f"{n}_mask"), padding)
            for n in PAIR
        )

    def messages(self, record: Record) -> list[Message]:
        return super().messages(self.as_pair(record))


@accepts_nemo_aligner_call
class LabelledPairDataset(RewardModelDataset):
    """Pairs with a preference: two neighbouring lines `{"text": ..., "label": [number, ...]}`, or
    lines `{"prompt": ..., "responses": [..., ...], "label": ...}`. The first number of the label
    says which of the two is better, below 0 the first, else the second, and its absolute value by
    how much (NeMo-Aligner's form of HelpSteer2-Preference, arXiv:2410.01257).

    Items: those of the base class, and `margin` float32 (a scalar, at least 0).
    """

    pair_fields = (*RewardModelDataset.pair_fields, "responses")
    read_fields = (*RewardModelDataset.read_fields, "label", "responses")
    check_form = staticmethod(check_labels_can_be_read)

    @classmethod
    def arguments(cls, cfg: Any, seq_length: int) -> dict[str, Any]:
        given = complete(cfg.get("regression"), "training_rm", "model.regression")
        return {"seq_length": seq_length, "mask_value": given.loss_mask_val}

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        mask_value: float = DEFAULT_MASK_VALUE,
        **options: Any,
    ) -> None:
        self.mask_value, self.what = mask_value, ["labelled pairs", mask_value]
        super().__init__(paths, tokenizer, seq_length, **options)
        name = self.name
        labels = self.lines.numbers.astype(np.float32).reshape(-1, self.lines_per_document)
        self.preferences = labels[:, 0]
        disagree = np.flatnonzero(labels[:, 0] != labels[:, -1])
        if len(disagree):
            first = int(disagree[0])
            raise UserError(
                f"{name} data: the two lines of pair {first} have the labels "
                f"{labels[first, 0]:g} and {labels[first, 1]:g}, but one preference: give it, or "
                "for labels of single texts model.regression.loss_func=regression."
            )
        undecided = int((labels[:, 0] == 0).sum())
        if undecided:
            logging.warning(
                f"{name} data: {undecided} of {len(labels)} pairs have the label 0, no "
                "preference; the second text counts as the better one, with margin 0."
            )

    def as_pair(self, record: Record) -> Record:
        if holds_pair(by_our_names(record)):
            raise UserError(
                "a line with 'chosen' and 'rejected' says which is better: set "
                "model.reward_model_type=binary_ranking, or call the field of both 'responses'."
            )
        both = record.get("responses")
        if both is None:
            return record
        if not isinstance(both, list) or len(both) != 2:
            raise UserError("field 'responses' must be a list of two responses to the prompt.")
        return {**record, "chosen": both[0], "rejected": both[1]}

    def _number(self, record: Record) -> float:
        number = label_numbers(record)[0]
        if number == self.mask_value:
            raise UserError(
                f"field 'label' begins with {number:g} (model.regression.loss_mask_val), no "
                "label, in place of the preference of the pair. Remove the pair, or use "
                "model.regression.loss_func=regression."
            )
        return number

    def pair_tokens(self, pair: int) -> tuple[list[int], list[int]]:
        first, second = super().pair_tokens(pair)
        return (first, second) if self.preferences[pair] < 0 else (second, first)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = int(self.documents[max(index, 0)])
        margin = torch.tensor(abs(float(self.preferences[pair])))
        return {**super().__getitem__(index), "margin": margin}

    def note(self, item: dict[str, Any]) -> str:
        return f"margin {float(item['margin']):g}"


DEFAULT_REWARDS = {"chosen_reward": 1.0, "rejected_reward": 0.0}


class DPOModelDataset(RewardModelDataset):
    """Pairs that a policy learns from directly: lines with `prompt`, `chosen` and `rejected` (or
    NeMo-Aligner's `chosen_response` and `rejected_response`), and optionally `chosen_reward` and
    `rejected_reward` (`data_cfg` has defaults); or conversations, as for the base class.

    Items: those of the base class, `chosen_mask` and `rejected_mask` float32 [S], 1 on the tokens
    of the responses (all 0 in an empty slot), and the rewards, float32.
    """

    what = "pairs with prompts"
    read_fields = (*RewardModelDataset.read_fields, *DEFAULT_REWARDS)
    check_form = staticmethod(check_prompts_can_be_read)

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        record = by_our_names(record)
        length = self.encoder.pair_length(record, self.seq_length)
        is_empty = self.encoder.prompt_is_empty(record, "chosen", "rejected")
        for key in DEFAULT_REWARDS:
            if not is_number(record.get(key, 0.0)):
                raise UserError(f"field '{key}' is {record[key]!r}, not a number.")
        return length, 0.0, is_empty

    def _prepare(self, paths: Sequence[Any]) -> None:
        self.pair_in_line, self.lines_per_document = True, 1

    def _check_prompts_of_pairs(self) -> None:
        self.check_prompts()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        record = by_our_names(self.lines[int(self.documents[max(index, 0)])])
        samples = self.encoder.pair(record)
        item = self._item(index, *(sample.tokens for sample in samples))
        for name, sample in zip(PAIR, samples, strict=True):
            item[f"{name}_mask"] = response_mask(sample.is_response, index, self.seq_length)
            key = f"{name}_reward"
            default = self.data_cfg.get(f"default_{key}")
            reward: Any = record.get(key, DEFAULT_REWARDS[key] if default is None else default)
            item[key] = torch.tensor(float(reward))
        return item


class ResponseDataset(EncodedDataset):
    """Lines `{"prompt": ..., "response": ...}`: texts that follow each other, or conversations.

    Items: `tokens` and `labels` int64 [S], padded with eos; column t of the labels holds token
    t+1. `loss_mask` float32 [S], 1 where the label is a token of the response (all 0 in an empty
    slot); `lengths` and `prompt_lengths` (scalars); `idx`.
    """

    prompt_field = "prompt"
    read_fields: Sequence[str] = ("prompt", "response", *BESIDE)
    in_chunks = True
    check_form = staticmethod(check_prompts_can_be_read)
    what = "responses"  # an index of the files that was made for other records is not used

    def _choose_documents(self) -> None:
        self.keep_within("samples")
        self.check_prompts(sampled=type(self) is ResponseDataset)

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        length = self.encoder.response_length(record, self.seq_length)
        return length, 0.0, self.encoder.prompt_is_empty(record, "response")

    def _sample(self, index: int) -> Encoded:
        return self.encoder.with_response(self.lines[int(self.documents[index])])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._sample(max(index, 0))
        start = sample.is_response.index(True)
        if start == 0:
            raise UserError(
                f"{self.name} data: the tokenizer joins a prompt with its response: leave "
                f"{self.tokenizer.ids_to_text(sample.tokens)[:80]!r} out."
            )
        return {
            "tokens": pad(sample.tokens, self.seq_length, self.pad_id),
            "labels": pad(sample.tokens[1:], self.seq_length, self.pad_id),
            "loss_mask": response_mask(sample.is_response[1:], index, self.seq_length),
            "lengths": torch.tensor(len(sample.tokens)),
            "prompt_lengths": torch.tensor(start),
            "idx": torch.tensor(index),
        }

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        labels = int(item["lengths"]) - 1
        return (labelled_part(*(item[key][:labels] for key in ("tokens", "labels", "loss_mask"))),)

    def messages(self, record: Record) -> list[Message]:
        return response_messages(record)[0]


PREFERENCES = {"chosen": 1.0, "rejected": 0.0, True: 1.0, False: 0.0}
# Distance of a mismatched sample's prompt and response, as a share of the data set: the golden
# section, so that they are in unlike places of files that have equal blocks.
PARTNER = 0.381966


class KTOModelDataset(ResponseDataset):
    """Lines `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}` (or true and
    false); texts or conversations, as for `ResponseDataset`.

    Each item also holds a mismatched sample, cut to `seq_length`: its prompt with always the same
    other document's response, from which the distance of policy and reference is estimated.

    Items: `samples`, `kl_samples` int64 [S], padded with eos; `sample_length`, `kl_sample_length`
    (scalars); `sample_mask`, `kl_sample_mask` float32 [S], 1 on the tokens of the responses (all 0
    in an empty slot); `preference` float32 (a scalar), 1 or 0; `loss_mask` float32 [S], all 0 for
    an empty slot; `position_ids` [S]; `idx`.
    """

    what = "labelled responses"
    in_chunks = False
    read_fields = (*ResponseDataset.read_fields, "preference")

    def _choose_documents(self) -> None:
        super()._choose_documents()
        self._check_size()
        desirable = int(self.lines.numbers[self.documents].sum())
        if desirable in (0, len(self.documents)):
            logging.warning(
                f"{self.name} data: all {len(self.documents)} samples are "
                f"{'chosen' if desirable else 'rejected'}: add samples of the other kind."
            )

    def select(self, documents: np.ndarray) -> Self:
        other = super().select(documents)
        other._check_size()
        return other

    def _check_size(self) -> None:
        different = len(np.unique(self.documents))
        if different < 2:
            raise UserError(
                f"{self.name} data: KTO needs at least two samples, as each is compared with "
                f"another's response, but a part has {different} of {len(self.lines)}."
            )

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        length, _, is_empty = super()._inspect(record)
        given = record.get("preference")
        if given is None:
            more = 'The preference says whether the response is "chosen" or "rejected".'
            raise missing(("response", "preference"), record, more)
        if not isinstance(given, bool | str) or given not in PREFERENCES:
            raise UserError(
                f"field 'preference' is {json.dumps(given, default=str)}; it must be \"chosen\" "
                'or "rejected", or true or false.'
            )
        return length, PREFERENCES[given], is_empty

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
        prompt, first = (each.is_response.index(True) for each in (sample, other))
        mismatched = Encoded(
            (sample.tokens[:prompt] + other.tokens[first:])[: self.seq_length],
            ([False] * prompt + other.is_response[first:])[: self.seq_length],
        )
        for key, each in {"sample": sample, "kl_sample": mismatched}.items():
            item[f"{key}s"] = pad(each.tokens, self.seq_length, self.pad_id)
            item[f"{key}_length"] = torch.tensor(len(each.tokens))
            item[f"{key}_mask"] = response_mask(each.is_response, index, self.seq_length)
        return item

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        name = "chosen" if item["preference"] else "rejected"
        columns = (item[key] for key in ("samples", "sample_length", "sample_mask"))
        return (sequence_part(name, *columns),)


_build = build_train_valid_test_datasets
build_train_valid_test_rm_datasets = partial(_build, RewardModelDataset)
build_train_valid_test_dpo_datasets = partial(_build, DPOModelDataset)
build_train_valid_test_kto_datasets = partial(_build, KTOModelDataset)
build_train_valid_test_regression_rm_datasets = partial(_build, RegressionRewardModelDataset)
__getattr__ = retired_names(__name__)
