# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a function on several real gloo ranks, each a process of its own.

    def check(scale):                       # a module-level function: children import it by name
        x = torch.ones(2) * scale
        torch.distributed.all_reduce(x)
        return x                            # anything that pickles; collected by rank

    def test_check():
        zero, one = run_ranks(check, 2, 60, 3.0)

When one rank fails, its peers would wait in a collective for ever: the launcher kills them and
raises the first cause. The limit is one of silence: ranks that call `progress` after each step
may take as long as they need, whatever else runs on the machine.

Ranks are forks of a process that has imported the package: importing takes each of them seconds
otherwise.
"""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tests import imports_done
from tests.patience import Deadline, wait_until
from tests.warm_start import fork_server

START_S = 300.0  # silence of ranks that have not started yet: they may wait for imports
PEER_GRACE_S = 2.0  # after the first failure, time for the other ranks to report theirs
STACKS_S = 10.0  # for the stacks of ranks that hang
# A rank whose peer died raises one of these: a consequence, never the cause.
LOST_PEER = re.compile(
    r"Connection (closed|reset|refused) by|Broken pipe|pair closure|Application timeout"
)

_progress_file: Path | None = None  # of this process, if it is a rank


def progress(what: str) -> None:
    """Report a finished step, `what`, as a sign of life. Does nothing outside a rank."""
    if _progress_file is not None:
        with _progress_file.open("a") as file:
            file.write(f"{what}\n")


def at_each(splits: dict[str, dict], compute: Callable, *args) -> dict:
    """Body of a rank: what `compute(*args, **split)` gives at each split, by the split's name."""
    from megatron.core.parallel_state import destroy_model_parallel

    results = {}
    for name, split in splits.items():
        results[name] = compute(*args, **split)
        progress(name)
        destroy_model_parallel()  # the ranks stay
    return results


