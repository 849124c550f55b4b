# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts for rollouts: the dataset, its batches, and checks before the first rollout."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig
from typing_extensions import Self

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.fields import A_SAMPLE, Record, columns_asked, is_number
from nemo_aligner.data.nlp.file_dataset import EncodedDataset, Part, accepts_nemo_aligner_call

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.chat_records import Message


@accepts_nemo_aligner_call
class RLHFDataset(EncodedDataset):
    """Prompts: lines `{"text": prompt}`, tokenized as they are, or conversations that end with the
    user. One of more than `max_prompt_length` tokens is replaced by the next one that fits, with a
    `loss_multiplier` of 0: batches stay full, but it must not train. `limit_text` is the limit in
    words, and where it comes from.

    Items: `text` int64 [P], and as scalars `length` (P), `loss_multiplier` float32 (from the
    column that `data_cfg.sample_weight` names, else 1), `idx`, the index that was asked for, and
    for `PromptColumns` `record`, the number of the prompt's record.
    """

    prompt_field, read_fields = "prompt", A_SAMPLE
    what, alike = "prompts", ""
    others_are = "columns that only a reward function can read"
    first_record: int | None = None  # number of the first record; None: items have no `record`

    @classmethod
    def arguments(cls, cfg: Any, seq_length: int) -> dict[str, Any]:
        """At most `seq_length - length_params.max_length` tokens, so that responses fit."""
        limit, reason = seq_length // 2, "half of it, as there is no length_params.max_length"
        sections = {"model.": cfg}
        sections |= {f"model.{kind}.": cfg.get(kind) for kind in ("reinforce", "rs", "ppo")}
        for key, section in sections.items():
            max_length = ((section or {}).get("length_params") or {}).get("max_length")
            if max_length is not None:
                limit = seq_length - max_length
                reason = f"less {key}length_params.max_length={max_length}"
        text = f"{limit} tokens (model.data.seq_length={seq_length}, {reason})"
        if limit <= 0:
            raise ConfigError(
                f"no room for prompts: the limit is {text}. Lower length_params.max_length."
            )
        return {"max_prompt_length": limit, "limit_text": text}

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        max_prompt_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
        limit_text: str = "the limit",
    ) -> None:
        self.max_prompt_length, self.limit_text = max_prompt_length, limit_text
        super().__init__(paths, tokenizer, max_prompt_length, data_cfg, name)

    def _choose_documents(self) -> None:
        self.documents = np.arange(len(self.lines))
        self.check_prompts(sampled=True)
        fits = self._fits()
        if not fits.all():
            logging.warning(
                f"{self.name} data: {(~fits).sum()} of {len(fits)} prompts are longer than "
                f"{self.limit_text} (the longest has {self.lines.notes.max()} tokens). Each is "
                "replaced by the next prompt that fits, without weight in the loss."
            )
        for document in self.documents if self.data_cfg.get("sample_weight") else ():
            self._weight(document)

    def _weight(self, document: int) -> float:
        column = self.data_cfg.get("sample_weight")
        if not column or self.name != "train":
            return 1.0
        weight: Any = self.lines[document].get(column)
        if not is_number(weight) or weight < 0:
            raise UserError(
                f"{self.lines.where(document)}: '{column}' is {weight!r}, but "
                f"model.data.sample_weight={column} needs a number of at least 0 in each record."
            )
        return float(weight)

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        length = self.encoder.prompt_length(record, self.max_prompt_length)
        return length, 0.0, self.encoder.prompt_is_empty(record)

    def _fits(self) -> np.ndarray:
        """bool [len(self)]: True for documents within the limit; raises if there are none."""
        lengths = self.lines.notes[self.documents]
        fits = lengths <= self.max_prompt_length
        if not fits.any():
            raise UserError(
                f"{self.name} data: all {len(fits)} prompts are longer than {self.limit_text}; "
                f"the longest has {lengths.max()} tokens, the shortest {lengths.min()}. Raise "
                "model.data.seq_length or lower length_params.max_length. Files: "
                f"{', '.join(map(str, self.lines.paths))}"
            )
        return fits

    def select(self, documents: np.ndarray) -> Self:
        other = super().select(documents)
        other._fits()
        return other

    def longest_prompt(self, enough: int) -> int:
        """Tokens of the longest prompt that is used, or less if none has more than `enough`."""
        if self.max_prompt_length <= enough:
            return 0
        bounds = self.lines.notes[self.documents]  # upper bounds, see `prompt_length`
        in_doubt = self.documents[(bounds > enough) & (bounds <= self.max_prompt_length)]
        longest = 0
        for document in sorted(in_doubt, key=lambda document: -self.lines.notes[document]):
            if self.lines.notes[document] <= longest:
                break
            longest = max(longest, len(self.encoder.prompt(self.lines[document])))
        return longest

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        position = max(index, 0)
        replaced = 0
        while self.lines.notes[self.documents[position]] > self.max_prompt_length:
            position, replaced = (position + 1) % len(self), 1
        tokens = self.encoder.prompt(self.lines[self.documents[position]])
        weight = 0.0 if replaced or index < 0 else self._weight(self.documents[position])
        item = {
            "text": torch.tensor(tokens, dtype=torch.int64),
            "length": torch.tensor(len(tokens)),
            "loss_multiplier": torch.tensor(weight),
            "idx": torch.tensor(index),
        }
        if self.first_record is not None:
            item["record"] = torch.tensor(self.first_record + int(self.documents[position]))
        return item

    # --- for people ---

    def limit(self) -> str:
        return f"a prompt may have {self.limit_text}"

    def by_length(self, notes: np.ndarray) -> list[tuple[str, np.ndarray, bool]]:
        what = "replaced by the next prompt that fits, without weight in the loss"
        return [(f"longer than {self.limit_text}: {what}", notes > self.max_prompt_length, True)]

    def in_use(self) -> np.ndarray:
        return np.flatnonzero(self._fits())

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        tokens = item["text"].tolist()
        return (Part("prompt", tokens, [False] * len(tokens)),)

    def messages(self, record: Record) -> list["Message"]:
        from nemo_aligner.data.nlp.chat_records import prompt_messages

        return [] if "text" in record else prompt_messages(record)


