# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner report RUN_DIR [RUN_DIR ...] [--out FILE]`."""

import argparse
import sys
from pathlib import Path

from nemo_aligner.core.endings import end_with
from nemo_aligner.core.errors import UserError
from nemo_aligner.report.page import write_report


def main(argv: list[str] | None = None) -> int:
    """Write the report of one run or several; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="nemo-aligner report",
        description="Write one self-contained HTML page about one run, or several to compare.",
    )
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="folder of a run; every metrics.jsonl below it is a job",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write; default RUN_DIR/report.html, for several report.html",
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.parent:
        end_with(args.parent)
    try:
        print(write_report(*args.run_dirs, out=args.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
