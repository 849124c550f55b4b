# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub, for scripts that write their rows in another form."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.responses import check_writable
from nemo_aligner.synthetic.command_line import DataParser, write_records

Rows = Iterable[Mapping[str, Any]]


def hub_parser(description: str | None, dataset: str) -> DataParser:
    """A parser with `--output_directory` and the data set, by default `dataset`."""
    parser = DataParser(description)
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
    """Write train.jsonl and val.jsonl of `train` and `validation`, by `make` of their rows.

    Raises:
        UserError: a split is missing, a row is broken, or a file cannot be written.
    """
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
