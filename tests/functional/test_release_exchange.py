# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and a `.nemo` that one Megatron Core wrote load in the other and continue.

OTHER_PYTHON names the interpreter of an environment with the other release, as `make
test-versions` does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from tests.release_exchange import CASES

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("OTHER_PYTHON", "")


def run(python: str, *arguments: object) -> str:
    """Output of `tests.release_exchange` in the environment of `python`."""
    command = [python, "-W", "ignore", "-m", "tests.release_exchange", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": patience(300)}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not OTHER, reason="needs OTHER_PYTHON, an environment of another Python")
@pytest.mark.parametrize("writer, reader", [(sys.executable, OTHER), (OTHER, sys.executable)])
def test_each_release_continues_what_the_other_saved(tiny_tokenizer_dir, tmp_path, writer, reader):
    run(writer, "write", tmp_path / "jobs", tiny_tokenizer_dir)
    output = run(reader, "read", tmp_path / "jobs", tiny_tokenizer_dir)
    compared = [line for line in output.splitlines() if line.startswith("case ")]
    assert len(compared) == len(CASES)
