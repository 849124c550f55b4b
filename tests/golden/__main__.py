# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Make the stored numbers anew, and show what has changed: `python -m tests.golden [-k "sft and
tp2"]`, or `make golden`. Arguments are pytest's.
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["GOLDEN"] = "remake"
    sys.exit(pytest.main(["-s", "-q", "--no-header", str(Path(__file__).parent), *sys.argv[1:]]))
