# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Waiting for replies on several ranks at once: no rank runs into a time limit, and all raise the
failure of one.
"""

import concurrent.futures
import threading
import time
from datetime import timedelta

import pytest
import torch

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers import futures
from nemo_aligner.servers.futures import wait_for_all
from tests.distributed.launcher import run_ranks


class Reply:
    """A reply that comes after `seconds`, or an error in its place."""

    def __init__(self, seconds: float, error: Exception | None = None):
        self._future = concurrent.futures.Future()
        finish, value = self._future.set_result, {}
        if error:
            finish, value = self._future.set_exception, error
        timer = threading.Timer(seconds, finish, [value])
        timer.daemon = True
        timer.start()

    def done(self, timeout_s: float) -> bool:
        return bool(concurrent.futures.wait([self._future], timeout_s).done)

    def result(self) -> dict:
        return self._future.result()


def wait_longer_than_a_collective_may(replies):
    """Collectives have two seconds here, and rank 1's second reply takes five."""
    torch.distributed.distributed_c10d._set_pg_timeout(
        timedelta(seconds=2), torch.distributed.group.WORLD
    )
    futures.JOINT_HEARTBEAT_S = 0.5
    start = time.monotonic()
    wait_for_all([Reply(seconds) for seconds in replies[torch.distributed.get_rank()]])
    return time.monotonic() - start


def test_a_rank_that_is_done_waits_for_the_others_without_a_time_limit():
    waited = run_ranks(wait_longer_than_a_collective_may, 2, 60, [[0.1], [0.1, 5.0]])
    assert all(4.5 < seconds < 60.0 for seconds in waited)


FAILURES = {
    "reply": (ServerRequestError("the model said no"), "the model said no"),
    "sending": (UserError("the rollout is too wide"), "the rollout is too wide"),
    "other": (KeyError("rewards"), "KeyError('rewards')"),
}


def hear_of_failures():
    futures.JOINT_HEARTBEAT_S = 0.5
    heard = []
    for kind, (error, _) in FAILURES.items():
        failing = error if kind == "sending" else Reply(0.2, error)
        replies = [Reply(0.1), failing if torch.distributed.get_rank() == 1 else Reply(30.0)]
        with pytest.raises(ServerRequestError) as caught:
            wait_for_all(replies)
        heard.append(str(caught.value))
    return heard


def test_all_ranks_raise_what_one_rank_met():
    said = [text for _, text in FAILURES.values()]
    assert run_ranks(hear_of_failures, 2, 60) == [said, said]
