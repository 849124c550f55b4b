# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The launcher of the distributed tests: results by rank, tracebacks, deaths, time limits, and
nothing left behind.
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


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_by_rank_and_no_folder_left():
    before = set(Path(tempfile.gettempdir()).glob("ranks-*"))
    assert run_ranks(_sum_of_ranks, 2, 60, 10.0) == [(0, 30.0), (1, 30.0)]
    assert set(Path(tempfile.gettempdir()).glob("ranks-*")) <= before


def test_traceback_of_a_failing_rank():
    start = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match=r"(?s)rank1 failed:.*_one_raises_while_the_other_waits.*KeyError: 'planted'",
    ):
        run_ranks(_one_raises_while_the_other_waits, 2, 100)
    assert time.monotonic() - start < 60


def test_death_of_a_rank():
    with pytest.raises(RuntimeError, match="rank1 died with exit code -9|rank0 failed:"):
        run_ranks(_one_dies, 2, 100)


def test_time_limit_kills_ranks_and_their_children(tmp_path):
    with pytest.raises(
        TimeoutError, match="_sleep_with_a_child: still running after 20 s: rank0, rank1"
    ):
        run_ranks(_sleep_with_a_child, 2, 20, str(tmp_path))
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_running, pids))
