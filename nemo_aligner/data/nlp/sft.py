# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples for supervised fine-tuning, prompts with responses and conversations; and for SPIN the
prompts of such examples.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos
from nemo_aligner.core.types import SelfPlayPrompts
from nemo_aligner.data.nlp.chat_records import (
    BESIDE,
    CONVERSATIONS,
    conversation_messages,
    each_turn,
    speaks_to_assistant,
)
from nemo_aligner.data.nlp.conversation_form import ConversationForm, Encoded
from nemo_aligner.data.nlp.file_dataset import FileDataset, pad
from nemo_aligner.data.nlp.record_encoder import EXTRA_TOKENS
from nemo_aligner.data.nlp.records import Records, settings_of
from nemo_aligner.data.nlp.sources import Record


class SFTDataset(FileDataset):
    """Prompt-response examples: records with the fields that `prompt_template` names.

    The template ends with the response. It is cut at its fields and each piece is tokenized by
    itself, so the response's tokens do not depend on the prompt. One space before a field belongs
    to the field ("{input} {output}": the response starts with a space, and the prompt is tokenized
    exactly as in PPO), unless the tokenizer itself puts spaces between pieces.

    An example longer than `max_seq_length` first loses tokens of the fields named by
    `truncation_field` (comma-separated, in order), on the side `truncation_method`; if that is not
    enough, the end of the response.

    Args:
        max_seq_length: longest example, in tokens.
        prompt_template: text with fields in braces.
        truncation_field: fields to truncate first; None or "" for none.
        truncation_method: "left" or "right".
        add_bos: begin each example with bos; None: as the tokenizer itself does it.
        add_eos: end each example with eos.
        answer_only_loss: train on the response only, not on the prompt.
        pad_to_max_length: pad each batch to `max_seq_length`, not to its longest example.
        columns, index_mapping_dir: of the data section; see `Records`.
        keep_lengths: count the tokens of every example at start, for `lengths`.
        allow_empty_prompt: do not refuse examples whose fields before the response are blank.

    Items: `tokens` list of ids, `answer_start` (position of the first token that is trained on),
    `idx`. `collate_fn` makes batches of them.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        max_seq_length: int,
        prompt_template: str = "{input} {output}",
        label_key: str = "output",
        truncation_field: str | None = "input",
        truncation_method: str = "right",
        add_bos: bool | None = None,
        add_eos: bool = True,
        answer_only_loss: bool = True,
        pad_to_max_length: bool = False,
        name: str = "train",
        columns: Mapping[str, Any] | None = None,
        index_mapping_dir: str | None = None,
        keep_lengths: bool = False,
        allow_empty_prompt: bool = False,
    ) -> None:
        if not prompt_template.endswith("{" + label_key + "}"):
            raise ConfigError(
                f"prompt_template={prompt_template!r} must end with the response, "
                f"{{{label_key}}} (label_key={label_key})."
            )
        if truncation_method not in ("left", "right"):
            raise ConfigError(
                f"truncation_method={truncation_method!r}: must be 'left' or 'right'."
            )
        self.name = name
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.template = _split_template(
            prompt_template, getattr(tokenizer, "space_sensitive", True)
        )
        self.fields = self.read_fields = [
            field for field in dict.fromkeys(field for _text, field in self.template) if field
        ]
        self.label_key = label_key
        self.prompt_fields = [field for field in self.fields if field != label_key]
        self.prompt_field = next(iter(self.prompt_fields), None)
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
        self.add_bos = begins_with_bos(tokenizer, add_bos)
        self.add_eos = add_eos
        self.answer_only_loss = answer_only_loss
        self.pad_to_max_length = pad_to_max_length
        self.keep_lengths = keep_lengths
        self.lines = Records(
            paths,
            self.fields,
            self._inspect,
            allow_blank=True,
            columns=columns,
            index_dir=index_mapping_dir,
            settings=partial(
                settings_of,
                tokenizer,
                ["sft", prompt_template, getattr(tokenizer, "space_sensitive", True)],
                [self.truncation_fields, truncation_method, max_seq_length],
                [self.add_bos, add_eos, keep_lengths],
            ),
        )
        self.check_prompts(allow_empty_prompt, lambda record: self.add_bos)
        self._check_lengths()
        self.documents = np.arange(len(self.lines))

    def _check_lengths(self) -> None:
        """Warn of truncated examples; raise if none keeps anything of its response."""
        truncated, without_response = self.lines.notes > 0, self.lines.notes == 2
        if without_response.all():
            raise UserError(
                f"{self.name} data: in all {len(self.lines)} examples the prompt alone fills "
                f"max_seq_length={self.max_seq_length} tokens, so nothing of the response is left "
                "to train on. Raise max_seq_length or truncate more (truncation_field)."
            )
        if truncated.any():
            logging.warning(
                f"{self.name} data: {truncated.sum()} of {len(self.lines)} examples are longer "
                f"than max_seq_length={self.max_seq_length} tokens and truncated; "
                f"{without_response.sum()} of them keep nothing of the response."
            )

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        """0: fits; 1: is truncated; 2: is truncated and keeps nothing of the response; with
        `keep_lengths` the number of tokens; and whether the prompt is empty.
        """
        said = not self.prompt_fields or any(record[field].strip() for field in self.prompt_fields)
        text = "".join(text + _field(record, field) for text, field in self.template)
        longest = len(text) + EXTRA_TOKENS * len(self.template)
        if text.isascii() and longest <= self.max_seq_length and not self.keep_lengths:
            return 0, 0.0, not said
        tokens, response_start, is_truncated = self._encode(record)
        kept = 2 if response_start >= len(tokens) else int(is_truncated)
        return kept, len(tokens), not said

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)]: tokens of each item; needs `keep_lengths`."""
        if not self.keep_lengths:
            raise ValueError("the dataset was built without keep_lengths")
        return self.lines.numbers[self.documents].astype(np.int64)

    def _encode(self, record: Record) -> tuple[list[int], int, bool]:
        """(tokens, position of the first token of the response, True if truncated)."""
        pieces = [
            self.tokenizer.text_to_ids(text + _field(record, field))
            for text, field in self.template
        ]
        bos: list[Any] = [self.tokenizer.bos_id] if self.add_bos else []
        if sum(pieces, [])[:1] == bos:  # the text begins with it
            bos = []
        eos = [self.tokenizer.eos_id] if self.add_eos else []
        overflow = sum(map(len, pieces)) + len(bos) + len(eos) - self.max_seq_length
        is_truncated, cut_right = overflow > 0, self.truncation_method == "right"
        for name in self.truncation_fields:
            for number, (_text, field) in enumerate(self.template):
                if field == name and overflow > 0:
                    cut = min(overflow, len(pieces[number]))
                    keep = len(pieces[number]) - cut
                    pieces[number] = pieces[number][:keep] if cut_right else pieces[number][cut:]
                    overflow -= cut
        prompt = bos + sum(pieces[:-1], [])
        tokens = prompt + pieces[-1] + eos
        return tokens[: self.max_seq_length], len(prompt), is_truncated

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, answer_start, _is_truncated = self._encode(
            self.lines[self.documents[max(index, 0)]]
        )
        if index < 0:
            answer_start = len(tokens)  # an empty slot: no token is trained on
        elif not self.answer_only_loss:
            answer_start = 0
        return {"tokens": tokens, "answer_start": answer_start, "idx": index}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate items to a batch of width S, their longest length rounded up to 16.

        S is at most `max_seq_length`, and equal to it with `pad_to_max_length`.

        Returns:
            `tokens`, `labels` int64 [B, S], padded with eos (labels: the token that follows);
            `loss_mask` float32 [B, S], 1.0 where the label counts; `position_ids` [B, S].
        """
        return collate_examples(
            [item["tokens"] for item in items],
            [
                [place >= item["answer_start"] for place in range(len(item["tokens"]))]
                for item in items
            ],
            self.max_seq_length,
            self.tokenizer.eos_id,
            self.pad_to_max_length,
        )


def collate_examples(
    examples: Sequence[list[int]],
    trained: Sequence[list[bool]],
    max_seq_length: int,
    pad_id: int,
    pad_to_max_length: bool = False,
) -> dict[str, torch.Tensor]:
    """Collate B examples to a batch of width S, their longest length rounded up to 16.

    Args:
        examples: ids; one more than `max_seq_length` at most, of which the last is a label only.
        trained: True for the tokens that are trained on.
        pad_to_max_length: S is `max_seq_length` in any case.

    Returns:
        See `SFTDataset.collate_fn`.
    """
    longest = max(map(len, examples))
    width = max_seq_length
    if not pad_to_max_length:
        width = min(-(-longest // 16) * 16, max_seq_length)
    tokens = torch.stack([pad(example, width + 1, pad_id) for example in examples])
    # A column of the loss mask belongs to the prediction of the next token.
    mask = torch.zeros(len(examples), width + 1)
    for row, counts in enumerate(trained):
        mask[row, : len(counts)] = torch.tensor(counts, dtype=torch.float32)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask[:, 1:].contiguous(),
        "position_ids": torch.arange(width).expand(len(examples), width).contiguous(),
    }


def _field(record: Record, field: str | None) -> str:
    return "" if field is None else record[field]


def _split_template(template: str, space_sensitive: bool) -> list[tuple[str, str | None]]:
    """Cut a template into pieces (text, field or None), each with text before its field.

    "Q: {input} A: {output}" -> ("Q:", None), (" ", "input"), (" A:", None), (" ", "output").
    For a tokenizer that puts spaces between pieces itself (`space_sensitive=False`) the pieces
    have none at their edges.
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


