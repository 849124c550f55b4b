# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The launcher of the distributed tests: results by rank, first causes, limits, and nothing left
behind.
"""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import run_ranks
from tests.patience import wait_until
from tests.processes import family, is_alive


def _sum_of_ranks(scale):
    x = torch.tensor([dist.get_rank() + 1.0]) * scale
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def _one_raises_while_the_other_waits():
    if dist.get_rank() == 1:
        raise KeyError("planted")
    dist.barrier()


def _one_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_with_a_child(folder):
    child = subprocess.Popen(["sleep", "300"])
    (Path(folder) / f"{dist.get_rank()}.tmp").write_text(f"{os.getpid()} {child.pid}")
    os.replace(Path(folder) / f"{dist.get_rank()}.tmp", Path(folder) / f"{dist.get_rank()}.pids")
    time.sleep(300)


def test_results_by_rank_and_no_folder_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(_sum_of_ranks, 2, 60, 10.0) == [(0, 30.0), (1, 30.0)]
    assert not list(tmp_path.glob("ranks-*"))


def test_traceback_of_the_failing_rank_comes_first():
    said = r"(?s)\Arank1 failed:.*_one_raises_while_the_other_waits.*KeyError: 'planted'"
    with pytest.raises(RuntimeError, match=said):
        run_ranks(_one_raises_while_the_other_waits, 2, 100)


def test_death_of_a_rank_comes_before_the_error_of_its_peer():
    with pytest.raises(RuntimeError, match=r"\Arank1 died with exit code -9 and no traceback"):
        run_ranks(_one_dies, 2, 100)


@pytest.fixture
def impatient(monkeypatch):
    """The limits that these tests wait for; a busy machine stretches them."""
    monkeypatch.setenv("TEST_PATIENCE", "0.3")


def test_limit_kills_ranks_and_their_children(tmp_path, impatient):
    with pytest.raises(TimeoutError, match="_sleep_with_a_child: limit: no sign of life for 3 s"):
        run_ranks(_sleep_with_a_child, 2, 3, str(tmp_path))
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    alive = lambda: [process for pid in pids for process in family(pid) if is_alive(process)]
    wait_until(lambda: not alive(), 10, f"the end of {pids}")
