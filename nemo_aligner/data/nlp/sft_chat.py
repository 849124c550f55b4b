# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations for supervised fine-tuning."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import Encoded
from nemo_aligner.data.nlp.chat_records import (
    BESIDE,
    CONVERSATIONS,
    conversation_messages,
    each_turn,
    speaks_to_assistant,
)
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.records import Records, settings_of
from nemo_aligner.data.nlp.sft_examples import collate_examples

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
