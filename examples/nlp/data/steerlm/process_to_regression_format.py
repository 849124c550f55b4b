# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From conversations with labels to data of a regression reward model, lines `{"text": ...,
"label": [numbers]}`, one for each response that has a label.

    python process_to_regression_format.py --input-file=train.jsonl --output-file=train_reg.jsonl

An attribute that a label does not name gets -100, which the reward model leaves out of its loss.
See docs/algorithms.md.
"""

from collections.abc import Sequence

from labels import HIGHEST, encode_label, read_attributes

from nemo_aligner.config.keys.model import DEFAULT_MASK_VALUE
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.data.nlp.steerlm import ALL_STEERLM_ATTRIBUTES, scored_turns
from nemo_aligner.generate.responses import check_writable, write_records
from nemo_aligner.generate.settings import CommandParser
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import add_attributes, add_files, check_conversation, open_records


@user_errors_end_the_job
def main() -> None:
    parser = CommandParser(takes_words=False, description=__doc__)
    add_files(parser)
    add_attributes(parser)
    args = parser.parse_args()
    check_writable(args.output_file)
    attributes = read_attributes(args.attributes)

    def count(record: dict) -> int:
        check_conversation(record)
        return len(regression_records(record, attributes))

    records = open_records(args.input_file, count)
    if not records.notes.any():
        raise UserError(f"{args.input_file}: no response has a label.")
    written = write_records(
        args.output_file,
        (found for record in records for found in regression_records(record, attributes)),
    )
    print(f"{written} labelled texts of {len(records)} conversations: {args.output_file}")


def parse_label(text: str, attributes: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not colon or number != number:
            raise UserError(
                f"the label {text!r} is not one of attributes: write name:number, such as "
                f"{encode_label(dict.fromkeys(attributes[:2], HIGHEST))}."
            )
        if name not in attributes:
            raise UserError(
                f"the label {text!r} has the attribute {name!r}, which is none of "
                f"{', '.join(attributes)} (--attributes)."
            )
        values[name] = number
    return values


def regression_records(
    record: Record, attributes: Sequence[str] = ALL_STEERLM_ATTRIBUTES
) -> list[Record]:
    """A record `{"text": ..., "label": [number, ...]}` for each response that has a label."""
    found = []
    for number, text in scored_turns(record):
        label = record["conversations"][number].get("label")
        if label:
            values = parse_label(label, attributes)
            numbers = [values.get(name, float(DEFAULT_MASK_VALUE)) for name in attributes]
            found.append({"text": text, "label": numbers})
    return found


if __name__ == "__main__":
    main()
