# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Datasets over jsonl files: prompts for PPO/RS, pairs or labelled texts for a reward model,
prompt-response examples for SFT.

A file is read once at start: every line is checked (a broken one is an error with its file and
number) and only its byte offset is kept; texts are tokenized when they are asked for. Index -1 is
an empty slot of a padded validation
batch: it returns the first item, masked.

Legend: S padded length; token tensors are int64, masks float32 with 1.0 where a token counts.
"""

import array
import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError, UserError

# A tokenizer may add a few tokens that stand for no character (bos, eos, SentencePiece's leading
# space).
_EXTRA_TOKENS = 8
# `model.regression.loss_mask_val` where it is not set: the label that says that there is none.
DEFAULT_MASK_VALUE = -100.0


class JsonLines(Sequence):
    """Records of jsonl files, one after the other, read from disk when asked for. Blank lines do
    not count.

    Args:
        paths: the files.
        fields: each record must have these, as text.
        inspect: called once with every record; its results (int) are kept in `notes`. A
            `UserError` of its own gets the place in front.
        allow_blank: the text of `fields` may be blank.

    Attributes:
        notes: int64 [number of records].
        counts: records per file.

    Raises:
        UserError: a file is missing or empty, or a line is broken; the message names the file and
        the line.
    """

    def __init__(
        self,
        paths: Sequence[str],
        fields: Sequence[str],
        inspect: Callable[[dict], int],
        allow_blank=False,
    ):
        self.paths = [Path(path) for path in paths]
        offsets, notes, self.counts = array.array("q"), array.array("q"), []
        for path in self.paths:
            if not path.is_file():
                raise UserError(
                    f"data file {path} does not "
                    f"exist{' (it is a folder)' if path.is_dir() else ''}."
                )
            before, offset = len(offsets), 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        record = _parse(line, fields, allow_blank, where)
                        offsets.append(offset)
                        try:
                            notes.append(inspect(record))
                        except UserError as error:
                            raise UserError(f"{where}: {error}") from None
                    offset += len(line)
            self.counts.append(len(offsets) - before)
            if len(offsets) == before:
                raise UserError(f"data file {path} is empty.")
        self.offsets = np.array(offsets, dtype=np.int64)
        self.notes = np.array(notes, dtype=np.int64)
        self.first_of_file = np.cumsum([0, *self.counts[:-1]])

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict:
        file_number = int(np.searchsorted(self.first_of_file, index, side="right")) - 1
        # Opened anew each time: worker processes of a DataLoader would share the position of an
        # open file.
        with self.paths[file_number].open("rb") as file:
            file.seek(self.offsets[index])
            return json.loads(file.readline())


def _parse(line: bytes, fields: Sequence[str], allow_blank: bool, where: str) -> dict:
    """One line as a record that has `fields`; `where` opens the message of an error."""
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(
            f"{where}: not valid JSON ({error}). Each line must be one JSON object."
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, not {type(record).__name__}.")
    for field in fields:
        if field not in record:
            raise UserError(f"{where}: field '{field}' is missing; the line has {sorted(record)}.")
        if not isinstance(record[field], str):
            raise UserError(
                f"{where}: field '{field}' must be text, not {type(record[field]).__name__}."
            )
        if not (allow_blank or record[field].strip()):
            raise UserError(f"{where}: field '{field}' is empty.")
    return record


class _TextEncoder:
    """Tokenizes a text as it stands: no template, no bos; `data.apply_ftfy` and `data.append_eod`
    on request.
    """

    def __init__(self, tokenizer, data_cfg=None):
        data_cfg = data_cfg or {}
        self.tokenizer = tokenizer
        self.append_eod = bool(data_cfg.get("append_eod", False))
        self.fix_text = None
        if data_cfg.get("apply_ftfy", False):
            try:
                from ftfy import fix_text
            except ImportError:
                raise ConfigError(
                    "model.data.apply_ftfy=True needs the package ftfy: pip install ftfy."
                ) from None
            self.fix_text = fix_text

    def __call__(self, text: str) -> list[int]:
        text = self.fix_text(text) if self.fix_text else text
        return self.tokenizer.text_to_ids(text) + [self.tokenizer.eos_id] * self.append_eod

    def length(self, text: str, limit: int) -> int:
        """Number of tokens, exact if above `limit`, else perhaps a bound: most texts surely fit
        and cost no work.
        """
        if text.isascii() and len(text) + _EXTRA_TOKENS <= limit:
            return len(text) + _EXTRA_TOKENS
        return len(self(text))


class _Dataset(torch.utils.data.Dataset):
    """A dataset that serves a choice of the documents in its files, in the order of their numbers
    `documents`.
    """

    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, documents: np.ndarray):
        """The same dataset with only `documents`, without reading the files again."""
        other = copy.copy(self)
        other.documents = documents
        return other


class RLHFDataset(_Dataset):
    """Prompts: lines `{"text": prompt}`, tokenized as they are.

    A prompt longer than the limit is replaced by the next one that fits, and its `loss_multiplier`
    is 0: it is generated for, so that batches stay full, but must not train. A warning at start
    counts them.

    Args:
        paths: jsonl files.
        tokenizer: NeMo tokenizer.
        max_prompt_length: limit in tokens; `limit_text` says in words where it comes from.
        data_cfg: `model.data`.
        name: "train", ...; for messages.

    Items: `text` [P], `length` (P), `loss_multiplier` f32, `idx` int64 (the index asked for; all
        but `text` are scalars).
    """

    def __init__(
        self,
        paths,
        tokenizer,
        max_prompt_length: int,
        data_cfg=None,
        name="train",
        limit_text="the limit",
    ):
        self.encode = _TextEncoder(tokenizer, data_cfg)
        self.name = name
        self.max_prompt_length = max_prompt_length
        self.limit_text = limit_text
        self.lines = JsonLines(
            paths, ["text"], lambda record: self.encode.length(record["text"], max_prompt_length)
        )
        self.documents = np.arange(len(self.lines))
        fits = self._fits()
        if not fits.all():
            logging.warning(
                f"{name} data: {(~fits).sum()} of {len(fits)} prompts are longer than "
                f"{limit_text} (the longest has"
                f" {self.lines.notes.max()} tokens). In their place the next prompt that fits is "
                "used, with no weight"
                f" in the loss."
            )

    def _fits(self) -> np.ndarray:
        """bool [len(self)]; an error if no document fits."""
        lengths = self.lines.notes[self.documents]
        fits = lengths <= self.max_prompt_length
        if not fits.any():
            raise UserError(
                f"{self.name} data: all {len(fits)} prompts are longer than {self.limit_text}; "
                "the longest has"
                f" {lengths.max()} tokens, the shortest {lengths.min()}. Shorten the prompts, "
                "raise"
                " model.data.seq_length (model.encoder_seq_length) or lower "
                "length_params.max_length. Files:"
                f" {', '.join(map(str, self.lines.paths))}"
            )
        return fits

    def select(self, documents):
        other = super().select(documents)
        other._fits()
        return other

    def __getitem__(self, index: int) -> dict:
        position = max(index, 0)
        replaced = 0
        while self.lines.notes[self.documents[position]] > self.max_prompt_length:
            position, replaced = (position + 1) % len(self), 1
        tokens = torch.tensor(
            self.encode(self.lines[self.documents[position]]["text"]), dtype=torch.int64
        )
        return {
            "text": tokens,
            "length": torch.tensor(len(tokens)),
            "loss_multiplier": torch.tensor(0.0 if replaced or index < 0 else 1.0),
            "idx": torch.tensor(index),
        }


class RewardModelDataset(_Dataset):
    """Pairs for a binary reward model: two neighbouring lines `{"text": ...}`, the better one
    first.

    A pair with a text longer than `seq_length` is left out, and a warning at start counts them.

    Items: `chosen`, `rejected` [S], padded with eos to `seq_length`; `chosen_length`,
    `rejected_length` (scalars); `loss_mask` [S], all 0 for an empty slot; `position_ids` [S];
    `idx`. There is no attention mask: attention is causal and the padding is on the right, so no
    text token ever sees it.
    """

    def __init__(self, paths, tokenizer, seq_length: int, data_cfg=None, name="train"):
        self.encode = _TextEncoder(tokenizer, data_cfg)
        self.name = name
        self.seq_length = seq_length
        self.pad_id = tokenizer.eos_id
        self.lines = JsonLines(paths, ["text"], self._inspect)
        for path, count in zip(self.lines.paths, self.lines.counts, strict=True):
            if count % 2:
                raise UserError(
                    f"{path} has {count} lines, an odd number: a reward model's data are pairs of "
                    "neighbouring lines,"
                    f" the better one first. A line is missing or too many."
                )
        lengths = self.lines.notes.reshape(-1, 2).max(axis=1)
        self.documents = _that_fit(lengths, seq_length, name, "pairs", "have a text longer")

    def _inspect(self, record: dict) -> int:
        if "label" in record:  # neighbours of a file of labelled texts are no pairs
            raise UserError(
                "field 'label': this is data for regression, but pairs of neighbouring lines are "
                "needed. Set"
                " model.reward_model_type=regression; if the lines are pairs, leave the field out."
            )
        return self.encode.length(record["text"], self.seq_length)

    def __getitem__(self, index: int) -> dict:
        pair = int(self.documents[max(index, 0)])
        chosen, rejected = (
            self.encode(self.lines[line]["text"]) for line in (2 * pair, 2 * pair + 1)
        )
        longest = max(len(chosen), len(rejected))
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[: longest if index >= 0 else 0] = 1.0
        return {
            "chosen": _pad(chosen, self.seq_length, self.pad_id),
            "rejected": _pad(rejected, self.seq_length, self.pad_id),
            "chosen_length": torch.tensor(len(chosen)),
            "rejected_length": torch.tensor(len(rejected)),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_length),
            "idx": torch.tensor(index),
        }


class RegressionRewardModelDataset(_Dataset):
    """Labelled texts for a regression reward model: lines `{"text": ..., "label": [number, ...]}`.

    With one attribute a bare number will do. A label equal to `mask_value` says that there is
    none. A text longer than `seq_length` is left out, and a warning at start counts them.

    Args:
        num_attributes: A, numbers in each label.
        mask_value: `model.regression.loss_mask_val`.

    Items: `inputs` [S], padded with eos to `seq_length`; `lengths` (a scalar); `labels` f32 [A];
    `loss_mask` [S], all 0 for an empty slot; `position_ids` [S]; `idx`. No attention mask, for the
    reason given at `RewardModelDataset`.
    """

    def __init__(
        self,
        paths,
        tokenizer,
        seq_length: int,
        num_attributes: int,
        mask_value: float = DEFAULT_MASK_VALUE,
        data_cfg=None,
        name="train",
    ):
        self.encode = _TextEncoder(tokenizer, data_cfg)
        self.name = name
        self.seq_length = seq_length
        self.num_attributes = num_attributes
        self.pad_id = tokenizer.eos_id
        labels_that_count = 0

        def inspect(record) -> int:
            nonlocal labels_that_count
            labels_that_count += sum(
                number != mask_value for number in _label(record, num_attributes)
            )
            return self.encode.length(record["text"], seq_length)

        self.lines = JsonLines(paths, ["text"], inspect)
        if not labels_that_count:
            raise UserError(
                f"{name} data: every label is model.regression.loss_mask_val={mask_value}, which "
                "says that there is"
                f" none. Files: {', '.join(map(str, self.lines.paths))}"
            )
        self.documents = _that_fit(self.lines.notes, seq_length, name, "texts", "are longer")

    def __getitem__(self, index: int) -> dict:
        record = self.lines[int(self.documents[max(index, 0)])]
        tokens = self.encode(record["text"])
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[: len(tokens) if index >= 0 else 0] = 1.0
        return {
            "inputs": _pad(tokens, self.seq_length, self.pad_id),
            "lengths": torch.tensor(len(tokens)),
            "labels": torch.tensor(_label(record, self.num_attributes), dtype=torch.float32),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_length),
            "idx": torch.tensor(index),
        }


def _label(record: dict, num_attributes: int) -> list[float]:
    """The label of a line as `num_attributes` numbers."""
    label = record.get("label")
    numbers = label if isinstance(label, list) else [label]
    if label is None:
        raise UserError(f"field 'label' is missing; the line has {sorted(record)}.")
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
    if len(numbers) != num_attributes:
        raise UserError(
            f"field 'label' has {len(numbers)} number{'' if len(numbers) == 1 else 's'}, but"
            f" model.regression.num_attributes={num_attributes}."
        )
    return [float(number) for number in numbers]


def _that_fit(
    lengths: np.ndarray, seq_length: int, name: str, what: str, are_longer: str
) -> np.ndarray:
    """Numbers of the documents of at most `seq_length` tokens; a warning counts the others, and
    none is an error.

    Args:
        what, are_longer: words for "all 3 <what> <are_longer> than ...".
    """
    documents = np.flatnonzero(lengths <= seq_length)
    if not len(documents):
        raise UserError(
            f"{name} data: all {len(lengths)} {what} {are_longer} than seq_length={seq_length} "
            "tokens; the longest has"
            f" {lengths.max()}. Shorten the texts or raise model.data.seq_length "
            "(model.encoder_seq_length)."
        )
    if len(documents) < len(lengths):
        logging.warning(
            f"{name} data: {len(lengths) - len(documents)} of {len(lengths)} {what} are left out: "
            f"they {are_longer}"
            f" than seq_length={seq_length} tokens (the longest has {lengths.max()})."
        )
    return documents


class SFTDataset(_Dataset):
    """Prompt-response examples: lines with the fields that `prompt_template` names, the answer
    last.

    The template is cut at its fields and each piece tokenized by itself, so the answer's tokens do
    not depend on the prompt. One space before a field belongs to the field ("{input} {output}":
    the answer starts with a space, and the prompt is tokenized exactly as PPO would), unless the
    tokenizer itself puts spaces between pieces.

    An example longer than `max_seq_length` first loses tokens of the fields named by
    `truncation_field` (comma-separated, in order), on the side `truncation_method` ("left" or
    "right"); if that is not enough, the end of the answer.

    Items: `tokens` list of ids, `answer_start` (position of the first token that is trained on),
    `idx`. `collate_fn`
    makes batches: `tokens`, `labels` int64 [B, S] (labels: the token that follows), `loss_mask`
    f32 [B, S] (1.0 where the label counts), `position_ids` [B, S].
    """

    def __init__(
        self,
        paths,
        tokenizer,
        max_seq_length: int,
        prompt_template: str = "{input} {output}",
        label_key: str = "output",
        truncation_field: str = "input",
        truncation_method: str = "right",
        add_bos: bool = False,
        add_eos: bool = True,
        answer_only_loss: bool = True,
        pad_to_max_length: bool = False,
        name: str = "train",
    ):
        if not prompt_template.endswith("{" + label_key + "}"):
            raise ConfigError(
                f"prompt_template={prompt_template!r} must end with the answer, {{{label_key}}}"
                f" (label_key={label_key})."
            )
        if truncation_method not in ("left", "right"):
            raise ConfigError(
                f"truncation_method={truncation_method!r}: must be 'left' or 'right'."
            )
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.template = _split_template(
            prompt_template, getattr(tokenizer, "space_sensitive", True)
        )
        self.fields = [
            field for field in dict.fromkeys(field for _text, field in self.template) if field
        ]
        self.label_key = label_key
        self.truncation_fields = [
            field.strip() for field in (truncation_field or "").split(",") if field.strip()
        ]
        for field in self.truncation_fields:
            if field not in self.fields:
                raise ConfigError(
                    f"truncation_field={field!r} is not a field of "
                    f"prompt_template={prompt_template!r}."
                )
        self.truncation_method = truncation_method
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.answer_only_loss = answer_only_loss
        self.pad_to_max_length = pad_to_max_length
        self.lines = JsonLines(paths, self.fields, self._inspect, allow_blank=True)
        if (self.lines.notes == 2).all():
            raise UserError(
                f"{name} data: in all {len(self.lines)} examples the prompt alone fills"
                f" max_seq_length={max_seq_length} tokens, so nothing of the answer is left to "
                "train on. Raise"
                " max_seq_length or truncate more (truncation_field)."
            )
        if self.lines.notes.any():
            logging.warning(
                f"{name} data: {(self.lines.notes > 0).sum()} of {len(self.lines)} examples are "
                "longer than"
                f" max_seq_length={max_seq_length} tokens and truncated; "
                f"{(self.lines.notes == 2).sum()} of them keep"
                " nothing of the answer."
            )
        self.documents = np.arange(len(self.lines))

    def _inspect(self, record: dict) -> int:
        """0: fits; 1: will be truncated; 2: truncated to the last token of the answer."""
        text = "".join(text + record.get(field, "") for text, field in self.template)
        if (
            text.isascii()
            and len(text) + _EXTRA_TOKENS * len(self.template) <= self.max_seq_length
        ):
            return 0
        tokens, answer_start, is_truncated = self._encode(record)
        return 2 if answer_start >= len(tokens) else int(is_truncated)

    def _encode(self, record: dict) -> tuple[list[int], int, bool]:
        """(tokens, position of the first token of the answer, whether anything was cut off)."""
        pieces = [
            self.tokenizer.text_to_ids(text + record.get(field, ""))
            for text, field in self.template
        ]
        overflow = sum(map(len, pieces)) + self.add_bos + self.add_eos - self.max_seq_length
        is_truncated, cut_right = overflow > 0, self.truncation_method == "right"
        for name in self.truncation_fields:
            for number, (_text, field) in enumerate(self.template):
                if field == name and overflow > 0:
                    cut = min(overflow, len(pieces[number]))
                    keep = len(pieces[number]) - cut
                    pieces[number] = pieces[number][:keep] if cut_right else pieces[number][cut:]
                    overflow -= cut
        prompt = [self.tokenizer.bos_id] * self.add_bos + sum(pieces[:-1], [])
        tokens = prompt + pieces[-1] + [self.tokenizer.eos_id] * self.add_eos
        return tokens[: self.max_seq_length], len(prompt), is_truncated

    def __getitem__(self, index: int) -> dict:
        tokens, answer_start, _is_truncated = self._encode(
            self.lines[self.documents[max(index, 0)]]
        )
        if index < 0:
            answer_start = len(tokens)  # an empty slot: nothing counts
        elif not self.answer_only_loss:
            answer_start = 0
        return {"tokens": tokens, "answer_start": answer_start, "idx": index}

    def collate_fn(self, items: list[dict]) -> dict:
        """A batch, padded with eos to its longest example (a multiple of 16, at most
        `max_seq_length`).
        """
        longest = max(len(item["tokens"]) for item in items)
        width = (
            self.max_seq_length
            if self.pad_to_max_length
            else min(-(-longest // 16) * 16, self.max_seq_length)
        )
        tokens = torch.stack(
            [_pad(item["tokens"], width + 1, self.tokenizer.eos_id) for item in items]
        )
        target = torch.arange(1, width + 1)  # the token that a column of the loss mask predicts
        starts = torch.tensor([item["answer_start"] for item in items])[:, None]
        ends = torch.tensor([len(item["tokens"]) for item in items])[:, None]
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": ((target >= starts) & (target < ends)).float(),
            "position_ids": torch.arange(width).expand(len(items), width).contiguous(),
        }


def _split_template(template: str, space_sensitive: bool) -> list[tuple[str, str | None]]:
    """Pieces (text, field or None) of a template: text that stands before the field in the same
    piece, and the field.

    "Q: {input} A: {output}" -> ("Q:", None), (" ", "input"), (" A:", None), (" ", "output");
    without the spaces at the edges of the pieces for a tokenizer that puts them there itself
    (`space_sensitive=False`).
    """
    pieces: list[tuple[str, str | None]] = []
    literal = ""
    for part in re.split(r"(\{\w+\})", template):
        if not re.fullmatch(r"\{\w+\}", part):
            literal = part
            continue
        space = " " if literal.endswith(" ") else ""
        literal = literal.removesuffix(" ")
        if not space_sensitive:
            space, literal = "", literal.removeprefix(" ")
        if literal:
            pieces.append((literal, None))
        pieces.append((space, part[1:-1]))
        literal = ""
    return pieces


def _pad(tokens: list[int], width: int, pad_id: int) -> torch.Tensor:
    """int64 [width]: `tokens`, then `pad_id`."""
    return torch.tensor(tokens + [pad_id] * (width - len(tokens)), dtype=torch.int64)
