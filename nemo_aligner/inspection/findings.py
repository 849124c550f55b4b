# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a reader should know of the data before training: lengths, what is dropped or cut and why,
duplicates, empty responses, special tokens in what somebody wrote.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from nemo_aligner.core.masks import lengths_before
from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, special_ids
from nemo_aligner.data.nlp.chat_records import (
    by_our_names,
    conversation_field,
    conversation_messages,
    holds_pair,
    pair_messages,
    prompt_messages,
    response_messages,
)
from nemo_aligner.data.nlp.conversation_form import ConversationForm
from nemo_aligner.data.nlp.datasets import (
    DPOModelDataset,
    KTOModelDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    RewardModelDataset,
)
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.sft import SFTChatDataset
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.data.nlp.steerlm import SteerLM2Dataset
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


BINS = 12
EXAMPLES = 3  # places that a finding names
CUT, NOTHING_LEFT = 1, 2  # notes of both SFT datasets
# They leave out what is longer than `model.data.seq_length`.
WITH_SEQ_LENGTH = (
    RewardModelDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    KnowledgeDistillationDataset,
)


@dataclass
class Finding:
    """One kind of thing that was found."""

    text: str  # what it is, and what happens to it
    places: list[str] = field(default_factory=list)  # where, for the reader


@dataclass(frozen=True)
class Findings:
    """What was found."""

    documents: int  # in the files
    served: int  # that the job gets
    seen: int  # that lengths and findings are of
    lengths: np.ndarray  # int64 [seen], tokens of the longest part of each sample
    limit: str  # the length that the job allows, in words
    # what will not be used as it stands, in this order: dropped, cut, empty, twice
    bad: list[Finding]


def look(job: InspectedJob, limit: int) -> Findings:
    """Read the dataset of a job, up to `limit` samples; 0: all."""
    dataset = job.dataset
    documents = len(dataset.lines) // dataset.lines_per_document
    bad = [finding for finding in _by_length(job) if finding.places]
    usable = _indices_in_use(job)
    usable = usable[:limit] if limit else usable
    lengths, first_places = [], dict[int, str]()
    empty = Finding("with an empty response")
    prompts = isinstance(dataset, RLHFDataset)
    twice = Finding(
        "there more than once, to the token" if not prompts else "there more than once"
    )
    marks = Finding("with a special token in what somebody wrote; the model cannot tell it apart")
    is_empty, contents = _empty_response(job), _written(job)
    for index in usable:
        sample = read_sample(job, int(index))
        lengths.append(max(len(part.tokens) for part in sample.parts))
        key = tuple(tuple(part.tokens) for part in sample.parts)
        first = first_places.setdefault(hash(key), sample.place)
        if first != sample.place:
            twice.places.append(f"{sample.place} (as {first})")
        if is_empty(sample):
            empty.places.append(sample.place)
        if contents(sample):
            marks.places.append(sample.place)
    bad += [finding for finding in (empty, twice, marks, *_records(dataset)) if finding.places]
    return Findings(
        documents=documents,
        served=len(dataset),
        seen=len(usable),
        lengths=np.array(lengths, dtype=np.int64),
        limit=_limit(job),
        bad=bad,
    )


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(first length, last length, count) of each bin; bins are equally wide."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // BINS))
    starts = range(low, high + 1, width)
    return [
        (start, start + width - 1, int(((lengths >= start) & (lengths < start + width)).sum()))
        for start in starts
    ]


def _limit(job: InspectedJob) -> str:
    dataset = job.dataset
    if isinstance(dataset, RLHFDataset):
        return f"a prompt may have {dataset.limit_text}"
    if isinstance(dataset, WITH_SEQ_LENGTH):
        return f"a text may have model.data.seq_length={dataset.seq_length} tokens"
    limit = job.cfg.data.train_ds.max_seq_length
    return f"an example may have model.data.train_ds.max_seq_length={limit} tokens"


def _by_length(job: InspectedJob) -> Iterator[Finding]:
    """What the dataset leaves out, replaces or cuts, by the lengths that it found at start."""
    dataset = job.dataset
    notes = dataset.lines.notes.reshape(-1, dataset.lines_per_document).max(axis=1)

    def where(chosen: np.ndarray, show_length: bool = True) -> list[str]:
        return [
            place(dataset, int(number)) + (f" ({notes[number]} tokens)" if show_length else "")
            for number in np.flatnonzero(chosen)
        ]

    if isinstance(dataset, RLHFDataset):
        long = notes > dataset.max_prompt_length
        yield Finding(
            f"longer than {dataset.limit_text}: replaced by the next prompt that fits, without "
            "weight in the loss",
            where(long),
        )
    elif isinstance(dataset, WITH_SEQ_LENGTH):
        yield Finding(
            f"longer than model.data.seq_length={dataset.seq_length} tokens: left out",
            where(notes > dataset.seq_length),
        )
    elif isinstance(dataset, SteerLM2Dataset):
        yield Finding(
            f"with a response longer than model.data.train_ds.max_seq_length="
            f"{dataset.max_seq_length} tokens behind its prompt: left out",
            where(notes > dataset.max_seq_length + 1),
        )
    else:
        limit = job.cfg.data.train_ds.max_seq_length
        key = f"model.data.train_ds.max_seq_length={limit} tokens"
        cut = "their ends are" if isinstance(dataset, SFTChatDataset) else "they are"
        yield Finding(f"longer than {key}: {cut} cut off", where(notes == CUT, False))
        yield Finding(
            f"longer than {key}, with nothing left of a response: no token is trained on",
            where(notes == NOTHING_LEFT, False),
        )


