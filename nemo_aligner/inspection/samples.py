# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of a dataset as tokens with the mask of the loss, and their text in pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_aligner.core.masks import lengths_before
from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, special_ids
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.labelled_responses import KTOModelDataset
from nemo_aligner.data.nlp.labelled_texts import RegressionRewardModelDataset
from nemo_aligner.data.nlp.preference_pairs import DPOModelDataset, RewardModelDataset
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.responses import ResponseDataset
from nemo_aligner.data.nlp.steerlm2 import SteerLM2Dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset
from nemo_aligner.inspection.jobs import InspectedJob


@dataclass(frozen=True)
class Part:
    """One sequence that the model sees."""

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


@dataclass(frozen=True)
class Sample:
    """An item of the dataset."""

    document: int  # number of the document in the files
    place: str  # file and record, for the reader
    parts: tuple[Part, ...]  # what the model sees
    note: str = ""  # more to know, such as the label


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind as text."""

    text: str
    marked: bool
    special: bool


def read_samples(job: InspectedJob, count: int) -> list[Sample]:
    """The first samples that a job serves."""
    return [read_sample(job, index) for index in range(min(count, len(job.dataset)))]


def read_sample(job: InspectedJob, index: int) -> Sample:
    """One item of the dataset, as the job gets it."""
    dataset, padding = job.dataset, job.cfg.get("pad_token_id")
    document = int(dataset.documents[index])
    item = dataset[index]
    return Sample(
        document, place(dataset, document), _parts(dataset, item, padding), _note(dataset, item)
    )


def place(dataset: FileDataset, document: int) -> str:
    """Where a document stands: file and record, counted from 1."""
    first = document * dataset.lines_per_document
    file = max(n for n, start in enumerate(dataset.lines.first_of_file) if start <= first)
    record = dataset.lines.row_of(first, int(dataset.lines.first_of_file[file])) + 1
    last = record + dataset.lines_per_document - 1
    numbers = f"record {record}" if last == record else f"records {record} and {last}"
    return f"{dataset.lines.paths[file]}, {numbers}"


def pieces(tokenizer: Tokenizer, part: Part) -> Iterator[Piece]:
    """The text of a part, cut where the mask changes and around special tokens."""
    special = special_ids(tokenizer)
    kinds = [
        (marked, token in special) for token, marked in zip(part.tokens, part.marked, strict=True)
    ]
    start, before = 0, ""
    for end in range(1, len(part.tokens) + 1):
        if end < len(part.tokens) and kinds[end] == kinds[start]:
            continue
        # What the piece adds to the text before it: alone, some tokenizers drop its first space.
        text = decode_with_special_tokens(tokenizer, part.tokens[:end])
        own = text[len(before) :] if text.startswith(before) else None
        if own is None:
            own = decode_with_special_tokens(tokenizer, part.tokens[start:end])
        yield Piece(own, *kinds[start])
        start, before = end, text


def visible(text: str) -> str:
    """`text` with marks for line ends and control characters."""
    shown = {code: chr(0x2400 + code) for code in range(32) if code != 10} | {10: "⏎\n"}
    return text.translate(shown)


def _parts(dataset: FileDataset, item: dict[str, Any], padding: int | None) -> tuple[Part, ...]:
    if isinstance(dataset, RLHFDataset):
        tokens = item["text"].tolist()
        return (Part("prompt", tokens, [False] * len(tokens)),)
    if isinstance(dataset, DPOModelDataset):
        return tuple(
            _trained(name, item[name], item[f"{name}_mask"], int(item[f"{name}_length"]))
            for name in ("chosen", "rejected")
        )
    if isinstance(dataset, KTOModelDataset):
        name = "chosen" if item["preference"] else "rejected"
        length = int(item["sample_length"])
        return (_trained(name, item["samples"], item["sample_mask"], length),)
    if isinstance(dataset, RewardModelDataset):
        return tuple(
            _scored(name, item[name], item[f"{name}_length"], padding)
            for name in ("chosen", "rejected")
        )
    if isinstance(dataset, RegressionRewardModelDataset):
        return (_scored("text", item["inputs"], item["lengths"], padding),)
    if isinstance(dataset, SteerLM2Dataset):
        return tuple(
            Part("response", list(response.tokens), list(response.is_response))
            for response in item["responses"]
        )
    if isinstance(dataset, ResponseDataset):
        mask = item["loss_mask"].roll(1)  # of labels: column t stands for token t+1
        mask[0] = 0
        return (_trained("example", item["tokens"], mask, int(item["lengths"])),)
    if isinstance(dataset, KnowledgeDistillationDataset):
        # The last label is trained on, and is no token of the example.
        return (_labelled(item["tokens"], item["labels"], item["loss_mask"]),)
    batch = dataset.collate_fn([item])  # type: ignore[attr-defined]  # of both SFT datasets
    length = len(item["tokens"]) - 1
    columns = (batch[name][0, :length] for name in ("tokens", "labels", "loss_mask"))
    return (_labelled(*columns),)


def _trained(name: str, tokens: Tensor, mask: Tensor, length: int) -> Part:
    """A sequence whose tokens are trained on where the mask, of tokens, is not 0."""
    return Part(name, tokens.tolist()[:length], mask.ne(0).tolist()[:length])


def _labelled(tokens: Tensor, labels: Tensor, mask: Tensor) -> Part:
    """An example whose labels are trained on where the mask, of labels, is not 0."""
    return Part("example", [int(tokens[0]), *labels.tolist()], [False, *mask.ne(0).tolist()])


def _scored(name: str, tokens: Tensor, length: Tensor, padding: int | None) -> Part:
    """A sequence whose last token's output is the reward, but for padding at its end."""
    last = int(lengths_before(padding, tokens[None], length[None])) - 1
    marked = [place == last for place in range(int(length))]
    return Part(name, tokens[: int(length)].tolist(), marked, scored=True)


def _note(dataset: FileDataset, item: dict[str, Any]) -> str:
    if "labels" in item and isinstance(dataset, RegressionRewardModelDataset):
        return f"label {item['labels'].tolist()}"
    if isinstance(dataset, SteerLM2Dataset):
        return "weights " + ", ".join(f"{weight:.3g}" for weight in item["ws"].tolist())
    if "margin" in item:
        return f"margin {float(item['margin']):g}"
    return ""
