# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a function on several real gloo ranks, each a process of its own, within a time limit.

    def check(scale):                       # a module-level function: children import it by name
        x = torch.ones(2) * scale
        torch.distributed.all_reduce(x)
        return x                            # anything that pickles; collected by rank

    def test_check():
        zero, one = run_ranks(check, 2, 60, 3.0)

When one rank raises, its peers would wait in a collective for ever: the launcher kills them and
shows the traceback.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

PEER_GRACE_S = 2.0  # after the first failure, time for the other ranks to tell theirs


def run_ranks(fn, world_size: int, timeout_s: float = 120, *args) -> list:
    """Call `fn(*args)` on `world_size` new processes that share a gloo process group.

    Args:
        fn: module-level function; the process group exists when it is called (`torch.distributed`
            knows the rank).
        world_size: number of processes.
        timeout_s: limit for everything, the start of the interpreters (a few seconds) included.
        args: arguments of `fn`, the same for every rank.

    Returns:
        What `fn` returned, by rank.

    Raises:
        RuntimeError: a rank raised or died; the message holds the traceback of each, the earliest
        first.
        TimeoutError: the limit passed; the message names the ranks that were still running.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        folder = Path(folder)
        children = [
            context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, str(folder), timeout_s, args),
                name=f"rank{rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for child in children:
                child.start()
            running, dead = _wait(children, folder, time.monotonic() + timeout_s)
        finally:
            _kill(children)
        errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise RuntimeError(
                "\n".join(f"{path.stem} failed:\n{path.read_text()}" for path in errors)
            )
        if running:
            raise TimeoutError(
                f"{fn.__name__}: still running after {timeout_s} s: {', '.join(running)}"
            )
        if dead:
            raise RuntimeError(f"{dead.name} died with exit code {dead.exitcode} and no traceback")
        return [
            torch.load(folder / f"rank{rank}.result", weights_only=False)
            for rank in range(world_size)
        ]


def _wait(children, folder: Path, deadline: float):
    """Wait for all children, or for the deadline, or a little longer than the first failure.

    Returns the names of those that were too slow, and the first child that ended without a result
    (or None).
    """
    left = {child.sentinel: child for child in children}
    failed_at = dead = None
    while left and time.monotonic() < deadline:
        for sentinel in wait(list(left), timeout=0.2):
            child = left.pop(sentinel)
            if not (folder / f"{child.name}.result").exists():
                failed_at = failed_at or time.monotonic()
                dead = dead or child
        if failed_at is None and any(folder.glob("*.error")):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + PEER_GRACE_S:
            break
    # Those that wait for a failed rank are not slow.
    return ([] if failed_at is not None else [child.name for child in left.values()]), dead


def _kill(children) -> None:
    """End every child with all that it started (each leads its own process group), and reap it."""
    for child in children:
        if child.pid is None:  # never started
            continue
        try:
            os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the id still belongs to it
        except ProcessLookupError:
            child.kill()  # it had not become a group leader yet
        child.join()


def _rank_main(fn, rank: int, world_size: int, folder: str, timeout_s: float, args) -> None:
    """Body of one rank: join the group, run, leave the result or the traceback in `folder`."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: a killed test run takes its ranks along
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(*args)
        torch.save(result, os.path.join(folder, f"rank{rank}.part"))
        os.replace(
            os.path.join(folder, f"rank{rank}.part"), os.path.join(folder, f"rank{rank}.result")
        )
        dist.barrier()  # nobody closes its sockets while a peer still reads from them
        dist.destroy_process_group()
    except BaseException:
        partial = os.path.join(folder, f"rank{rank}.part-error")
        Path(partial).write_text(traceback.format_exc())
        os.replace(partial, os.path.join(folder, f"rank{rank}.error"))
        sys.exit(1)
