# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The end of a server whose host stops slowly: one party ends the process, and says why once."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.control_group import JobStore, StoreLostError

PROGRAM = """
import queue, sys, threading, time
from types import SimpleNamespace
from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers import server_loop

stops_s, kills_s, patience_s = map(float, sys.argv[1:])
timer = threading.Timer
server_loop.threading.Timer = lambda _, function: timer(patience_s, function)
loop = object.__new__(server_loop.ServerLoop)
loop.name, loop.rank, loop._current = "the server", 0, None
loop._admission, loop._queue = threading.Lock(), queue.Queue()
loop._store = SimpleNamespace(put=lambda *_: None)
loop._front = SimpleNamespace(
    port=1,
    close=lambda: time.sleep(stops_s),
    kill=lambda: (print("killed", flush=True), time.sleep(kills_s)),
)
loop._close(ExitCode.LOST_PEER, "the reason")
print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops_s", "kills_s", "said", "code"),
    [
        (0, 0, ["ended"], 0),
        (1.5, 2, ["killed"], ExitCode.LOST_PEER),  # the stop ends while the guard cleans up
    ],
)
def test_a_stop_and_its_guard_do_not_both_end_the_process(stops_s, kills_s, said, code):
    words = [sys.executable, "-c", PROGRAM, str(stops_s), str(kills_s), "1" if stops_s else "60"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    found = [word for word in result.stdout.split() if word in ("killed", "ended")]
    assert (found, result.returncode) == (said, code), result.stdout + result.stderr
    assert result.stderr.count("ERROR: the reason") == (1 if code else 0)


class _Meanwhile:
    """A store of one rank; whenever a key is looked for, another rank does something next."""

    def __init__(self, store, act):
        self._store, self._act = store, act

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        found = self._store.check(keys)
        self._act()
        return found


def test_a_note_that_is_withdrawn_while_it_is_read_holds_no_rank(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    mine, others = JobStore(2, "job", reply_s=2.0), JobStore(2, "job")

    def read(key):
        try:
            return mine.get(key)
        except StoreLostError:
            return "lost"

    others.put("failure", "on rank 1: why")
    assert read("failure") == "on rank 1: why"
    mine._store = _Meanwhile(mine._store, lambda: others.withdraw("failure"))
    assert read("failure") is None
    others.put("stop", "received SIGTERM")
    assert read("stop") == "received SIGTERM"