WHOLE, CUT, NO_RESPONSE_LEFT = 0, 1, 2  # notes of the records


class SFTChatDataset(FileDataset):
    """Conversations, lines `{"messages": [...]}` or `{"conversations": [...]}`, of which the
    assistant's turns are trained on, with the tokens that end them.

    Of a conversation with more than `max_seq_length` + 1 tokens the end is cut off (the last token
    of an example is predicted, but not read).

    Args:
        form: of the conversations.
        max_seq_length: widest batch, in tokens.
        answer_only_loss: train on the assistant's turns only, not on everything.
        pad_to_max_length: pad each batch to `max_seq_length`, not to its longest example.
        columns, index_mapping_dir: of the data section; see `Records`.
        one_turn_per_sample: make a sample of each of the assistant's turns, which ends with it and
            trains on it alone: what is before it stands there as it will in use.
        allow_empty_prompt: do not refuse conversations in which only the assistant says something.

    Items: `tokens` list of ids, `trained` list of bools (True: trained on), `idx`. `collate_fn`
    makes batches of them.
    """

    read_fields = (*CONVERSATIONS, *BESIDE)

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        form: ConversationForm,
        max_seq_length: int,
        answer_only_loss: bool = True,
        pad_to_max_length: bool = False,
        name: str = "train",
        columns: Mapping[str, Any] | None = None,
        index_mapping_dir: str | None = None,
        one_turn_per_sample: bool = False,
        allow_empty_prompt: bool = False,
    ) -> None:
        if one_turn_per_sample and not answer_only_loss:
            raise ConfigError(
                "model.data.one_turn_per_sample=True trains on one turn of each sample, and "
                "model.answer_only_loss=False on everything; set one of them otherwise."
            )
        self.name = name
        self.tokenizer = tokenizer
        self.form = form
        self.max_seq_length = max_seq_length
        self.answer_only_loss = answer_only_loss
        self.pad_to_max_length = pad_to_max_length
        self.lines = Records(
            paths,
            [],
            self._inspect,
            columns=columns,
            index_dir=index_mapping_dir,
            settings=partial(
                settings_of,
                tokenizer,
                form.state,
                [max_seq_length, answer_only_loss, one_turn_per_sample],
            ),
            expand=each_turn if one_turn_per_sample else None,
        )
        self.check_prompts(allow_empty_prompt, lambda record: True)
        self._check_lengths()
        self.documents = np.arange(len(self.lines))

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        """What is left of a conversation, how many tokens, and whether its prompt is empty."""
        tokens, is_response = self.form.conversation(record)
        if not self.answer_only_loss:
            if any(message.get("weight") == 0 for message in conversation_messages(record)):
                raise UserError(
                    "a message has 'weight' 0, but model.answer_only_loss=False trains on "
                    "everything: set it to True, or remove the weights."
                )
        limit, is_empty = self.max_seq_length + 1, not speaks_to_assistant(record)
        if len(tokens) <= limit:
            return WHOLE, len(tokens), is_empty
        return CUT if any(is_response[:limit]) else NO_RESPONSE_LEFT, limit, is_empty

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)]: tokens of each item."""
        return self.lines.numbers[self.documents].astype(np.int64)

    def _check_lengths(self) -> None:
        """Warn of conversations that are cut; raise if none keeps anything of a response."""
        cut, without_response = self.lines.notes > WHOLE, self.lines.notes == NO_RESPONSE_LEFT
        if without_response.all():
            raise UserError(
                f"{self.name} data: in all {len(self.lines)} conversations the first response "
                f"begins beyond max_seq_length={self.max_seq_length} tokens, so nothing is left "
                "to train on. Raise max_seq_length."
            )
        if cut.any():
            logging.warning(
                f"{self.name} data: {cut.sum()} of {len(self.lines)} conversations are longer "
                f"than max_seq_length={self.max_seq_length} tokens, and their ends are cut off; "
                f"{without_response.sum()} of them keep nothing of a response."
            )

    def encoded(self, document: int) -> Encoded:
        """The tokens of a document, and which of them are responses, before anything is cut."""
        return self.form.conversation(self.lines[document])

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, trained = self.encoded(self.documents[max(index, 0)])
        if index < 0:
            trained = [False] * len(tokens)  # an empty slot: no token is trained on
        elif not self.answer_only_loss:
            trained = [True] * len(tokens)
        limit = self.max_seq_length + 1
        return {"tokens": tokens[:limit], "trained": trained[:limit], "idx": index}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate items to a batch; see `SFTDataset.collate_fn`."""
        return collate_examples(
            [item["tokens"] for item in items],
            [item["trained"] for item in items],
            self.max_seq_length,
            self.tokenizer.eos_id,
            self.pad_to_max_length,
        )


