# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine meet where no other machine can."""

import json
import os
import subprocess
import sys

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.patience import patience

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


def found(world_size, address):
    """Of each rank: the sum of ones, and the addresses on which it listens."""
    port = str(find_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ
            | {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            | {"RANK": str(rank), "WORLD_SIZE": str(world_size)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=patience(120))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line for text in outputs for line in text.splitlines() if line.startswith("FOUND")]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


@pytest.mark.parametrize(
    "world_size, address", [pytest.param(1, "127.0.0.1", marks=pytest.mark.full), (2, "127.0.0.1")]
)
def test_ranks_of_one_machine_listen_on_loopback_alone(world_size, address):
    ranks = found(world_size, address)
    assert len(ranks) == world_size
    for total, listening in ranks:
        assert total == world_size and listening == ["127.0.0.1"]
