# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the scripts in examples/nlp/data and examples/nlp/cai share, whose data models write or
label: their options and their files of records.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.responses import check_writable, write_records
from nemo_aligner.generate.settings import CommandParser

if TYPE_CHECKING:
    from nemo_aligner.core.tokenizer import Tokenizer
    from nemo_aligner.data.nlp.records import Records


def add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-file", required=True, help="conversations, jsonl")
    parser.add_argument("--output-file", required=True, help="jsonl to write")


def add_attributes(parser: argparse.ArgumentParser) -> None:
    from nemo_aligner.data.nlp.steerlm import ALL_STEERLM_ATTRIBUTES

    parser.add_argument(
        "--attributes",
        default=",".join(ALL_STEERLM_ATTRIBUTES),
        metavar="NAMES",
        help="attributes in the order of the reward model's numbers (default %(default)s)",
    )


def open_records(path: str, inspect: Callable[[Record], int]) -> "Records":
    """The records of a file, each checked by `inspect`; `UserError` names file and line."""
    from nemo_aligner.data.nlp.records import Records

    return Records([path], [], inspect)


Rows = Iterable[Mapping[str, Any]]


def hub_parser(description: str | None, dataset: str) -> CommandParser:
    """A parser with `--output_directory` and the data set, by default `dataset`."""
    parser = CommandParser(takes_words=False, description=description)
    parser.add_argument("-dir", "--output_directory", required=True, help="folder to write to")
    parser.add_argument(
        "--dataset", default=dataset, help="name on the Hub, or a folder (default %(default)s)"
    )
    return parser


def load_hub_dataset(name: str, **options: Any) -> Mapping[str, Rows]:
    """The splits of a data set, by `datasets.load_dataset`; `UserError`: it cannot be loaded."""
    from datasets import load_dataset

    try:
        splits: Mapping[str, Rows] = load_dataset(name, **options)
    except Exception as error:  # of the Hub, the network, or the files
        raise UserError(
            f"the data set {name} cannot be loaded ({type(error).__name__}: {error}); name a "
            "folder with its files in --dataset."
        ) from error
    return splits


def write_conversations(
    folder: str, rows: Mapping[str, Rows], make: Callable[[Mapping[str, Any]], list[Record]]
) -> None:
    """Write train.jsonl and val.jsonl of `train` and `validation`, by `make` of their rows."""
    for split, name in (("train", "train"), ("validation", "val")):
        path = Path(folder) / f"{name}.jsonl"
        check_writable(path)
        if split not in rows:
            raise UserError(f"the data set has no split {split}, but {', '.join(rows)}.")
        records = []
        for number, row in enumerate(rows[split], start=1):
            try:
                records += make(row)
            except UserError as error:
                raise UserError(f"{split} data, row {number}: {error}") from None
        print(f"{write_records(path, records)} conversations: {path}")


def check_conversation(record: Record) -> int:
    """How many responses a conversation has; for `Records`."""
    from nemo_aligner.data.nlp.steerlm import scored_turns

    if "conversations" not in record:
        raise UserError(f"field 'conversations' is missing; the line has {sorted(record)}.")
    return len(scored_turns(record))


def check_conversations(path: str) -> list[Record]:
    """The conversations of a file; `UserError` names file and line."""
    return list(open_records(path, check_conversation))


def without_long(
    records: Sequence[Record],
    max_seq_length: int,
    tokenizer: "Tokenizer | None",
    library: str | None,
    model: str | None,
) -> list[Record]:
    """The conversations of which something of a response lies within `max_seq_length` tokens of
    `tokenizer`, or of that of `library` and `model`.
    """
    from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, NeMoChat

    if library is not None and model is not None:
        from omegaconf import OmegaConf

        from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

        kind = "type" if library == "huggingface" else "model"
        tokenizer = build_tokenizer(OmegaConf.create({"library": library, kind: model}))
    assert tokenizer is not None
    form = NeMoChat(tokenizer, NEMO_TOKENS)
    limit = max_seq_length + 1  # the last token of an example is predicted, but not read
    return [record for record in records if any(form.conversation(record).is_response[:limit])]
