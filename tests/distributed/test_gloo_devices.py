# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The gloo groups of a process share one device, whose thread wakes a hundred times a second."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.parallel_state import share_gloo_devices
from tests.distributed.launcher import run_ranks
from tests.patience import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have names on Linux")


def _devices() -> int:
    """Threads of gloo's devices in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def _groups_of_a_model():
    before = _devices()  # of the group of all ranks, which the launcher has made
    parallel_state.initialize(tensor_model_parallel_size=2)
    short = dist.new_group(timeout=timedelta(seconds=7))
    options = short._get_backend(torch.device("cpu")).options
    timeouts = [options._timeout]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), short)
    timeouts.append(options._timeout)
    sums = []
    for group in (short, parallel_state.get_tensor_model_parallel_group(), None):
        x = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(x, group=group)
        sums.append(x.tolist())
    time.sleep(1)  # a thread names itself
    return before, _devices(), len(dist.distributed_c10d._world.pg_map), sums, timeouts


def test_a_model_adds_one_device_for_all_of_its_groups():
    for before, after, groups, sums, timeouts in run_ranks(_groups_of_a_model, 2):
        assert (before, after) == (1, 2)
        assert groups > 20
        assert sums == [[3.0] * 3] * 3
        assert timeouts == [timedelta(seconds=7), timedelta(seconds=5)]


def test_which_groups_have_devices_of_their_own(monkeypatch):
    def must_open(number: int, **options) -> None:
        """A group that is created now opens so many devices."""
        open_now = _devices()
        options = options or {"timeout": timedelta(seconds=60)}
        groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, **options))
        wait_until(lambda: _devices() == open_now + number, 10)
        time.sleep(0.2)
        assert _devices() == open_now + number

    groups = []
    share_gloo_devices()
    share_gloo_devices()
    monkeypatch.setattr(parallel_state, "_devices", {})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    must_open(1)
    must_open(0)
    must_open(0)
    monkeypatch.setattr(os, "getpid", lambda: -2)  # a fork
    must_open(1)
    must_open(0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    must_open(2)
    must_open(0)
    must_open(0, options=groups[0].options)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    must_open(2)
    must_open(2)
