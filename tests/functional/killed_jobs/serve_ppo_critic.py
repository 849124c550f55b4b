# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The script of the same name, killed in a save: see tests/killed_runs.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.killed_runs import run_killed  # noqa: E402  (the tests are not installed)

if __name__ == "__main__":
    run_killed(__file__)
