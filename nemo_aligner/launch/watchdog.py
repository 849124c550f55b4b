# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends a job whose ranks hang, so that its launcher can start it again.

* A rank that is stopped is killed by the process beside it, after half of the time, and one that
  does not run for another reason after one and a half (`watchdog_process.py`).
* Where progress is expected (in the steps of training, and while a server serves), and no rank
  makes any for the whole time, all ranks end with `LOST_PEER`. The lowest says which rank stands
  where. A rank that waits for a slow one raises no alarm: the progress of all counts.

Only seconds in which the watchdog itself runs are counted, so neither a machine that sleeps nor a
job that is stopped as a whole raises an alarm.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import FrameType

import torch

from nemo_aligner.core.endings import (
    ExitCode,
    ending_file,
    note_ending,
    progress,
    stand_in_for_rank_zero,
)
from nemo_aligner.launch import endings
from nemo_aligner.servers.control_group import JobStore, StoreLostError
from nemo_aligner.training.stop_requests import SIGNALS, stop_requests

SIGN_S = 0.5  # between two signs of life to the process beside
MOST_LOOKS = 20  # at the progress within the time-out
REPLY_S = 10.0  # how long ranks that hang have to say where they stand
NAMED = 4  # most ranks that a message names


class Watchdog:
    """Watches this rank, with those of the other ranks; see the module."""

    def __init__(self, timeout_s: float, rank: int, size: int) -> None:
        self.timeout_s, self.rank, self.size = timeout_s, rank, size
        reply_s = min(REPLY_S, timeout_s / 4)
        self._store = JobStore(size, "nemo_aligner/watchdog", reply_s)
        self._main = threading.main_thread().ident
        self._beside: subprocess.Popen | None = None

    def start(self) -> None:
        """Watch until this process ends."""
        for work in (self._give_signs, self._look):
            threading.Thread(target=work, daemon=True, name=f"watchdog {work.__name__}").start()

    # ---- the rank runs ----

    def _give_signs(self) -> None:
        """Thread: say to the process beside that this one runs. Does nothing that can block."""
        # That process inherits it, and does not end by a Ctrl-C before it can ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while True:
            if self._beside is None or self._beside.poll() is not None:
                self._beside = self._start_process()
            assert self._beside.stdin is not None
            # Full: the process beside stands still, and may go on. Closed: a new one is started.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._beside.stdin.fileno(), f"{progress.phase}\n".encode())
            time.sleep(min(SIGN_S, self.timeout_s / 20))

    def _start_process(self) -> subprocess.Popen:
        name = f"rank {self.rank} of {self.size}"
        words = [str(os.getpid()), name, str(self.timeout_s / 2), str(ending_file() or "")]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", f"{__file__[:-3]}_process.py", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    # ---- the ranks make progress ----

    def _look(self) -> None:
        """Thread: end the job when no rank makes progress, or none that this one hears of."""
        pause_s = self.timeout_s / MOST_LOOKS
        own, of_all, idle_s, last = -1, -1, 0.0, time.monotonic()
        while True:
            time.sleep(pause_s)
            now = time.monotonic()
            idle_s, last = idle_s + min(now - last, 2 * pause_s), now
            has_moved = progress.count != own or not progress.is_expected
            own = progress.count
            total = of_all
            with contextlib.suppress(RuntimeError):  # no store: others may move, but who knows
                total = self._store.add("progress", int(has_moved))
            if has_moved or total != of_all:
                of_all, idle_s = total, 0.0
            elif idle_s > self.timeout_s:
                self._end_the_job()

    def _end_the_job(self) -> None:
        frame = sys._current_frames()[self._main or 0]
        in_collective = "/torch/distributed/" in frame.f_code.co_filename
        mine = {"phase": progress.phase, "place": _place(frame), "waits": in_collective}
        mine["stack"] = "".join(traceback.format_stack(frame))
        found, is_said = {self.rank: mine}, False
        try:
            self._store.put(f"stands {self.rank}", json.dumps(mine))
            deadline = time.monotonic() + REPLY_S
            while len(found) < self.size and time.monotonic() < deadline:
                time.sleep(0.1)
                for rank in range(self.size):
                    if rank not in found and (text := self._store.get(f"stands {rank}")):
                        found[rank] = json.loads(text)
        except StoreLostError:  # each machine says it, of what it knows
            is_said = int(os.environ.get("LOCAL_RANK", 0)) > 0
        except RuntimeError:  # the store has ended with rank 0, of which the log says why
            is_said = True
        reason = self._what_hangs(found)
        if self.rank == min(found) and not is_said:
            stand_in_for_rank_zero()  # if it is another one
            shown = min(found, key=lambda rank: (found[rank]["waits"], rank))
            print(
                f"\nERROR: {reason}. The same command continues.\n\nRank {shown} stands here:\n"
                f"{found[shown]['stack']}",
                file=sys.stderr,
                flush=True,
            )
        note_ending(ExitCode.LOST_PEER, reason, stop_requests.step)
        self._wait_until_said(min(found))
        if progress.before_exit is not None:
            progress.before_exit()
        endings.end_at_once(ExitCode.LOST_PEER)

    def _wait_until_said(self, first: int) -> None:
        """Until rank `first` has printed what hangs: an end before would break its collective."""
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
            if self.rank == first:
                self._store.put("said", "yes")
            deadline = time.monotonic() + REPLY_S
            while not self._store.get("said") and time.monotonic() < deadline:
                time.sleep(0.1)

    def _what_hangs(self, found: dict[int, dict]) -> str:
        """One line; `found` says of the ranks that have replied where they stand."""
        parts = [f"rank {r} does not reply" for r in range(self.size) if r not in found]
        parts += [
            f"rank {rank} stands in phase {each['phase']!r} at {each['place']}"
            for rank, each in sorted(found.items())
            if not each["waits"]
        ]
        if not parts:
            first = found[min(found)]
            parts = [f"all wait for each other, rank {min(found)} at {first['place']}"]
        more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
        return (
            f"no rank has made progress for {self.timeout_s:.0f} s (trainer.hang_timeout_s): "
            + "; ".join(parts[:NAMED])
            + more
        )


def _place(frame: FrameType | None) -> str:
    """The innermost line outside PyTorch."""
    inner, root = frame, os.path.dirname(torch.__file__)
    while frame is not None and frame.f_code.co_filename.startswith(root):
        frame = frame.f_back
    frame = frame or inner
    assert frame is not None
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} ({code.co_name})"


_watchdogs: list[Watchdog] = []


def watch(timeout_s: float | None, rank: int = 0, size: int = 1) -> None:
    """Watch this process; every rank calls it, with `trainer.hang_timeout_s`; None or 0: not
    watched.
    """
    if timeout_s and not _watchdogs:
        _watchdogs.append(Watchdog(timeout_s, rank, size))
        _watchdogs[0].start()
