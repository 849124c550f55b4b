# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversations of HelpSteer with their five attributes, for SteerLM.

    python preprocess_helpsteer_data.py --output_directory=data/helpsteer

writes train.jsonl and val.jsonl. See docs/algorithms.md.
"""

from labels import help_steer_record

from nemo_aligner.data.nlp.steerlm import HELPSTEER_ATTRIBUTES
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import hub_parser, load_hub_dataset, write_conversations


@user_errors_end_the_job
def main() -> None:
    args = hub_parser(__doc__, "nvidia/HelpSteer").parse_args()
    write_conversations(
        args.output_directory,
        load_hub_dataset(args.dataset),
        lambda row: [help_steer_record(row, HELPSTEER_ATTRIBUTES)],
    )


if __name__ == "__main__":
    main()