class PromptColumns:
    """The columns of prompts' records beside the prompt, such as a reference answer.

    Args:
        datasets: of the prompts, whose items have a `record` from now on.
        asked: names of columns that each record must have; "**" stands for all others.
        share: (n, of how many) shares of the records to check (`UserError` with the row).
    """

    def __init__(
        self,
        datasets: Sequence[RLHFDataset],
        asked: Sequence[str],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.asked = asked
        self.records: list[tuple[int, Any]] = []  # of each data set, after the number of the first
        first = 0
        for dataset in datasets:
            dataset.first_record = first
            self.records.insert(0, (first, dataset.lines))
            first += len(dataset.lines)
            for document in dataset.documents[share[0] :: share[1]]:
                try:
                    json.dumps(columns_asked(dataset.lines[document], asked))
                except (UserError, TypeError, ValueError) as error:
                    where = dataset.lines.where(document)
                    raise UserError(f"{where} cannot be given to a reward: {error}") from None

    def record(self, number: int) -> Record:
        return next(lines[number - first] for first, lines in self.records if number >= first)

    def __call__(self, numbers: torch.Tensor) -> list[dict[str, Any]]:
        """The columns of the records with these numbers, int64 [b]."""
        return [columns_asked(self.record(number), self.asked) for number in numbers.tolist()]


def collate_with_batch_max_sequence_length(
    data_batch: Sequence[Mapping[str, torch.Tensor]],
    response_token_length: int,
    eos_id: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    generate_masks_and_position_ids: bool = True,
) -> dict[str, torch.Tensor]:
    """Collate b items of `RLHFDataset`: pad with `eos_id` on the right to the longest prompt plus
    `response_token_length` columns; the next three arguments are not used.

    Returns:
        `text` int64 [b, S], `length`, `idx` int64 [b], `loss_multiplier` float32 [b], and `record`
        int64 [b] if the items have it; with `generate_masks_and_position_ids` also
        `attention_mask` bool [1, 1, S, S] (True: must not see), `position_ids` [b, S] and
        `loss_mask` float32 [b, S].
    """
    texts = [item["text"] for item in data_batch]
    width = max(map(len, texts)) + response_token_length
    pad = torch.nn.functional.pad
    padded = [pad(text, (0, width - len(text)), value=eos_id) for text in texts]
    batch = {"text": torch.stack(padded)}
    for key in ("length", "loss_multiplier", "idx", "record"):
        if key in data_batch[0]:
            batch[key] = torch.stack([item[key] for item in data_batch])
    if generate_masks_and_position_ids:
        batch["attention_mask"] = torch.ones(width, width, dtype=torch.bool).triu(1)[None, None]
        batch["position_ids"] = torch.arange(width).repeat(len(texts), 1)
        batch["loss_mask"] = batch["loss_multiplier"][:, None].repeat(1, width)
    return batch


def collate_with_pad_to_max_batch(
    max_seqlen: int,
    tokenizer_eos_id: int,
    cfg: DictConfig,
    generate_masks_and_position_ids: bool = True,
) -> Callable[[Sequence[Mapping[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """`collate_with_batch_max_sequence_length` with all but the items; `cfg` is not used."""
    return partial(
        collate_with_batch_max_sequence_length,
        response_token_length=max_seqlen,
        eos_id=tokenizer_eos_id,
        generate_masks_and_position_ids=generate_masks_and_position_ids,
    )


def identity_collate(batch: list[Any]) -> list[Any]:
    return batch


def single_validation_set(
    validation: RLHFDataset | dict[str, RLHFDataset] | None,
) -> RLHFDataset | None:
    """The validation set of a builder; `ConfigError`: there are several."""
    if isinstance(validation, dict):
        raise ConfigError(
            f"model.data.data_prefix has several validation sets ({', '.join(validation)}), but "
            "rollouts are validated on one."
        )
    return validation


def check_pad_to_length(
    cfg: DictConfig, remote: str, section: str, datasets: Iterable[RLHFDataset]
) -> None:
    """Warn if a sample can be wider than `pad_to_length` of the section `remote`."""
    pad_to_length = cfg[remote].pad_to_length
    max_length = cfg.model[section].length_params.max_length
    if pad_to_length is None:
        return
    enough = pad_to_length - max_length
    longest, name = max((each.longest_prompt(enough), each.name) for each in datasets)
    if longest + max_length > pad_to_length:
        logging.warning(
            f"{remote}.pad_to_length={pad_to_length} does not hold every sample: the longest "
            f"prompt of the {name} data has {longest} tokens, and "
            f"model.{section}.length_params.max_length={max_length} more may be generated. For "
            f"one width of all samples set {remote}.pad_to_length={longest + max_length}."
        )
