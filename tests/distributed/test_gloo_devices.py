# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The gloo groups of a process share one device, whose thread wakes a hundred times a second."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.gloo_devices import _GroupOnSharedDevices
from tests.distributed.launcher import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have names on Linux")


def _devices() -> int:
    """Threads of gloo's devices in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def _groups_of_a_model():
    before = _devices()  # of the group of all ranks, which the launcher has made
    parallel_state.initialize(tensor_model_parallel_size=2)
    short = dist.new_group(timeout=timedelta(seconds=7))
    sums = []
    for group in (short, parallel_state.get_tensor_model_parallel_group(), None):
        x = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(x, group=group)
        sums.append(x.tolist())
    timeout = short._get_backend(torch.device("cpu")).options._timeout
    return before, _devices(), len(dist.distributed_c10d._world.pg_map), sums, timeout


def test_a_model_adds_one_device_for_all_of_its_groups():
    for before, after, groups, sums, timeout in run_ranks(_groups_of_a_model, 2):
        assert (before, after) == (1, 2)
        assert groups > 20
        assert sums == [[3.0] * 3] * 3
        assert timeout == timedelta(seconds=7)


def test_forks_and_other_interfaces_have_devices_of_their_own(monkeypatch):
    def devices_of_a_new_group() -> int:
        before = _devices()
        groups.append(_GroupOnSharedDevices(dist.HashStore(), 0, 1, timedelta(seconds=60)))
        return _devices() - before

    groups = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert [devices_of_a_new_group() for _ in range(3)] == [1, 0, 0]
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert [devices_of_a_new_group() for _ in range(2)] == [1, 0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert [devices_of_a_new_group() for _ in range(2)] == [2, 0]
