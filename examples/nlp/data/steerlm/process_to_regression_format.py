# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From conversations with labels to data of a regression reward model, lines `{"text": ...,
"label": [numbers]}`, one for each response that has a label.

    python process_to_regression_format.py --input-file=train.jsonl --output-file=train_reg.jsonl

An attribute that a label does not name gets -100, which the reward model leaves out of its loss.
See docs/algorithms.md.
"""

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import check_writable
from nemo_aligner.generate.settings import CommandParser
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import (
    add_attributes,
    add_files,
    check_conversation,
    open_records,
    write_records,
)


@user_errors_end_the_job
def main() -> None:
    from nemo_aligner.data.nlp.steerlm import read_attributes, regression_records

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


if __name__ == "__main__":
    main()
