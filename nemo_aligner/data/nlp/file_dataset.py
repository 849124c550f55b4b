# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the datasets over files share, NeMo-Aligner's constructor among it."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig
from typing_extensions import Self

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import lengths_before
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.fields import (
    Record,
    by_our_names,
    conversation_field,
    holds_pair,
    prompt_hint,
)
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.data.nlp.records import GivenRecords, Records, settings_of

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.chat_records import ConversationForm, Message


@dataclass(frozen=True)
class Part:
    name: str  # "prompt", "example", "response", "chosen", "rejected" or "text"
    tokens: list[int]  # its ids, without padding
    marked: list[bool]  # True for the tokens that are trained on, or at which a reward is read
    scored: bool = False  # the second

    @property
    def legend(self) -> str:
        """What the mark means; of a prompt, which has none, what becomes of it."""
        if self.name == "prompt":
            return "the policy continues it"
        return "the reward is read at the token" if self.scored else "trained on"


class FileDataset(torch.utils.data.Dataset[dict[str, Any]], ABC):
    """A dataset over files that serves some of their documents.

    The arguments of most: `paths`, the files; `tokenizer`, NeMo's; `seq_length`, S; `data_cfg`,
    `model.data`; `name`, for messages. What has more than S tokens is left out, with a warning.
    Index -1 is an empty slot of a padded validation batch: the first item, masked.

    Attributes:
        lines: the records of all files.
        lines_per_document: 2 where a document is a pair.
        documents: int64 [number of items], the numbers of the documents served, in order.
    """

    name: str
    tokenizer: Tokenizer
    data_cfg: Mapping[str, Any]
    documents: np.ndarray
    lines: Records
    lines_per_document = 1
    prompt_field: str | None = None  # that holds the prompt
    read_fields: Sequence[str] = ()  # of its records; empty: all
    in_chunks = False  # a name of a file may stand for several (`data_files.CHUNK_ID`)
    lacks_prompts = False  # some of them are empty
    allow_empty_prompt: bool
    others_are = "columns that nothing reads"
    alike = ", to the token"  # how items are equal that are there twice
    # From records to tokens; the form of conversations that a dataset without an encoder reads.
    encoder: Any = None
    form: Any = None
    seq_length: int

    def checked_records(
        self, paths: Sequence[Any], depends_on: Sequence[Any], *fields: str, **options: Any
    ) -> Records:
        """The `Records` of `paths`; their check depends on the tokenizer and on `depends_on`."""
        settings = functools.partial(settings_of, self.tokenizer, *depends_on)
        options |= {"data_cfg": self.data_cfg, "settings": settings}
        return Records(paths, fields, self._inspect, **options)

    @abstractmethod
    def _inspect(self, record: Record) -> tuple[int, float] | tuple[int, float, int]:
        """What is kept of a record; see `Records`."""

    @staticmethod
    def check_form(data_impl: str) -> None:
        """Raise `ConfigError` unless files of this form can hold the data."""

    @classmethod
    def arguments(cls, cfg: Any, seq_length: int) -> dict[str, Any]:
        """What the section `model` says of the constructor's other arguments."""
        return {"seq_length": seq_length}

    def unread_columns(self) -> list[str]:
        """For each file the columns that nothing reads, with the hint of one like the prompt."""
        found: list[str] = []
        for path, record, names in self.lines.first_rows():
            names -= set(self.read_fields or names)
            hint = prompt_hint(self.prompt_field or "", record, names, self.lacks_prompts)
            found += [f"{path}: {', '.join(sorted(names))}.{hint}"] if names else []
        return found

    def say_unread(self, is_refused: bool = False) -> str:
        """Name the columns that nothing reads; returns the hint of a prompt among them, which is a
        warning unless the data are refused.
        """
        hint = ""
        for found in self.unread_columns():
            text = f"{self.others_are}, in {found}"
            if not found.endswith("reads it."):
                logging.info(f"{self.name} data: {text}")
                continue
            hint = hint or f"There are {text} "
            if not is_refused:
                logging.warning(f"{self.name} data: {text}")
        return hint

    def begins(self, record: Record) -> bool:
        """Whether a token stands before the response to a record's empty prompt."""
        return self.encoder.begins(record)

    def check_prompts(self, sampled: bool = False) -> None:
        """Name the columns that nothing reads, and count the empty prompts (`lines.extra` is 1);
        those that are `sampled` from must have a token to begin with.
        """
        allowed, empty = self.allow_empty_prompt, np.flatnonzero(self.lines.extra)
        self.lacks_prompts = len(empty) > 0
        has_token = not len(empty) or self.begins(self.lines[int(empty[0])])
        is_refused = len(empty) > 0 and (not allowed or sampled and not has_token)
        unread = self.say_unread(is_refused)
        if not len(empty):
            return
        text = f"{self.name} data: {len(empty)} of {len(self.lines)} prompts are empty"
        if is_refused:
            remedy = f"{unread}Remove them, or set model.data.allow_empty_prompt=True."
            remedy = "The policy needs a token to begin with: add_bos=True." if allowed else remedy
            raise UserError(f"{text}, the first in {self.lines.where(int(empty[0]))}. {remedy}")
        rest = "" if has_token else "; the first token behind is not trained on (add_bos=True)"
        logging.warning(f"{text}, as model.data.allow_empty_prompt=True allows{rest}.")

    # --- for people: see `inspection/` ---

    def limit(self) -> str:
        return f"a text may have model.data.seq_length={self.seq_length} tokens"

    def by_length(self, notes: np.ndarray) -> list[tuple[str, np.ndarray, bool]]:
        """What is left out, replaced or cut: what becomes of it, of which of the documents with
        these notes (bool), and whether notes are lengths.
        """
        text = f"longer than model.data.seq_length={self.seq_length} tokens: left out"
        return [(text, notes > self.seq_length, True)]

    def in_use(self) -> np.ndarray:
        return np.arange(len(self))

    @abstractmethod
    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        """What the model sees of an item; `padding`: `model.pad_token_id`."""

    def note(self, item: dict[str, Any]) -> str:
        return ""

    def form_of(self, record: Record) -> "ConversationForm | None":
        """The form that a record's conversation is written in; None: it holds none."""
        return self.form if self.encoder is None else self.encoder.form_of(by_our_names(record))

    def messages(self, record: Record) -> list["Message"]:
        from nemo_aligner.data.nlp.chat_records import conversation_messages, pair_messages

        if holds_pair(record):
            chosen, rejected, _place = pair_messages(record)
            return [*chosen, *rejected]
        return conversation_messages(record) if conversation_field(record) else []

    # --- documents ---

    def __len__(self) -> int:
        return len(self.documents)

    def keep_within(
        self, what: str, are_longer: str = "are longer", lengths: np.ndarray | None = None
    ) -> None:
        """Serve documents of at most `seq_length` tokens, by `lengths` (None: `lines.notes`); the
        others are counted. `UserError`: none.
        """
        lengths, limit = self.lines.notes if lengths is None else lengths, self.seq_length
        self.documents = np.flatnonzero(lengths <= limit)
        if not len(self.documents):
            raise UserError(
                f"{self.name} data: all {len(lengths)} {what} {are_longer} than "
                f"seq_length={limit} tokens; the longest has {lengths.max()}. Shorten the texts "
                "or raise model.data.seq_length (model.encoder_seq_length)."
            )
        left_out = len(lengths) - len(self.documents)
        if left_out:
            logging.warning(
                f"{self.name} data: {left_out} of {len(lengths)} {what} are left out: they "
                f"{are_longer} than seq_length={limit} (the longest has {lengths.max()})."
            )

    def select(self, documents: np.ndarray) -> Self:
        """Return the same dataset with only `documents`, without reading the files again."""
        other = copy.copy(self)
        other.documents = documents
        return other


