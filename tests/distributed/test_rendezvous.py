# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine meet where no other machine can."""

import json
import os
import re

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.patience import patience
from tests.warm_start import start_python

pytestmark = pytest.mark.timeout(300)

RANK = """
import json, psutil, torch
import torch.distributed as dist
from nemo_aligner.parallel.parallel_state import _join_world
from datetime import timedelta
_join_world(timedelta(seconds=100))
total = torch.ones(1)
dist.all_reduce(total)
dist.barrier()
connections = psutil.Process().net_connections("tcp")
listening = sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
print("FOUND", json.dumps([total.item(), listening]), flush=True)
dist.barrier()
"""


def found(folder, world_size):
    """Of each rank: the sum of ones, and the addresses on which it listens."""
    (folder / "rank.py").write_text(RANK)
    port = str(find_free_port())
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        start_python(
            [folder / "rank.py"],
            os.environ | job | {"RANK": str(rank), "WORLD_SIZE": str(world_size)},
            folder,
            log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(patience(120)) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(re.search("^FOUND (.*)$", log.read_text(), re.M)[1]) for log in logs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_one_machine_listen_on_loopback_alone(world_size, tmp_path):
    ranks = found(tmp_path, world_size)
    assert len(ranks) == world_size
    for total, listening in ranks:
        assert total == world_size and listening == ["127.0.0.1"]
