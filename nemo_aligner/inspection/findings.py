# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The dataset of a job, built by its own functions on the tokenizer of a model, and what a reader
should know of it, such as lengths, what is dropped or cut and why, and duplicates.
"""

import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.checks import check_keys
from nemo_aligner.config.defaults import complete_config, complete_model
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.values import plain_dict, resolved
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, special_ids
from nemo_aligner.data.nlp.builders import build_configured_datasets
from nemo_aligner.data.nlp.chat_records import ASSISTANT
from nemo_aligner.data.nlp.fields import holds_pair
from nemo_aligner.data.nlp.file_dataset import FileDataset, Part
from nemo_aligner.data.nlp.records import first_record
from nemo_aligner.data.nlp.sft import PackedDataset, build_sft_dataset
from nemo_aligner.data.nlp.steerlm import build_steerlm2_dataset
from nemo_aligner.generate.policy import newest_weights
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.launch.model_loading import OTHER_POLICIES, load_and_override_model_config
from nemo_aligner.launch.supervised_job import datasets_of_job
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

SFT, PPO, RM, DPO, KTO = "gpt_sft", "gpt_ppo_actor", "training_rm", "gpt_dpo", "gpt_kto"
SPIN, DISTILLATION = "gpt_spin", "gpt_knowledge_distillation"
STEERLM2 = "steerlm2"  # train_steerlm2.py, whose configuration is that of SFT
ON_POLICY = "model.knowledge_distillation.on_policy.fraction"


@dataclass(frozen=True)
class InspectedJob:
    name: str  # of the job's configuration, "gpt_sft" for example, or "steerlm2"
    files: tuple[str, ...]  # the data files
    model: Path  # whose tokenizer is used
    cfg: DictConfig  # section `model` of the job
    tokenizer: Tokenizer  # of the model
    dataset: FileDataset  # of the job


def open_job(
    files: Sequence[str], model: str, job: str | None, settings: Sequence[str]
) -> InspectedJob:
    """Build the dataset of a job on the tokenizer of a model, with `key=value` words as settings;
    `UserError`: whatever the job would raise on these files, or the job cannot be told.
    """
    settings = list(settings)
    if job is None:
        job, more = _guess(files[0])
        given = {word.partition("=")[0].lstrip("+") for word in settings}
        settings += [word for word in more if word.partition("=")[0] not in given]
    source = newest_weights(model, "--model")
    config_name = SFT if job == STEERLM2 else job
    cfg = compose_settings(config_name, settings)
    check_keys(plain_dict(cfg), config_name)
    if JOBS[config_name].records == "example":
        for part in ("train_ds", "validation_ds"):
            OmegaConf.update(cfg, f"model.data.{part}.file_path", list(files))
    else:
        OmegaConf.update(cfg, "model.data.data_prefix", {"train": list(files)}, force_add=True)
    section = resolved(complete_config(cfg, config_name))["model"]
    model_cfg = load_and_override_model_config(source, OmegaConf.create(section))
    for other in OTHER_POLICIES.get(config_name, ()):  # a section alone does not name its job
        model_cfg.pop(other, None)
    model_cfg = complete_model(model_cfg, config_name)
    tokenizer = build_tokenizer(model_cfg.tokenizer)
    dataset = _build(job, model_cfg, tokenizer)
    return InspectedJob(job, tuple(map(str, files)), Path(source), model_cfg, tokenizer, dataset)


def _build(job: str, cfg: DictConfig, tokenizer: Any) -> FileDataset:
    """The training set of a job; see its script."""
    data = cfg.data
    if job == STEERLM2:
        return build_steerlm2_dataset(
            data.train_ds, tokenizer, special_tokens=data.chat_prompt_tokens
        )
    if JOBS[job].records != "example":
        whole, build = OmegaConf.create({"model": cfg}), datasets_of_job(job, cfg)
        return build_configured_datasets(whole, build, tokenizer)[0]
    # Of another job it may be the checkpoint's.
    answer_only = "model.answer_only_loss" not in JOBS[job].keys or cfg.answer_only_loss
    dataset = build_sft_dataset(data.train_ds, tokenizer, answer_only_loss=answer_only, data=data)
    # Packs are shown as the samples that they are made of.
    return dataset.dataset if isinstance(dataset, PackedDataset) else dataset


def _guess(file: str) -> tuple[str, list[str]]:
    """The job that a file's first record is for, and its settings; `UserError`: not just one."""
    record = first_record(file)
    if not record:  # none can be read: the check of all records, the same in each job, says why
        return SFT, []

    def has(*columns: str) -> bool:
        return all(column in record for column in columns)

    messages, role = record.get("messages") or record.get("conversations"), None
    if isinstance(messages, list) and isinstance(messages[-1], dict):
        role = str(messages[-1].get("role") or messages[-1].get("from")).lower()
    guesses: list[tuple[bool, str, list[str]]] = [
        (has("prompt_turns", "responses"), STEERLM2, []),
        (has("preference") or isinstance(record.get("label"), bool), KTO, []),
        (has("label"), RM, ["model.reward_model_type=regression"]),
        (has("topk_logits"), DISTILLATION, []),
        # Whatever the share is: the data are the same.
        (has("prompt", "response"), DISTILLATION, [f"{ON_POLICY}=1.0"]),
        (has("chosen_response"), DPO, []),  # NeMo-Aligner's name, in data of DPO alone
        (holds_pair(record), RM, []),
        (has("output") or role in (ASSISTANT, "gpt"), SFT, []),
        (has("prompt") or role is not None, PPO, []),
    ]
    for is_it, job, settings in guesses:
        if is_it:
            return job, settings
    raise UserError(
        f"the first record of {file} does not show which job it is for (a text may be a prompt, "
        f"or one of a pair): add --job {SFT}, {PPO}, gpt_rs_actor, "
        f"gpt_reinforce_actor, {DPO}, {KTO}, {SPIN}, {DISTILLATION}, {STEERLM2} or {RM}."
    )


