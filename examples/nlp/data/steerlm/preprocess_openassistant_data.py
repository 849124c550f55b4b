# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversations of OpenAssistant with their labels of quality, toxicity, humor and creativity,
for SteerLM.

    python preprocess_openassistant_data.py --output_directory=data/oasst

reads the message trees `2023-04-12_oasst_all.trees.jsonl.gz` in that folder, which it downloads
from the Hugging Face Hub if the file is not there, and writes train.jsonl and val.jsonl beside it.
See docs/algorithms.md.
"""

import random
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labels import HIGHEST, encode_label, labelled_conversation

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.nemo_chat import RESPONDER, USER
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.data.nlp.steerlm import OPEN_ASSISTANT_ATTRIBUTES
from nemo_aligner.generate.responses import check_writable, write_records
from nemo_aligner.generate.settings import CommandParser
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import open_records

TREES = "2023-04-12_oasst_all.trees.jsonl.gz"
ADDRESS = f"https://huggingface.co/datasets/OpenAssistant/oasst1/resolve/main/{TREES}"
SHARE_OF_TRAINING, SEED = 0.95, 10  # of trees, not of conversations: none is in both files


@user_errors_end_the_job
def main() -> None:
    parser = CommandParser(takes_words=False, description=__doc__)
    parser.add_argument("-dir", "--output_directory", required=True, help="folder to write to")
    args = parser.parse_args()
    folder = Path(args.output_directory)
    check_writable(folder / "train.jsonl")

    trees = open_records(str(_trees(folder)), lambda record: len(open_assistant_records(record)))
    order = list(range(len(trees)))
    random.Random(SEED).shuffle(order)
    training = int(len(order) * SHARE_OF_TRAINING)
    for name, part in (("train", order[:training]), ("val", order[training:])):
        path = folder / f"{name}.jsonl"
        records = (record for n in part for record in open_assistant_records(trees[n]))
        print(f"{write_records(path, records)} conversations: {path}")


def _trees(folder: Path) -> Path:
    """The file of message trees."""
    path = folder / TREES
    if path.exists():
        return path
    part = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        urllib.request.urlretrieve(ADDRESS, part)
        part.rename(path)
    except OSError as error:
        raise UserError(
            f"{ADDRESS} cannot be downloaded ({error}); put the file into {folder} yourself."
        ) from None
    return path


def open_assistant_records(tree: Mapping[str, Any]) -> list[Record]:
    """The conversations of a message tree of OpenAssistant, one for each path to a last reply."""
    try:
        return [labelled_conversation(path) for path in _paths(tree["prompt"]) if len(path) > 1]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this is no message tree of OpenAssistant ({type(error).__name__}: {error})."
        ) from None


def _paths(message: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    if message["role"] not in ("prompter", "assistant"):
        raise ValueError(f"role {message['role']!r}")
    responds = message["role"] == "assistant"
    turn: dict[str, Any] = {"from": RESPONDER if responds else USER, "value": message["text"]}
    labels = message.get("labels")
    if not responds:
        turn["label"] = None
    elif labels is not None:  # from 0 to 1
        names = [name for name in OPEN_ASSISTANT_ATTRIBUTES if name in labels]
        turn["label"] = encode_label({n: round(labels[n]["value"] * HIGHEST) for n in names})
    if not message["replies"]:
        yield [turn]
    for reply in message["replies"]:
        for path in _paths(reply):
            yield [turn, *path]


if __name__ == "__main__":
    main()
