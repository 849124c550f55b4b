# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes of a test's jobs."""

import contextlib
import time
from collections.abc import Iterable

import psutil

from tests.patience import Deadline


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs and is no zombie; one that ends while it is asked does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[psutil.Process]:
    """A process, then what it has started, however far down; nobody once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def left_of(processes: Iterable[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """Those that are alive after `grace_s` of a quiet machine: some end after their parent."""
    alive, deadline = [*filter(is_alive, processes)], Deadline(grace_s)
    while alive and not deadline.passed():
        time.sleep(0.1)
        alive = [*filter(is_alive, alive)]
    return alive
