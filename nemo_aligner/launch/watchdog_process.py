# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The process beside a rank that kills it when it is stopped, or native code keeps all its threads
from running (launch/watchdog.py starts it, as a file). It reads the rank's phase from a pipe.
Imports only what a bare Python has, and starts in 20 ms.

    python -I -S watchdog_process.py PID NAME TIMEOUT_S ENDING_FILE < pipe
"""

import json
import os
import select
import signal
import sys
import time

LOOK_S = 0.5
# A rank that was not stopped may wait for a core of a busy machine.
WITHOUT_STOP = 3.0
NOT_STOPPED = "native code keeps its threads from running, or a device its calls"


def main(pid: int, name: str, timeout_s: float, ending_file: str) -> None:
    """Watch the parent `pid` until it ends. It may be stopped for `timeout_s`, in seconds that
    this process runs (Ctrl-Z stops both), and silent for another reason `WITHOUT_STOP` times as
    long. `ending_file` is its `ending.json`; empty if it writes none.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # to the process group: they ask the rank
    phase, silent_s, last = "start", 0.0, time.monotonic()
    while os.getppid() == pid:
        if select.select([0], [], [], LOOK_S)[0]:
            text = os.read(0, 65536)
            if not text:
                return
            phase, silent_s = text.decode().split("\n")[-2], 0.0
        now = time.monotonic()
        silent_s, last = silent_s + min(now - last, 2 * LOOK_S), now
        if silent_s > timeout_s and os.getppid() == pid:
            is_stopped = _state(pid) in ("T", "t")
            if not is_stopped and silent_s < WITHOUT_STOP * timeout_s:
                continue
            why = "it was stopped, as by SIGSTOP" if is_stopped else NOT_STOPPED
            reason = f"{name} has not run for {silent_s:.0f} s in phase {phase!r} ({why})"
            print(
                f"\nHUNG: {reason}; process {pid} is killed. The same command continues.",
                file=sys.stderr,
                flush=True,
            )
            if ending_file:
                _note_ending(ending_file, reason)
            os.kill(pid, signal.SIGKILL)
            return


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _note_ending(file: str, reason: str) -> None:
    ending = {
        "code": 128 + signal.SIGKILL,
        "name": "SIGKILL",
        "reason": reason,
        "step": None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
    try:
        with open(file + ".part", "w") as out:
            out.write(json.dumps(ending) + "\n")
        os.replace(file + ".part", file)
    except OSError as error:  # the disk may be what hangs
        print(f"{file}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4])