@dataclass(frozen=True)
class Sample:
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
    return [read_sample(job, index) for index in range(min(count, len(job.dataset)))]


def read_sample(job: InspectedJob, index: int) -> Sample:
    dataset, item = job.dataset, job.dataset[index]
    document = int(dataset.documents[index])
    parts = dataset.parts(item, job.cfg.get("pad_token_id"))
    return Sample(document, place(dataset, document), parts, dataset.note(item))


def place(dataset: FileDataset, document: int) -> str:
    """Where a document stands, as errors name it: file and line, or row."""
    lines = dataset.lines_per_document
    return " and ".join(dataset.lines.where(document * lines + n) for n in range(lines))


def pieces(tokenizer: Tokenizer, part: Part) -> Iterator[Piece]:
    """The text of a part, cut where the mask changes and around special tokens."""
    special = special_ids(tokenizer)
    kinds = [
        (marked, token in special) for token, marked in zip(part.tokens, part.marked, strict=True)
    ]
    start, before = 0, ""
    for kind, run in itertools.groupby(kinds):
        end = start + len(list(run))
        # What the piece adds to the text before it: alone, some tokenizers drop its first space.
        text = decode_with_special_tokens(tokenizer, part.tokens[:end])
        if text.startswith(before):
            own = text[len(before) :]
        else:
            own = decode_with_special_tokens(tokenizer, part.tokens[start:end])
        yield Piece(own, *kind)
        start, before = end, text


def visible(text: str) -> str:
    """`text` with marks for line ends and control characters."""
    shown = {code: chr(0x2400 + code) for code in range(32) if code != 10} | {10: "⏎\n"}
    return text.translate(shown)


BINS = 12


# What it is and what happens to it, and where, for the reader.
Finding = tuple[str, list[str]]


