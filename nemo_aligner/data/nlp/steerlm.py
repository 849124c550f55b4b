# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of SteerLM (Dong et al. 2023, arXiv:2310.05344): conversations whose responses have a label
with the values of attributes, "quality:4,toxicity:0,...", in NeMo's chat format (`nemo_chat.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.defaults import complete
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.preference import target_weights
from nemo_aligner.core.tensors import batch_pad_to_fixed_len
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp.builders import blended
from nemo_aligner.data.nlp.chat_records import Message, read_messages
from nemo_aligner.data.nlp.fields import Encoded, Record, check_kind, is_number
from nemo_aligner.data.nlp.file_dataset import Part
from nemo_aligner.data.nlp.nemo_chat import (
    NEMO_TOKENS,
    RESPONDER,
    USER,
    VALUE_TO_TEXT,
    ChatTokens,
    NeMoChat,
    Source,
    Turn,
    header_text,
    source_of_record,
    turn_text,
)
from nemo_aligner.data.nlp.records import data_paths
from nemo_aligner.data.nlp.sft import Examples

# As NeMo-Aligner orders the numbers of a label.
OPEN_ASSISTANT_ATTRIBUTES = ("quality", "toxicity", "humor", "creativity")
HELPSTEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
ALL_STEERLM_ATTRIBUTES = OPEN_ASSISTANT_ATTRIBUTES + HELPSTEER_ATTRIBUTES
# What published SteerLM models were trained with; a part of the format.
SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def scored_turns(record: Record) -> list[tuple[int, str]]:
    """What a regression reward model reads for each response of a conversation (a turn of a
    speaker whom `mask` does not name, but for the first): the number of its turn, and the text up
    to its end with the token that a label follows, of speakers User and Assistant, unlabelled.
    """
    source = source_of_record(record)
    # Null and absent mean the prompt of the published models, "" means none.
    system = record.get("system")
    system = SYSTEM_PROMPT if system is None else source.system
    text = header_text(Source(system, source.turns), NEMO_TOKENS)
    found = []
    for number, turn in enumerate(source.turns):
        responds = turn.speaker not in source.masked
        text += turn_text(Turn(RESPONDER if responds else USER, turn.value), None, NEMO_TOKENS)
        if responds and number:
            found.append((number, text + NEMO_TOKENS.label_start))
    if not found:
        raise UserError(
            "the conversation has no response: all speakers behind the first turn are masked."
        )
    return found


LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q = "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"


