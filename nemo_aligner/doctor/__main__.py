# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner doctor [FOLDER]`."""

import argparse
import sys
import warnings
from itertools import chain
from pathlib import Path

from nemo_aligner.doctor import MISSING, machine, packages, summary
from nemo_aligner.launch.start_up import long_imports


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="nemo-aligner doctor",
        description="Say whether jobs can run on this machine, and what to do where they cannot. "
        "The exit code is 0 if all of them can.",
        epilog="See docs/jobs.md.",
    )
    result.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("."),
        metavar="FOLDER",
        help="in which runs will be written (default: the current one)",
    )
    return result


def main(argv: list[str] | None = None) -> None:
    """Look at everything and print each finding as it comes."""
    args = parser().parse_args(argv)
    warnings.simplefilter("ignore")  # of packages that are imported
    findings = []
    with long_imports():
        for finding in chain(packages.find(), machine.find(args.folder)):
            print(finding.line(), flush=True)
            findings.append(finding)
    print(f"\n{summary(findings)}")
    sys.exit(any(finding.status == MISSING for finding in findings))


if __name__ == "__main__":
    main()
