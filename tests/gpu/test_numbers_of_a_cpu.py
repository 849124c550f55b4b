# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A GPU gives the numbers of a CPU: all roles of the matrix (`tests/distributed/matrix.py`) in
fp32, with the layers that this machine has (Transformer Engine's, if it is installed).
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import matrix, test_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]
SPLIT = "one rank"


def write_cpu_numbers(tokenizer_dir: str, folder: str, architecture: str) -> None:
    """Body of a process without a GPU."""
    assert not torch.cuda.is_available()
    matrix.write_models(tokenizer_dir, Path(folder))
    test_matrix.write_expected(tokenizer_dir, folder, {SPLIT: only(architecture).cases()})


def only(architecture: str) -> matrix.Split:
    return replace(matrix.SPLITS[SPLIT], architectures=(architecture,), thorough=True)


@pytest.mark.parametrize("architecture", matrix.ALL)
def test_gpu_gives_the_numbers_of_a_cpu(tiny_tokenizer_dir, tmp_path, monkeypatch, architecture):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    arguments = [tiny_tokenizer_dir, str(tmp_path), architecture]
    command = f"from {__name__} import *; write_cpu_numbers(*{arguments!r})"
    subprocess.run([sys.executable, "-c", command], env=environment, check=True)
    monkeypatch.setitem(matrix.SPLITS, SPLIT, only(architecture))
    report = test_matrix.keep_report(matrix.run_splits(tiny_tokenizer_dir, tmp_path, [SPLIT]))
    wrong = test_matrix.out_of_bounds(SPLIT, report)
    assert not wrong, "\n".join(wrong)