class SteerLM2Dataset(Examples):
    """Prompts with attributes and responses to them, lines

        {"system": ..., "prompt_turns": [{"from": "User", "value": ...}, ...], "label": attributes,
         "responses": [{"from": "Assistant", "value": ..., "log(P(a|x,y))": number,
                        "log(P(y|x))": number, "log(Q(y|a,x))": number}, ...]}

    in NeMo's chat format, the label before each response. A prompt with a response of more than
    `max_seq_length` + 1 tokens is left out. `special_tokens`: `model.data.chat_prompt_tokens`
    (None: NeMo's); `options`: `columns` and `index_mapping_dir`, where there is no `data_cfg`.

    Items: `responses`, a list of `Encoded`; `ws` and `log(Q(y|a,x))`, float64 arrays; `idx`.
    """

    def __init__(
        self,
        file_path: Any,
        tokenizer: Tokenizer,
        max_seq_length: int,
        special_tokens: Mapping[str, str] | None = None,
        pad_to_max_length: bool = False,
        name: str = "train",
        data_cfg: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        data_cfg = options if data_cfg is None else data_cfg
        super().__init__(
            tokenizer, max_seq_length, data_cfg, pad_to_max_length=pad_to_max_length, name=name
        )
        self.marks = NEMO_TOKENS if special_tokens is None else ChatTokens.of(special_tokens)
        self.form = NeMoChat(tokenizer, self.marks)
        paths = [file_path] if isinstance(file_path, str) else file_path
        self.lines = self.checked_records(paths, [self.form.state, "SteerLM 2"])
        self.seq_length = max_seq_length
        self.keep_within("prompts", "have a response that is longer", self.lines.notes - 1)
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
        system, speaker = record.get("system") or "", responses[0]["role"]
        others = tuple(dict.fromkeys(t.speaker for t in turns if t.speaker != speaker))
        opening = turn_text(Turn(speaker, "", label), VALUE_TO_TEXT, self.marks)
        text = self._prompt_text(system, turns) + opening.removesuffix(self.marks.end_of_turn)
        prompt = list(self.tokenizer.text_to_ids(text))
        start, found = len(prompt), []
        for response in responses:
            last = Turn(speaker, response["content"], label)
            source = Source(system, (*turns, last), others, VALUE_TO_TEXT)
            tokens, _is_response = self.form.encode(source)
            # Not by the mask of the chat format: a tokenizer may join `end_of_name` behind the
            # label with a newline that the response begins with.
            if list(tokens[:start]) != prompt:
                raise UserError(
                    f"the tokenizer joins the end of the prompt with the start of the response "
                    f"{response['content'][:40]!r}. Leave the response out."
                )
            found.append(Encoded(tokens, [place >= start for place in range(len(tokens))]))
        return found

    def get_prompt(self, system_turn: str, prompt_turns: Sequence[Mapping[str, str]]) -> str:
        """The text of a prompt, up to where the responding turn begins."""
        turns = [Turn(turn["from"], turn["value"]) for turn in prompt_turns]
        return self._prompt_text(system_turn, turns)

    def _prompt_text(self, system: str, turns: Iterable[Turn]) -> str:
        head = header_text(Source(system, ()), self.marks)
        return head + "".join(turn_text(turn, None, self.marks) for turn in turns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.lines[int(self.documents[max(index, 0)])]
        responses = self._encoded(record)
        log_p_attributes, log_p_response, log_q = _log_probs(record)
        if index < 0:  # an empty slot: no response counts
            responses = [Encoded(r.tokens, [False] * len(r.tokens)) for r in responses]
        return {
            "responses": responses,
            "ws": target_weights(log_p_attributes, log_p_response, log_q),
            LOG_Q: log_q,
            "idx": index,
        }

    def by_length(self, notes: np.ndarray) -> list[tuple[str, np.ndarray, bool]]:
        text = f"with a response longer than {self._key} behind its prompt: left out"
        return [(text, notes > self.max_seq_length + 1, True)]

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        return tuple(
            Part("response", list(r.tokens), list(r.is_response)) for r in item["responses"]
        )

    def note(self, item: dict[str, Any]) -> str:
        return "weights " + ", ".join(f"{weight:.3g}" for weight in item["ws"].tolist())

    def messages(self, record: Record) -> list[Message]:
        others = [{"content": record.get(name) or ""} for name in ("system", "label")]
        return _said(record, "prompt_turns") + _said(record, "responses") + others

    def collate_fn(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate B items to width S; n is `num_responses`: `tokens`, `labels` int64, `loss_mask`
        float32 and `position_ids` `[B, n, S]`; `ws` and `log(Q(y|a,x))` float64 `[B, n]`. Of a
        response that is missing no label counts.
        """
        n = self.num_responses
        missing = Encoded([self.tokenizer.eos_id] * 2, [False] * 2)
        rows = [(item["responses"] + [missing] * n)[:n] for item in batch]
        examples = super().collate_fn(
            [{"tokens": each.tokens, "trained": each.is_response} for row in rows for each in row]
        )
        collated = {key: value.unflatten(0, (len(batch), n)) for key, value in examples.items()}
        for key in ("ws", LOG_Q):
            collated[key] = batch_pad_to_fixed_len([item[key] for item in batch], n, 0)
        return collated


def _fields(record: Record) -> tuple[tuple[Turn, ...], str | None, list[Message]]:
    """(turns of the prompt, label, responses) of a record."""
    said, responses = (_said(record, field) for field in ("prompt_turns", "responses"))
    label, system = record.get("label"), record.get("system")
    for field, value in (("label", label), ("system", system)):
        if value is not None:
            check_kind(value, str, f"field '{field}'")
    turns = tuple(Turn(turn["role"], turn["content"]) for turn in said)
    speakers = {response["role"] for response in responses}
    if len(speakers) > 1 or turns[-1].speaker in speakers:
        raise UserError(
            f"the responses are of {', '.join(sorted(speakers))} to a turn of "
            f"{turns[-1].speaker}: one speaker responds to another one."
        )
    return turns, label, responses


def _said(record: Record, field: str) -> list[Message]:
    return read_messages(record.get(field), field, as_named=True)


def _log_probs(record: Record) -> tuple[Tensor, ...]:
    """float64 [n] each: log P(a|x,y), log P(y|x) and log Q'(y|a,x) of the responses."""
    found = []
    for key in (LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q):
        for number, response in enumerate(record["responses"], start=1):
            if not is_number(response.get(key)):
                raise UserError(
                    f"'{key}' of response {number} is {response.get(key)!r}: it must be a finite "
                    "number, the log-probability."
                )
        numbers = [response[key] for response in record["responses"]]
        found.append(torch.tensor(numbers, dtype=torch.float64))
    return tuple(found)


def build_steerlm2_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> SteerLM2Dataset:
    """Build the dataset of a section of SteerLM 2.0; arguments as for `build_sft_dataset`."""
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    length, is_padded = data_cfg.max_seq_length, bool(data_cfg.get("pad_to_max_length"))
    dataset = SteerLM2Dataset(
        paths, tokenizer, length, special_tokens, is_padded, data_cfg=data_cfg
    )
    return blended(dataset, weights, num_samples)