def _records(dataset: Any) -> list[Finding]:
    """What the dataset found in the records beside their lengths."""
    found = [Finding(f"with {dataset.others_are}", dataset.unread_columns())]
    if hasattr(dataset, "unlike"):
        places = [place(dataset, int(number)) for number in dataset.unlike]
        what = "pairs of texts that share no beginning of their own, so no prompt"
        return [*found, Finding(what, places)]
    empty = [place(dataset, int(number)) for number in np.flatnonzero(dataset.lines.extra)]
    return [*found, Finding("with an empty prompt", empty)]


def _indices_in_use(job: InspectedJob) -> np.ndarray:
    """Indices of the dataset whose own documents are served, not others in their place."""
    dataset = job.dataset
    if isinstance(dataset, RLHFDataset):
        notes = dataset.lines.notes[dataset.documents]
        return np.flatnonzero(notes <= dataset.max_prompt_length)
    return np.arange(len(dataset))


def _empty_response(job: InspectedJob) -> Callable[[Sample], bool]:
    """Whether a sample has a response without text."""
    dataset: Any = job.dataset
    tokenizer = job.tokenizer
    special = special_ids(tokenizer)
    form = form_of(dataset, dataset.lines[0])
    ends = () if form is None else form.end_strings

    def blank(tokens: list[int]) -> bool:
        own = [token for token in tokens if token not in special]
        text = decode_with_special_tokens(tokenizer, own)
        for end in ends:
            text = text.replace(end, "")
        return not text.strip()

    def trained_is_blank(part: Part) -> bool:
        """For the turns one by one: one of them may be empty."""
        turns: list[list[int]] = []
        before = False
        for token, marked in zip(part.tokens, part.marked, strict=True):
            if marked:
                turns += [] if before else [[]]
                turns[-1].append(token)
            before = marked
        return any(blank(turn) for turn in turns)

    def pair_is_blank(sample: Sample) -> bool:
        record = dataset.as_pair(dataset.lines[sample.document])
        values = [record["chosen"], record["rejected"]]
        texts = [value if isinstance(value, str) else value[-1] for value in values]
        return any(
            not str(
                text if isinstance(text, str) else text.get("content", text.get("value"))
            ).strip()
            for text in texts
        )

    if isinstance(dataset, RewardModelDataset) and dataset.lines_per_document == 1:
        return pair_is_blank
    if isinstance(dataset, RLHFDataset | RewardModelDataset | RegressionRewardModelDataset):
        return lambda sample: False  # texts in which no response is told from its prompt
    return lambda sample: any(map(trained_is_blank, sample.parts))


def _written(job: InspectedJob) -> Callable[[Sample], bool]:
    """Whether the messages of a sample's conversation hold a special token."""
    dataset = job.dataset
    inner: Any = getattr(job.tokenizer, "tokenizer", None)
    if not hasattr(inner, "get_added_vocab"):
        return lambda sample: False
    control = {*inner.all_special_tokens, *inner.get_added_vocab()}

    def holds_special(sample: Sample) -> bool:
        lines = dataset.lines_per_document
        records = [dataset.lines[sample.document * lines + number] for number in range(lines)]
        return any(
            token in message["content"]
            for record in records
            if form_of(dataset, record) is not None
            for message in _messages(dataset, record)
            for token in control
        )

    return holds_special


def form_of(dataset: Any, record: Record) -> ConversationForm | None:
    """The form that a record's conversation is written in; None: it holds none."""
    if isinstance(dataset, SFTChatDataset | SteerLM2Dataset):
        return dataset.form
    encoder = getattr(dataset, "encoder", None)
    return None if encoder is None else encoder.form_of(by_our_names(record))


def _messages(dataset: Any, record: Record) -> list[dict[str, str]]:
    if isinstance(dataset, RLHFDataset):
        return [] if "text" in record else prompt_messages(record)
    if isinstance(dataset, ResponseDataset):
        return response_messages(record)[0]
    if isinstance(dataset, SteerLM2Dataset):
        texts = [turn["value"] for turn in (*record["prompt_turns"], *record["responses"])]
        texts += [record.get(name) or "" for name in ("system", "label")]
        return [{"content": text} for text in texts]
    if isinstance(dataset, RewardModelDataset):
        record = dataset.as_pair(record)
    if holds_pair(record):
        chosen, rejected, _place = pair_messages(record)
        return [*chosen, *rejected]
    return conversation_messages(record) if conversation_field(record) else []
