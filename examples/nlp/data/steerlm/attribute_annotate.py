# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of the responses of conversations, as a served regression reward model rates them:
whole numbers from 0 to 4, in the labels that SteerLM learns from.

    python serve_reward_model.py rm_model_file=regression.nemo inference.port=1424   # runs on
    python attribute_annotate.py --input-file=train.jsonl --output-file=train_labeled.jsonl \
        --port=1424

Every response gets a new label, and the conversation the type VALUE_TO_TEXT. Stopped, the same
command goes on where it ended. See docs/algorithms.md.
"""

from pathlib import Path

from nemo_aligner.generate.responses import check_writable
from nemo_aligner.generate.settings import CommandParser
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.synthetic import (
    add_attributes,
    add_files,
    check_conversation,
    open_records,
)


@user_errors_end_the_job
def main() -> None:
    from annotation import AttributeModel, annotate
    from labels import read_attributes

    parser = CommandParser(takes_words=False, description=__doc__)
    add_files(parser)
    parser.add_argument("--host", default="localhost", help="of the server (%(default)s)")
    parser.add_argument("--port", type=int, default=5555, help="of the server (%(default)s)")
    parser.add_argument("--model_name", default="reward_model", help="of the endpoint")
    add_attributes(parser)
    parser.add_argument(
        "--turns-per-request", type=int, default=32, help="responses sent together (%(default)s)"
    )
    parser.add_argument(
        "--init-timeout-s", type=float, default=600.0, help="wait for the server (%(default)s)"
    )
    parser.add_argument(
        "--inference-timeout-s", type=float, default=3600.0, help="of a request (%(default)s)"
    )
    parser.add_argument("--token-file", help="file with the token that the server asks for")
    parser.add_argument("--tls-ca-file", help="certificates of a server that encrypts")
    args = parser.parse_args()
    check_writable(args.output_file)
    attributes = read_attributes(args.attributes)

    def connect() -> AttributeModel:
        return AttributeModel(
            args.host,
            args.port,
            args.model_name,
            args.init_timeout_s,
            args.inference_timeout_s,
            args.token_file,
            args.tls_ca_file,
        )

    records = open_records(args.input_file, check_conversation)
    out = Path(args.output_file)
    asked = annotate(records, out, attributes, connect, args.turns_per_request)
    print(f"{asked} of {len(records)} conversations labelled: {out}")


if __name__ == "__main__":
    main()