NEMO_ALIGNER_ARGUMENTS = tuple(
    "cfg tokenizer name data_prefix documents data seq_length seed drop_last".split()
)
Dataset = TypeVar("Dataset", bound=type)


def accepts_nemo_aligner_call(cls: Dataset) -> Dataset:
    """Decorator of a `FileDataset`: it accepts NeMo-Aligner's arguments too, of which `documents`,
    `data_prefix`, `seed` and `drop_last` decide nothing.
    """
    own_init = cls.__init__  # type: ignore[misc]

    @functools.wraps(own_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Ours start with the paths of files, NeMo-Aligner's with the section `model`.
        if not ("documents" in kwargs or args and isinstance(args[0], Mapping | DictConfig)):
            own_init(self, *args, **kwargs)
            return
        given = {**dict(zip(NEMO_ALIGNER_ARGUMENTS, args, strict=False)), **kwargs}
        own_init(
            self,
            paths=[GivenRecords(given["data"], given["name"])],
            tokenizer=given["tokenizer"],
            name=given["name"],
            data_cfg=given["cfg"].get("data"),
            **self.arguments(given["cfg"], given["seq_length"]),
        )

    __init__.also_takes = NEMO_ALIGNER_ARGUMENTS  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@accepts_nemo_aligner_call
class EncodedDataset(FileDataset):
    what: Any  # decides, with `seq_length`, what `_inspect` finds
    expand: Callable[[Record], list[Record]] | None = None  # of `Records`

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
        self.allow_empty_prompt = self.encoder.allow_empty_prompt
        self.tokenizer, self.name, self.pad_id = tokenizer, name, tokenizer.eos_id
        self.seq_length, self.data_cfg = seq_length, data_cfg or {}
        self._prepare(paths)
        depends_on = [*self.encoder.depends_on(), self.what, seq_length]
        self.lines = self.checked_records(paths, depends_on, expand=self.expand)
        self._choose_documents()

    def _prepare(self, paths: Sequence[Any]) -> None:
        """Look at what the files hold, before all records are read."""

    @abstractmethod
    def _choose_documents(self) -> None:
        """Set `documents`, and check what no record says alone."""


def slot(index: int, length: int, width: int) -> dict[str, torch.Tensor]:
    """`loss_mask` float32 [width], 1 up to `length`, all 0 for an empty slot; and more."""
    places = torch.arange(width)
    used = (places < (length if index >= 0 else 0)).float()
    return {"loss_mask": used, "position_ids": places, "idx": torch.tensor(index)}


def sequence_part(
    name: str,
    tokens: torch.Tensor,
    length: torch.Tensor,
    mask: torch.Tensor | None,
    padding: int | None = None,
) -> Part:
    """A sequence that is trained on where its mask is not 0; without one the output at its last
    token is the reward, but for padding at its end.
    """
    is_scored = mask is None
    if mask is None:
        last = lengths_before(padding, tokens[None], length[None]) - 1
        mask = torch.arange(len(tokens)) == last
    size = int(length)
    return Part(name, tokens[:size].tolist(), mask[:size].ne(0).tolist(), is_scored)


def labelled_part(tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Part:
    """An example whose labels are trained on where the mask, of labels, is not 0."""
    return Part("example", [int(tokens[0]), *labels.tolist()], [False, *mask.ne(0).tolist()])


def response_mask(is_response: Sequence[bool], index: int, width: int) -> torch.Tensor:
    """float32 [width]: 1 where the response is, all 0 in an empty slot."""
    return pad([int(x and index >= 0) for x in is_response], width, 0).float()


def pad(tokens: list[int], width: int, pad_id: int) -> torch.Tensor:
    """int64 [width]: `tokens`, then `pad_id`."""
    return torch.tensor(tokens + [pad_id] * (width - len(tokens)), dtype=torch.int64)
