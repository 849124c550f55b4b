# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the scripts that write data share: their options and their files of records."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import replaced

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.records import Records
    from nemo_aligner.data.nlp.sources import Record


class DataParser(argparse.ArgumentParser):
    """A parser whose description keeps its lines, and whose mistakes are errors of the user."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise a `UserError` in place of the exit with the usage, which is long."""
        raise UserError(f"{message}; {self.prog} --help shows the options.")


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


def open_records(path: str, inspect: "Callable[[Record], int]") -> "Records":
    """The records of a file, each checked by `inspect`; `UserError` names file and line."""
    from nemo_aligner.data.nlp.records import Records

    return Records([path], [], inspect)


def write_records(path: Path | str, records: "Iterable[Record]") -> int:
    """Write a jsonl file, which takes the place of `path` when it is complete; returns the number
    of records. `UserError`: it cannot be written.
    """
    count = 0
    with replaced(path) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    return count
