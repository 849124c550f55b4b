# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with attributes and several responses to each: SteerLM 2.0 (`core/preference.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.preference import target_weights
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.chat_masks import Encoded
from nemo_aligner.data.nlp.file_dataset import FileDataset, documents_within
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.nemo_chat import (
    NEMO_TOKENS,
    VALUE_TO_TEXT,
    ChatTokens,
    NeMoChat,
    Source,
    Turn,
    header_text,
    turn_text,
)
from nemo_aligner.data.nlp.records import Records, settings_of
from nemo_aligner.data.nlp.sft_examples import collate_examples

# Fields of a response, as NeMo-Aligner names them.
LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q = "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"


class SteerLM2Dataset(FileDataset):
    """Prompts with attributes and responses to them, lines

        {"system": ..., "prompt_turns": [{"from": "User", "value": ...}, ...], "label": attributes,
         "responses": [{"from": "Assistant", "value": ..., "log(P(a|x,y))": number,
                        "log(P(y|x))": number, "log(Q(y|a,x))": number}, ...]}

    in NeMo's chat format, the label before each response as in attribute-conditioned fine-tuning.
    A prompt with a response of more than `max_seq_length` + 1 tokens is left out: the numbers of
    a response belong to the whole of it. Prompts may have different numbers of responses.

    Args:
        max_seq_length: widest batch, in tokens.
        special_tokens: `model.data.chat_prompt_tokens`; None: those of NeMo.
        pad_to_max_length: pad each batch to `max_seq_length`, not to its longest example.
        columns, index_mapping_dir: of the data section; see `Records`.
        options: others of NeMo's data set of texts, which have no effect on this form.

    Items: `responses`, a list of `Encoded`; `ws` and `log(Q(y|a,x))`, float64 arrays; `idx`.
    `collate_fn` makes batches of them.
    """

    def __init__(
        self,
        file_path: Any,
        tokenizer: Tokenizer,
        max_seq_length: int,
        special_tokens: Mapping[str, str] | None = None,
        pad_to_max_length: bool = False,
        name: str = "train",
        columns: Mapping[str, Any] | None = None,
        index_mapping_dir: str | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.marks = NEMO_TOKENS if special_tokens is None else ChatTokens.of(special_tokens)
        self.form = NeMoChat(tokenizer, self.marks)
        self.pad_to_max_length = pad_to_max_length
        self.lines = Records(
            [file_path] if isinstance(file_path, str) else file_path,
            [],
            self._inspect,
            columns=columns,
            index_dir=index_mapping_dir,
            settings=partial(settings_of, tokenizer, self.form.state, "SteerLM 2"),
        )
        self.documents = documents_within(
            self.lines.notes - 1, max_seq_length, name, "prompts", "have a response that is longer"
        )
        # The same for every batch, so that all ranks have as many rows.
        self.num_responses = int(self.lines.numbers[self.documents].max())

    def _inspect(self, record: Record) -> tuple[int, float]:
        """Tokens of the longest response with its prompt, and the number of responses."""
        responses = self._encoded(record)
        _log_probs(record)
        return max(len(response.tokens) for response in responses), len(responses)

    def _encoded(self, record: Record) -> list[Encoded]:
        """Each response behind its prompt, with the mask of that last turn alone."""
        turns, label, responses = _fields(record)
        speaker = responses[0]["from"]
        others = tuple(dict.fromkeys(t.speaker for t in turns if t.speaker != speaker))
        found = []
        for response in responses:
            last = Turn(speaker, response["value"], label)
            source = Source(record.get("system") or "", (*turns, last), others, VALUE_TO_TEXT)
            tokens, _is_response = self.form.encode(source)
            # Not by the mask of the chat format, which looks for the token of `end_of_name` behind
            # the label: a tokenizer may join that with a newline that the response begins with.
            opening = turn_text(Turn(speaker, "", label), VALUE_TO_TEXT, self.marks)
            opening = opening.removesuffix(self.marks.end_of_turn)
            prompt = self.tokenizer.text_to_ids(self._prompt_text(source, turns) + opening)
            start = len(prompt)
            if list(tokens[:start]) != list(prompt):
                raise UserError(
                    f"the tokenizer joins the end of the prompt with the start of the response "
                    f"{response['value'][:40]!r}. Leave the response out."
                )
            found.append(Encoded(tokens, [place >= start for place in range(len(tokens))]))
        return found

    def get_prompt(self, system_turn: str, prompt_turns: Sequence[Mapping[str, str]]) -> str:
        """The text of a prompt, up to where the responding turn begins."""
        turns = [Turn(turn["from"], turn["value"]) for turn in prompt_turns]
        return self._prompt_text(Source(system_turn, ()), turns)

    def _prompt_text(self, source: Source, turns: Iterable[Turn]) -> str:
        head = header_text(source, self.marks)
        return head + "".join(turn_text(turn, None, self.marks) for turn in turns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.lines[int(self.documents[max(index, 0)])]
        responses = self._encoded(record)
        log_p_attributes, log_p_response, log_q = _log_probs(record)
        if index < 0:  # an empty slot: no response counts
            responses = [Encoded(r.tokens, [False] * len(r.tokens)) for r in responses]
        return {
            "responses": responses,
            "ws": target_weights(
                *map(torch.from_numpy, (log_p_attributes, log_p_response, log_q))
            ),
            LOG_Q: torch.from_numpy(log_q),
            "idx": index,
        }

    def collate_fn(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate B items to a batch of width S; n is `num_responses`.

        Returns:
            `tokens`, `labels` int64, `loss_mask` float32 and `position_ids` `[B, n, S]`, as
            `SFTDataset.collate_fn` makes them; `ws` and `log(Q(y|a,x))` float32 and float64
            `[B, n]`. A response that is missing has no label that counts.
        """
        missing = Encoded([self.tokenizer.eos_id] * 2, [False] * 2)
        rows = [
            response
            for item in batch
            for response in item["responses"]
            + [missing] * (self.num_responses - len(item["responses"]))
        ]
        examples = collate_examples(
            [row.tokens for row in rows],
            [row.is_response for row in rows],
            self.max_seq_length,
            self.tokenizer.eos_id,
            self.pad_to_max_length,
        )
        shape = (len(batch), self.num_responses)
        collated = {key: value.unflatten(0, shape) for key, value in examples.items()}
        for key in ("ws", LOG_Q):
            padded = torch.zeros(shape, dtype=torch.float64)
            for row, item in zip(padded, batch, strict=True):
                row[: len(item[key])] = item[key]
            collated[key] = padded
        return collated


def _fields(record: Record) -> tuple[tuple[Turn, ...], str | None, list[Any]]:
    """(turns of the prompt, label, responses) of a record."""
    for field in ("prompt_turns", "responses"):
        value = record.get(field)
        if not isinstance(value, list) or not value:
            raise UserError(
                f"field '{field}' must be a list that is not empty; the line has {sorted(record)}."
            )
        for number, turn in enumerate(value, start=1):
            texts = (turn.get(key) for key in ("from", "value")) if isinstance(turn, dict) else ()
            if [type(text) for text in texts] != [str, str]:
                raise UserError(
                    f"turn {number} of field '{field}' needs texts 'from' and 'value'."
                )
    label, system = record.get("label"), record.get("system")
    for field, value in (("label", label), ("system", system)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"field '{field}' must be text, not {type(value).__name__}.")
    turns = tuple(Turn(turn["from"], turn["value"]) for turn in record["prompt_turns"])
    speakers = {response["from"] for response in record["responses"]}
    if len(speakers) > 1 or turns[-1].speaker in speakers:
        raise UserError(
            f"the responses are of {', '.join(sorted(speakers))} to a turn of "
            f"{turns[-1].speaker}: one speaker responds to another one."
        )
    return turns, label, record["responses"]


def _log_probs(record: Record) -> tuple[np.ndarray, ...]:
    """float64 [n] each: log P(a|x,y), log P(y|x) and log Q'(y|a,x) of the responses."""
    found = []
    for key in (LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q):
        for number, response in enumerate(record["responses"], start=1):
            value = response.get(key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not abs(value) < 1e9:  # neither NaN nor infinite
                raise UserError(
                    f"'{key}' of response {number} is {value!r}: it must be a finite number, the "
                    "log-probability."
                )
        found.append(np.array([response[key] for response in record["responses"]], np.float64))
    return tuple(found)
