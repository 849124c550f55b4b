# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a reader should know of the data before training: lengths, what is dropped or cut and why,
duplicates, empty responses, special tokens in what somebody wrote.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, special_ids
from nemo_aligner.data.nlp.file_dataset import FileDataset, Part
from nemo_aligner.inspection.jobs import InspectedJob


@dataclass(frozen=True)
class Sample:
    """An item of the dataset."""

    document: int  # number of the document in the files
    place: str  # file and record, for the reader
    parts: tuple[Part, ...]  # what the model sees
    note: str = ""  # more to know, such as the label


class Piece(NamedTuple):
    """Neighbouring tokens of one kind as text."""

    text: str
    marked: bool = False
    special: bool = False


def read_samples(job: InspectedJob, count: int) -> list[Sample]:
    """The first samples that a job serves."""
    return [read_sample(job, index) for index in range(min(count, len(job.dataset)))]


def read_sample(job: InspectedJob, index: int) -> Sample:
    """One item of the dataset, as the job gets it."""
    dataset, padding = job.dataset, job.cfg.get("pad_token_id")
    document = int(dataset.documents[index])
    item = dataset[index]
    return Sample(
        document, place(dataset, document), dataset.parts(item, padding), dataset.note(item)
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


BINS = 12


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
    notes = dataset.lines.notes.reshape(-1, dataset.lines_per_document).max(axis=1)
    bad = []
    for text, chosen, tokens in dataset.by_length(notes):
        places = [
            place(dataset, int(number)) + f" ({notes[number]} tokens)" * tokens
            for number in np.flatnonzero(chosen)
        ]
        bad += [Finding(text, places)] if places else []
    usable = dataset.in_use()
    usable = usable[:limit] if limit else usable
    lengths, first_places = [], dict[int, str]()
    empty = Finding("with an empty response")
    twice = Finding("there more than once" + dataset.alike)
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
        limit=dataset.limit(),
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


def _records(dataset: Any) -> list[Finding]:
    """What the dataset found in the records beside their lengths."""
    found = [Finding(f"with {dataset.others_are}", dataset.unread_columns())]
    if hasattr(dataset, "unlike"):
        places = [place(dataset, int(number)) for number in dataset.unlike]
        what = "pairs of texts that share no beginning of their own, so no prompt"
        return [*found, Finding(what, places)]
    empty = [place(dataset, int(number)) for number in np.flatnonzero(dataset.lines.extra)]
    return [*found, Finding("with an empty prompt", empty)]


def _empty_response(job: InspectedJob) -> Callable[[Sample], bool]:
    """Whether a sample has a response without text."""
    dataset: Any = job.dataset
    tokenizer = job.tokenizer
    special = special_ids(tokenizer)
    form = dataset.form_of(dataset.lines[0])
    ends = () if form is None else form.end_strings

    def blank(tokens: list[int]) -> bool:
        own = [token for token in tokens if token not in special]
        text = decode_with_special_tokens(tokenizer, own)
        for end in ends:
            text = text.replace(end, "")
        return not text.strip()

    def trained_is_blank(part: Part) -> bool:
        """For the turns one by one: one of them may be empty."""
        runs = itertools.groupby(zip(part.tokens, part.marked, strict=True), lambda each: each[1])
        return any(blank([token for token, _marked in turn]) for marked, turn in runs if marked)

    def pair_is_blank(sample: Sample) -> bool:
        record = dataset.as_pair(dataset.lines[sample.document])
        last = [v if isinstance(v, str) else v[-1] for v in (record["chosen"], record["rejected"])]
        texts = [v if isinstance(v, str) else v.get("content", v.get("value")) for v in last]
        return not all(str(text).strip() for text in texts)

    def is_empty(sample: Sample) -> bool:
        if any(part.scored for part in sample.parts):  # no response is told from its prompt
            return hasattr(dataset, "as_pair") and dataset.pair_in_line and pair_is_blank(sample)
        return any(trained_is_blank(part) for part in sample.parts if part.name != "prompt")

    return is_empty


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
            if dataset.form_of(record) is not None
            for message in dataset.messages(record)
            for token in control
        )

    return holds_special