def look(job: InspectedJob, limit: int) -> tuple[np.ndarray, list[Finding]]:
    """Read the dataset of a job, up to `limit` samples; 0: all. Returns int64 `[samples]`, the
    tokens of the longest part of each, and what is dropped, cut, empty or there twice.
    """
    dataset = job.dataset
    notes = dataset.lines.notes.reshape(-1, dataset.lines_per_document).max(axis=1)
    found: list[Finding] = []
    for text, chosen, tokens in dataset.by_length(notes):
        places = [
            place(dataset, int(number)) + f" ({notes[number]} tokens)" * tokens
            for number in np.flatnonzero(chosen)
        ]
        found.append((text, places))
    lengths, first_places = [], dict[int, str]()
    empty, twice, marked = list[str](), list[str](), list[str]()
    form, special = dataset.form_of(dataset.lines[0]), special_ids(job.tokenizer)
    ends = () if form is None else form.end_strings
    inner: Any = getattr(job.tokenizer, "tokenizer", None)
    control: set[str] = set()
    if hasattr(inner, "get_added_vocab"):
        control = {*inner.all_special_tokens, *inner.get_added_vocab()}
    for index in dataset.in_use()[: limit or None]:
        sample = read_sample(job, int(index))
        lengths.append(max(len(part.tokens) for part in sample.parts))
        key = tuple(tuple(part.tokens) for part in sample.parts)
        first = first_places.setdefault(hash(key), sample.place)
        if first != sample.place:
            twice.append(f"{sample.place} (as {first})")
        if _empty_response(job, sample, special, ends):
            empty.append(sample.place)
        if control and any(token in text for text in _messages(job, sample) for token in control):
            marked.append(sample.place)
    found += [
        ("with an empty response", empty),
        (f"there more than once{dataset.alike}", twice),
        ("with a special token in what somebody wrote; the model cannot tell it apart", marked),
        (f"with {dataset.others_are}", dataset.unread_columns()),
    ]
    text, numbers = "with an empty prompt", np.flatnonzero(dataset.lines.extra)
    if hasattr(dataset, "unlike"):
        text = "pairs of texts that share no beginning of their own, so no prompt"
        numbers = dataset.unlike
    found.append((text, [place(dataset, int(number)) for number in numbers]))
    return np.array(lengths, dtype=np.int64), [(text, places) for text, places in found if places]


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(first length, last length, count) of each bin; bins are equally wide."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // BINS))
    counts = np.bincount((lengths - low) // width)
    starts = range(low, high + 1, width)
    return [(n, n + width - 1, int(count)) for n, count in zip(starts, counts, strict=True)]


def _empty_response(
    job: InspectedJob, sample: Sample, special: Collection[int], ends: Sequence[str]
) -> bool:
    """Whether a sample has a response without text."""
    dataset: Any = job.dataset
    if any(part.scored for part in sample.parts):  # no response is told from its prompt
        if not (hasattr(dataset, "as_pair") and dataset.pair_in_line):
            return False
        pair = dataset.as_pair(dataset.lines[sample.document])
        last = [v if isinstance(v, str) else v[-1] for v in (pair["chosen"], pair["rejected"])]
        texts = [v if isinstance(v, str) else v.get("content", v.get("value")) for v in last]
        return not all(str(text).strip() for text in texts)
    turns = (  # one by one: one of them may be empty
        [token for token, _marked in turn if token not in special]
        for part in sample.parts
        if part.name != "prompt"
        for marked, turn in itertools.groupby(
            zip(part.tokens, part.marked, strict=True), operator.itemgetter(1)
        )
        if marked
    )
    for tokens in turns:
        text = decode_with_special_tokens(job.tokenizer, tokens)
        for end in ends:
            text = text.replace(end, "")
        if not text.strip():
            return True
    return False


def _messages(job: InspectedJob, sample: Sample) -> Iterator[str]:
    """The texts of a sample's conversation."""
    dataset, lines = job.dataset, job.dataset.lines_per_document
    for number in range(sample.document * lines, (sample.document + 1) * lines):
        record = dataset.lines[number]
        if dataset.form_of(record) is not None:
            yield from (message["content"] for message in dataset.messages(record))
