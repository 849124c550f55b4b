# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversations of HelpSteer2 with their attributes, for SteerLM and reward models.

    python preprocess_helpsteer2_data.py --output_directory=data/helpsteer2
    python preprocess_helpsteer2_data.py --output_directory=data/helpsteer2-pref --preference

writes train.jsonl and val.jsonl. With `--preference` each two neighbouring conversations are the
responses to one prompt, and the value of quality is the strength of the preference, for
`model.regression.loss_func=scaled_bt`. See docs/algorithms.md.
"""

from labels import help_steer_record

from nemo_aligner.data.nlp.steerlm import ALL_STEERLM_ATTRIBUTES
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import hub_parser, load_hub_dataset, write_conversations


@user_errors_end_the_job
def main() -> None:
    parser = hub_parser(__doc__, "nvidia/HelpSteer2")
    parser.add_argument(
        "-oh", "--only_helpfulness", action="store_true", help="leave the other attributes out"
    )
    parser.add_argument(
        "-pref",
        "--preference",
        action="store_true",
        help="pairs of responses, HelpSteer2-Preference",
    )
    args = parser.parse_args()
    if args.preference:
        rows = load_hub_dataset(args.dataset, data_dir="preference")["train"]
        splits = {
            name: [row for row in rows if row["split"] == name] for name in ("train", "validation")
        }
        write_conversations(args.output_directory, splits, preference_records)
        return
    attributes = ("helpfulness",) if args.only_helpfulness else ALL_STEERLM_ATTRIBUTES
    write_conversations(
        args.output_directory,
        load_hub_dataset(args.dataset),
        lambda row: [help_steer_record(row, attributes)],
    )


def preference_records(row):
    """The conversations of both responses of a row."""
    return [
        help_steer_record(
            {
                "prompt": row["prompt"],
                "response": row[name],
                "quality": row["preference_strength"],
            },
            ALL_STEERLM_ATTRIBUTES,
        )
        for name in ("response_1", "response_2")
    ]


if __name__ == "__main__":
    main()