def run_ranks(fn: Callable, world_size: int, silence_s: float = 120.0, *args) -> list:
    """Call `fn(*args)` on `world_size` new processes that share a gloo process group.

    Args:
        fn: module-level function; the process group exists when it is called (`torch.distributed`
            knows the rank).
        world_size: number of processes.
        silence_s: limit for the time in which no rank calls `progress`, starts or ends, in seconds
            of a quiet machine (see `tests.patience`). All of it may take 20 times as long.
        args: arguments of `fn`, the same for every rank.

    Returns:
        What `fn` returned, by rank.

    Raises:
        RuntimeError: a rank raised or died; the message holds the traceback of each, the first
        cause first.
        TimeoutError: a limit struck; the message tells the last sign of life of each rank and the
        stacks of those that were still running.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        rest = world_size, folder, dict(os.environ), args
        given = {f"rank{rank}": (fn, rank, *rest) for rank in range(world_size)}
        children = [context.Process(target=_rank_main, args=a, name=n) for n, a in given.items()]
        try:
            for child in children:
                child.start()
            failures, struck = _watch(children, folder, silence_s)
            if failures:
                raise RuntimeError("\n".join(failures))
            if struck:
                raise TimeoutError(f"{fn.__name__}: {struck}\n{_stacks(children, folder)}")
        finally:
            _kill(children)
        files = [folder / f"rank{rank}.result" for rank in range(world_size)]
        return [torch.load(file, weights_only=False) for file in files]


class _Signs:
    """The signs of life of all ranks: the last one of each, and how long ago it was noticed."""

    def __init__(self, folder: Path, names: list[str]):
        self._folder = folder
        self._seen = dict.fromkeys(names, ("", time.monotonic()))

    def new(self) -> bool:
        """Whether any rank has given a sign since the last call."""
        found = False
        for name, (text, _) in self._seen.items():
            path = self._folder / f"{name}.progress"
            now = path.read_text() if path.exists() else ""
            if now != text:
                self._seen[name] = now, time.monotonic()
                found = True
        return found

    def all_started(self) -> bool:
        return all(text for text, _ in self._seen.values())

    def __str__(self) -> str:
        last = sorted(self._seen.items(), key=lambda item: -item[1][1])
        line = lambda text: text.splitlines()[-1] if text else "not started"
        ago = {name: (time.monotonic() - at, line(text)) for name, (text, at) in last}
        return "\n".join(f"  {name}, {s:.0f} s ago: {text}" for name, (s, text) in ago.items())


def _watch(
    children: list[BaseProcess], folder: Path, silence_s: float
) -> tuple[list[str], str | None]:
    """Wait until all children have ended, one has failed, or a limit strikes.

    Returns the failures, the first cause first, and a text on the limit that struck, or None.
    """
    left = {child.sentinel: child for child in children}
    signs = _Signs(folder, [child.name for child in children])
    start, silence = Deadline(max(START_S, silence_s)), Deadline(silence_s)
    total, grace = Deadline(20 * silence_s), Deadline(PEER_GRACE_S)
    failures: dict[str, tuple] = {}  # name of the rank -> (is a consequence, when, text)
    while left:
        for sentinel in wait(list(left), timeout=0.2):
            child = left.pop(sentinel)
            silence.restart()
            child.join()
            if not any((folder / f"{child.name}.{end}").exists() for end in ("result", "error")):
                text = f"{child.name} died with exit code {child.exitcode} and no traceback"
                failures.setdefault(child.name, (False, time.time_ns(), text))
        for path in folder.glob("*.error"):
            text = path.read_text()
            lost = LOST_PEER.search(text) is not None
            failure = lost, path.stat().st_mtime_ns, f"{path.stem} failed:\n{text}"
            failures.setdefault(path.stem, failure)
        if not failures:
            grace.restart()
        elif grace.passed():
            break
        if signs.new():
            silence.restart()
        limit = silence if signs.all_started() else start
        if not failures and left and limit.passed():
            return [], f"limit: no sign of life for {limit.seconds:g} s. The last ones:\n{signs}"
        if not failures and left and total.passed():
            return [], f"limit: no end after {total.seconds:g} s. The last signs:\n{signs}"
    return [text for *_, text in sorted(failures.values())], None


def _stacks(children: list[BaseProcess], folder: Path) -> str:
    """The stack of each thread of the ranks that still run."""
    running = [child for child in children if child.is_alive()]
    files = [folder / f"{child.name}.stacks" for child in running]
    for child, file in zip(running, files):
        if file.exists():  # the rank has registered its handler
            os.kill(child.pid, signal.SIGUSR1)
    try:
        wait_until(lambda: all(f.exists() and f.stat().st_size for f in files), STACKS_S)
        time.sleep(0.2)  # the handler writes line by line
    except AssertionError:
        pass  # show what there is
    texts = {file.stem: file.read_text() if file.exists() else "none" for file in files}
    return "\n".join(f"Stacks of {name}:\n{text}" for name, text in texts.items())


def _kill(children: list[BaseProcess]) -> None:
    """End every child with all that it started (each leads its own process group)."""
    for child in children:
        if child.pid is None:  # never started
            continue
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # all of it has ended, or it has not become a leader yet
            child.kill()
        child.join()


def _end_with_the_test_run() -> None:
    """End this rank and all that it started when the process that launched it has ended."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _rank_main(fn, rank: int, world_size: int, folder: Path, environment: dict, args) -> None:
    """Body of one rank: join the group, run, leave the result or the traceback in `folder`."""
    global _progress_file
    imports_done()
    os.setsid()
    threading.Thread(target=_end_with_the_test_run, daemon=True).start()
    with open(folder / f"rank{rank}.stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        _progress_file = folder / f"rank{rank}.progress"
        progress("started")
        os.environ.clear()  # a fork has the environment of the first launch
        os.environ.update(environment)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **sizes)
        torch.set_num_threads(1)
        try:
            # The launcher's limits strike first: it knows which rank hangs.
            store = dist.FileStore(str(folder / "store"), world_size)
            store.set_timeout(timedelta(days=1))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(days=1)
            )
            progress("joined the process group")
            _write(fn(*args), folder / f"rank{rank}.result")
            progress("finished")
            dist.barrier()  # nobody closes its sockets while a peer still reads from them
            dist.destroy_process_group()
        except BaseException:
            partial = folder / f"rank{rank}.part-error"
            partial.write_text(traceback.format_exc())
            os.replace(partial, folder / f"rank{rank}.error")
            sys.exit(1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _write(result: object, path: Path) -> None:
    partial = path.with_suffix(".part")
    torch.save(result, partial)
    os.replace(partial, path)
