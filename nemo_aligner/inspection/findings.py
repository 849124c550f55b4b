# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a reader should know of the data before training: lengths, what is dropped or cut and why,
duplicates, empty responses, special tokens in what somebody wrote.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_aligner.core.tokenizer import decode_with_special_tokens, special_ids
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
from nemo_aligner.data.nlp.json_lines import Record
from nemo_aligner.data.nlp.labelled_texts import RegressionRewardModelDataset
from nemo_aligner.data.nlp.preference_pairs import RewardModelDataset
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.responses import ResponseDataset
from nemo_aligner.data.nlp.sft_chat import SFTChatDataset
from nemo_aligner.data.nlp.steerlm2 import SteerLM2Dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset
from nemo_aligner.inspection.jobs import InspectedJob
from nemo_aligner.inspection.samples import Part, Sample, place, read_sample

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