def response_span(item: Mapping[str, Any]) -> tuple[int, int]:
    """Where the response of an item of `SFTDataset` or `SFTChatDataset` begins and ends; both are
    the number of its tokens if it has none.
    """
    end = len(item["tokens"])
    if "answer_start" in item:
        return min(item["answer_start"], end), end
    trained = item["trained"]
    while end and not trained[end - 1]:
        end -= 1  # the beginning of a turn whose end was cut off
    start = end
    while start and trained[start - 1]:
        start -= 1
    return (start, end) if end else (len(trained), len(trained))


def collate_prompts(items: Sequence[Mapping[str, Any]], eos_id: int) -> SelfPlayPrompts:
    """A batch of items of `SFTDataset` or `SFTChatDataset`.

    Raises:
        UserError: an example has no prompt that the policy could respond to.
    """
    spans = [response_span(item) for item in items]
    for item, (start, _end) in zip(items, spans, strict=True):
        if not start:
            raise UserError(
                f"example {item['idx']} (index in the data set) has no prompt, so the policy "
                "cannot give a response of its own to it; remove it, or begin each example with a "
                "token (add_bos=True in the data section)."
            )
    width = max(end for _start, end in spans)
    tokens = [
        pad(list(item["tokens"][:end]), width, eos_id)
        for item, (_start, end) in zip(items, spans, strict=True)
    ]
    return {
        "prompts_and_answers": torch.stack(tokens),
        "prompt_lengths": torch.tensor([start for start, _end in spans]),
        "combined_lengths": torch.tensor([end for _start, end in spans]),
        "idx": torch.tensor([item["idx"] for item in items]),
    }
