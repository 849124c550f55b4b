# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples for supervised fine-tuning: prompts with responses, conversations, and several of
either in one sequence (`packed_sequence: True`), which saves the padding.
"""

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.inert_keys import check_later
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tensors import batch_pad_to_fixed_len
from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos
from nemo_aligner.data.nlp.builders import blended
from nemo_aligner.data.nlp.chat_records import (
    ConversationForm,
    conversation_messages,
    each_turn,
    speaks_to_assistant,
)
from nemo_aligner.data.nlp.fields import BESIDE, CONVERSATIONS, Encoded, Record
from nemo_aligner.data.nlp.file_dataset import FileDataset, Part, pad, response_mask
from nemo_aligner.data.nlp.record_encoder import (
    EXTRA_TOKENS,
    begins_with_conversation,
    chat_form,
    say_default,
)
from nemo_aligner.data.nlp.records import data_paths

WHOLE, CUT, NO_RESPONSE_LEFT = 0, 1, 2  # notes of the records


class Examples(FileDataset):
    """Examples for supervised fine-tuning.

    Args:
        max_seq_length: widest batch, in tokens.
        data_cfg: the section of the data: `columns`, `index_mapping_dir`.
        pad_to_max_length: pad each batch to `max_seq_length`, not to its longest example.

    Items: `tokens` list of ids, `trained` list of bools (True: trained on), `idx`.
    """

    what: str  # for messages, as the next two
    cut: str
    none_left: tuple[str, str]
    # Of a record: its tokens, and which of them are of a response.
    tokens_of: Callable[[Record], Encoded]

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        answer_only_loss: bool = True,
        pad_to_max_length: bool = False,
        name: str = "train",
        allow_empty_prompt: bool = False,
    ) -> None:
        self.tokenizer, self.data_cfg, self.name = tokenizer, data_cfg or {}, name
        self.max_seq_length, self.pad_to_max_length = max_seq_length, pad_to_max_length
        self.answer_only_loss, self.allow_empty_prompt = answer_only_loss, allow_empty_prompt

    def _choose_documents(self) -> None:
        """Serve all; warn of examples that are cut, raise if none keeps its response."""
        lines = self.lines
        self.documents = np.arange(len(lines))
        self.check_prompts()
        cut, without_response = lines.notes > WHOLE, lines.notes == NO_RESPONSE_LEFT
        limit = f"max_seq_length={self.max_seq_length} tokens"
        if without_response.all():
            raise UserError(
                f"{self.name} data: in all {len(lines)} {self.what} {self.none_left[0]} {limit}, "
                f"so nothing of a response is left to train on. {self.none_left[1]}."
            )
        if cut.any():
            logging.warning(
                f"{self.name} data: {cut.sum()} of {len(lines)} {self.what} are longer than "
                f"{limit}, and {self.cut}; {without_response.sum()} of them keep nothing of a "
                "response."
            )

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)]: tokens of each item; of texts with `keep_lengths`."""
        return self.lines.numbers[self.documents].astype(np.int64)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, trained = self.tokens_of(self.lines[self.documents[max(index, 0)]])
        if index < 0:
            trained = [False] * len(tokens)  # an empty slot: no token is trained on
        elif not self.answer_only_loss:
            trained = [True] * len(tokens)
        return {"tokens": tokens, "trained": trained, "idx": index}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate B items to width S, their longest length rounded up to 16: `tokens`, `labels`
        int64 [B, S], padded with eos (labels: the token that follows); `loss_mask` float32 [B, S],
        1.0 where the label counts; `position_ids` [B, S].
        """
        width = self.max_seq_length
        if not self.pad_to_max_length:
            longest = max(len(item["tokens"]) for item in items)
            width = min(-(-longest // 16) * 16, width)
        eos_id = self.tokenizer.eos_id
        tokens = torch.stack([pad(item["tokens"], width + 1, eos_id) for item in items])
        # A column of the loss mask belongs to the prediction of the next token.
        mask = torch.stack([response_mask(item["trained"], 0, width + 1) for item in items])
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask[:, 1:].contiguous(),
            "position_ids": torch.arange(width).expand(len(items), width).contiguous(),
        }

    # --- for people ---

    def limit(self) -> str:
        return f"an example may have {self._key}"

    def by_length(self, notes: np.ndarray) -> list[tuple[str, np.ndarray, bool]]:
        nothing = "with nothing left of a response: no token is trained on"
        return [
            (f"longer than {self._key}: {self.cut}", notes == CUT, False),
            (f"longer than {self._key}, {nothing}", notes == NO_RESPONSE_LEFT, False),
        ]

    @property
    def _key(self) -> str:
        return f"model.data.train_ds.max_seq_length={self.max_seq_length} tokens"

    def parts(self, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
        return (Part("example", item["tokens"], [False, *item["trained"][1:]]),)


class SFTDataset(Examples):
    """Prompt-response examples: records with the fields that `prompt_template` names.

    The template ends with the response. It is cut at its fields and each piece is tokenized by
    itself, so the response's tokens do not depend on the prompt. One space before a field belongs
    to the field ("{input} {output}": the response starts with a space, and the prompt is tokenized
    exactly as in PPO), unless the tokenizer itself puts spaces between pieces.

    An example longer than `max_seq_length` first loses tokens of the fields named by
    `truncation_field`, on the side `truncation_method`, then the end of the response.

    Args:
        add_bos: begin each example with bos; None: as the tokenizer itself does it.
        keep_lengths: count the tokens of every example at start, for `lengths`.
    """

    what, cut = "examples", "they are cut off"
    none_left = ("the prompt alone fills", "Raise it, or truncate more (truncation_field)")

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
        keep_lengths: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, max_seq_length, **options)
        if not prompt_template.endswith("{" + label_key + "}"):
            raise ConfigError(
                f"prompt_template={prompt_template!r} must end with the response, "
                f"{{{label_key}}} (label_key={label_key})."
            )
        if truncation_method not in ("left", "right"):
            raise ConfigError(
                f"truncation_method={truncation_method!r}: must be 'left' or 'right'."
            )
        spaces = getattr(tokenizer, "space_sensitive", True)
        self.template = _split_template(prompt_template, spaces)
        fields = dict.fromkeys(field for _text, field in self.template if field)
        self.read_fields = list(fields)
        self.prompt_fields = [field for field in fields if field != label_key]
        self.prompt_field = next(iter(self.prompt_fields), None)
        named = map(str.strip, (truncation_field or "").split(","))
        self.truncation_fields = [field for field in named if field]
        for field in self.truncation_fields:
            if field not in fields:
                raise ConfigError(
                    f"truncation_field={field!r} is not a field of "
                    f"prompt_template={prompt_template!r}."
                )
        self.truncation_method = truncation_method
        self.add_bos = begins_with_bos(tokenizer, add_bos)
        self.add_eos = add_eos
        self.keep_lengths = keep_lengths
        depends_on = [
            ["sft", prompt_template, spaces],
            [self.truncation_fields, truncation_method, max_seq_length],
            [self.add_bos, add_eos, keep_lengths],
        ]
        self.lines = self.checked_records(paths, depends_on, *fields, allow_blank=True)
        self._choose_documents()

    def begins(self, record: Record) -> bool:
        return self.add_bos

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        """What is left, with `keep_lengths` how many tokens, and whether the prompt is empty."""
        said = not self.prompt_fields or any(record[field].strip() for field in self.prompt_fields)
        text = "".join(self._texts(record))
        longest = len(text) + EXTRA_TOKENS * len(self.template)
        if text.isascii() and longest <= self.max_seq_length and not self.keep_lengths:
            return WHOLE, 0.0, not said
        tokens, response_start, is_truncated = self._encode(record)
        kept = NO_RESPONSE_LEFT if response_start >= len(tokens) else int(is_truncated)
        return kept, len(tokens), not said

    def _texts(self, record: Record) -> list[str]:
        return [text + (record[field] if field else "") for text, field in self.template]

    def _encode(self, record: Record) -> tuple[list[int], int, bool]:
        """(tokens, position of the first token of the response, True if truncated)."""
        pieces = [self.tokenizer.text_to_ids(text) for text in self._texts(record)]
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

    def tokens_of(self, record: Record) -> Encoded:
        tokens, start, _is_truncated = self._encode(record)
        return Encoded(tokens, [place >= start for place in range(len(tokens))])


class SFTChatDataset(Examples):
    """Conversations, lines `{"messages": [...]}` or `{"conversations": [...]}`: the assistant's
    turns are trained on, with the tokens that end them. One of more than `max_seq_length` + 1
    tokens is cut at its end (the last token is predicted, but not read).

    `one_turn_per_sample`: make a sample of each of the assistant's turns (`each_turn`).
    """

    read_fields = (*CONVERSATIONS, *BESIDE)
    what, cut = "conversations", "their ends are cut off"
    none_left = ("the first response begins beyond", "Raise max_seq_length")

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        form: ConversationForm,
        max_seq_length: int,
        one_turn_per_sample: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, max_seq_length, **options)
        if one_turn_per_sample and not self.answer_only_loss:
            raise ConfigError(
                "model.data.one_turn_per_sample=True trains on one turn of each sample, and "
                "model.answer_only_loss=False on everything; set one of them otherwise."
            )
        self.form = form
        how = [max_seq_length, self.answer_only_loss, one_turn_per_sample]
        expand = each_turn if one_turn_per_sample else None
        self.lines = self.checked_records(paths, [form.state, how], expand=expand)
        self._choose_documents()

    def begins(self, record: Record) -> bool:
        return True

    def _inspect(self, record: Record) -> tuple[int, float, int]:
        tokens, is_response = self.form.conversation(record)
        weights = [] if self.answer_only_loss else conversation_messages(record)
        if any(message.get("weight") == 0 for message in weights):
            raise UserError(
                "a message has 'weight' 0, but model.answer_only_loss=False trains on "
                "everything: set it to True, or remove the weights."
            )
        limit, is_empty = self.max_seq_length + 1, not speaks_to_assistant(record)
        if len(tokens) <= limit:
            return WHOLE, len(tokens), is_empty
        return CUT if any(is_response[:limit]) else NO_RESPONSE_LEFT, limit, is_empty

    def tokens_of(self, record: Record) -> Encoded:
        tokens, is_response = self.form.conversation(record)
        limit = self.max_seq_length + 1
        return Encoded(tokens[:limit], is_response[:limit])


def _split_template(template: str, space_sensitive: bool) -> list[tuple[str, str | None]]:
    """Cut a template into pieces (text, field or None), each with text before its field."""
    pieces: list[tuple[str, str | None]] = []
    parts = re.split(r"\{(\w+)\}", template)  # texts and fields in turn
    for text, field in zip(parts[::2], parts[1::2], strict=False):
        literal = text.removesuffix(" ")
        space = text[len(literal) :]
        if not space_sensitive:
            space, literal = "", literal.removeprefix(" ")
        if literal:
            pieces.append((literal, None))
        pieces.append((space, field))
    return pieces


def response_span(item: Mapping[str, Any]) -> tuple[int, int]:
    """Where the last part of an item that is trained on begins and ends; of none, at its end."""
    trained = bytes(item["trained"])
    end = trained.rfind(True) + 1  # behind it a turn may begin whose end was cut off
    return (trained.rfind(False, 0, end) + 1, end) if end else (len(trained), len(trained))


# --- packed sequences: positions restart at each example and none attends to another, so that
# loss and gradient are those of the single examples ---

Batch = dict[str, torch.Tensor]


def pack(slots: Sequence[int], size: int) -> list[list[int]]:
    """Divide items of 1 to `size` slots, in order, into packs of at most `size` slots, each into
    the (first) one that it fills best. Returns the numbers of the items of each pack.
    """
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room, number) of each, sorted
    smallest = min(slots, default=0)
    for number, needed in enumerate(slots):
        place = bisect.bisect_left(open_packs, (needed, 0))
        if place == len(open_packs):
            room, chosen = size, len(packs)
            packs.append([])
        else:
            room, chosen = open_packs.pop(place)
        packs[chosen].append(number)
        if room - needed >= smallest:
            bisect.insort(open_packs, (room - needed, chosen))
    return packs


class PackedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Packs of the items of `dataset`, examples with known lengths. One of n tokens takes n - 1
    slots, because its last token is only ever a label.

    Items: `examples` (items of `dataset`) and `is_empty`, True for index -1, an empty slot: the
    first pack without weight in the loss. `collate_fn` makes batches.
    """

    def __init__(self, dataset: Examples) -> None:
        self.dataset = dataset
        self.size = dataset.max_seq_length
        slots = np.maximum(dataset.lengths - 1, 1)
        self.packs = pack(slots.tolist(), self.size)
        logging.info(
            f"{dataset.name} data: {len(slots)} examples in {len(self.packs)} packed sequences, "
            f"{100 * slots.sum() / (len(self.packs) * self.size):.1f} % full."
        )

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        examples = [self.dataset[number] for number in self.packs[max(index, 0)]]
        return {"examples": examples, "is_empty": index < 0}

    def collate_fn(self, items: list[dict[str, Any]]) -> Batch:
        """Collate packs as `Examples` does examples, with `packed_position_ids` int64
        [B, S] in place of `position_ids`: 0 where an example begins, and where the padding does.
        """
        rows = [self._row(item) for item in items]
        longest = max(len(row["tokens"]) for row in rows)
        is_padded = self.dataset.pad_to_max_length
        width = self.size if is_padded else min(-(-longest // 16) * 16, self.size)
        batch = {
            key: batch_pad_to_fixed_len([row[key] for row in rows], width, 0) for key in rows[0]
        }
        for row, positions in zip(rows, batch["packed_position_ids"], strict=True):
            used = len(row["tokens"])
            positions[used:] = torch.arange(width - used)
        return batch

    def _row(self, item: dict[str, Any]) -> Batch:
        """The examples of a pack one behind the other, without padding."""
        parts: list[tuple[torch.Tensor, ...]] = []
        for example in item["examples"]:
            missing = max(2 - len(example["tokens"]), 0)  # the label of a single token
            tokens = torch.tensor(example["tokens"] + [self.dataset.tokenizer.eos_id] * missing)
            counts = torch.tensor(example["trained"] + [False] * missing).float()
            parts.append((tokens[:-1], tokens[1:], counts[1:], torch.arange(len(tokens) - 1)))
        names = ("tokens", "labels", "loss_mask", "packed_position_ids")
        row = dict(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))
        row["loss_mask"] *= not item["is_empty"]
        return row


CHAT_KEYS = frozenset(
    "chat_template chat_template_kwargs one_turn_per_sample chat_date allow_empty_prompt".split()
)


def build_sft_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    answer_only_loss: bool = True,
    is_chat: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    model_cfg: DictConfig | None = None,
    data: Mapping[str, Any] | None = None,
    **more: Any,
) -> SFTDataset | SFTChatDataset | PackedDataset:
    """Build the dataset of `model.data.train_ds` or `validation_ds`: prompts with their responses,
    or conversations. `ConfigError`: no files, or something that is not supported.

    Args:
        data_cfg: `file_path` (one, a list, or weights and files in turn: a blend),
            `max_seq_length`, and optionally the other keys of that section.
        num_samples: use at most so many samples; None or below 1 means all.
        data: the section `model.data`; without it `is_chat` is its key `chat`, `special_tokens`
            is `chat_prompt_tokens` (None: NeMo's), and `more` are others of `CHAT_KEYS`.
        model_cfg: not used (NeMo-Aligner's signature).
    """
    if unknown := sorted(more.keys() - CHAT_KEYS):
        raise TypeError(f"build_sft_dataset() got an unexpected argument {unknown[0]!r}")
    section = {key: data_cfg.get(key) for key in data_cfg}
    check_later(Values({"model": {"data": {"train_ds": section}}}), "gpt_sft")
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    if data is None:
        data = {"chat": is_chat, "chat_prompt_tokens": special_tokens, **more}
    form = chat_form(data, tokenizer)
    if form is not None and form.default:
        if begins_with_conversation(paths[0], data_cfg):
            say_default(form.default)
        else:
            form = None
    options: dict[str, Any] = {
        "max_seq_length": data_cfg.max_seq_length,
        "answer_only_loss": answer_only_loss,
        "pad_to_max_length": bool(data_cfg.get("pad_to_max_length")),
        "data_cfg": data_cfg,
        "allow_empty_prompt": bool(data.get("allow_empty_prompt")),
    }
    if form is not None:
        options["one_turn_per_sample"] = bool(data.get("one_turn_per_sample"))
        dataset: Any = SFTChatDataset(paths, tokenizer, form, **options)
    else:
        names = "prompt_template label_key truncation_field truncation_method add_bos add_eos"
        options |= {name: data_cfg[name] for name in names.split()}
        keep_lengths = bool(data_cfg.packed_sequence)
        dataset = SFTDataset(paths, tokenizer, keep_lengths=keep_lengths, **options)
    dataset = blended(dataset, weights, num_samples)
    return PackedDataset(dataset) if data_cfg.packed_sequence else dataset
