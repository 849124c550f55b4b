# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Python processes for tests that start with the slow imports done.

    job = start_python(["-m", "nemo_aligner.generate", "model=..."], environment, folder, log)
    assert job.wait(60) == 0

Importing torch, NeMo and Megatron Core takes a process ten seconds of CPU time. So the processes
of `make test` are forks of one that has done it; from there on they do what `python` does: the
script runs as `__main__`, with its own arguments, environment, folder, session and exit code. The
ranks that the script, or torchrun, starts with `subprocess.Popen` are forks too, and its children
as they are with `Popen`. What they cannot show is a missing import, and what is in
/proc/PID/environ. With `COLD_START=1` in the environment every process is a new `python`.
"""

import atexit
import ctypes
import importlib
import multiprocessing
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from tests import imports_done

# By the process whose forks the ranks and jobs are.
PRELOADED = [
    "tests",
    "nemo_aligner.algorithms.critic_server_trainer",
    "nemo_aligner.algorithms.reward_server",
    "nemo_aligner.algorithms.ppo",
    "nemo_aligner.algorithms.rs",
    "nemo_aligner.algorithms.supervised",
    "nemo_aligner.checkpoint.checkpointing",
    "nemo_aligner.checkpoint.hugging_face.peft",
    "nemo_aligner.checkpoint.megatron",
    "nemo_aligner.launch.experiment",
    "nemo_aligner.launch.model_loading",
    "nemo_aligner.launch.rollout_job",
    "nemo_aligner.launch.supervised_job",
    "nemo_aligner.models.nlp.gpt.megatron_gpt_critic",
    "nemo_aligner.models.nlp.gpt.megatron_gpt_policy",
    "nemo_aligner.servers.agents",
    "nemo_aligner.servers.critic_client",
    "nemo_aligner.servers.teachers",
    "torch.distributed.run",
    "pytriton.triton",
    "transformers.models.llama.configuration_llama",  # imports what others need too
    "tests.warm_start",
]
_LIBC = ctypes.CDLL(None)  # loaded now: after a fork only the simplest of calls is safe


def fork_server() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forks of one that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pid = forkserver._forkserver._forkserver_pid
    ended = pid and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended:  # Python starts another one without a word, but all forks of this one have ended
        how = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
        warnings.warn(f"the fork server has died: {how} {ended.si_status}", stacklevel=2)
    return context


class WarmProcess:
    """A fork that is `command`, with the part of `subprocess.Popen`'s interface that tests use.
    The further arguments are those of `_first_process`.
    """

    def __init__(self, command: list[str], *inherited):
        self.args = command
        self._process = fork_server().Process(target=_first_process, args=(command, *inherited))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    ranks: int = 0,
) -> "WarmProcess | subprocess.Popen":
    """Start `python ARGUMENTS` in a session of its own; it ends with the test run.

    Args:
        arguments: a script with its arguments, or "-m", a module and its arguments.
        environment: all of its variables.
        folder: where it runs.
        log: file that its output is appended to, errors included.
        ranks: how many more processes the script, or torchrun, is going to start.
    """
    log.touch()
    command = [sys.executable, *map(str, arguments)]
    if not os.environ.get("COLD_START"):
        return WarmProcess(command, dict(environment), str(folder), str(log), ranks)
    with log.open("a") as out:
        parts = {"env": environment, "cwd": folder, "stdin": subprocess.DEVNULL, "stdout": out}
        parts |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        parts |= {"preexec_fn": _end_with_parent}
        return subprocess.Popen(command, **parts)


def _end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have this process get `number` when its parent has ended; 0: nothing."""
    _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG


# ---- in the forks ----


def _first_process(
    command: list[str], environment: dict, folder: str, log: str, ranks: int
) -> None:
    """Body of a `WarmProcess`."""
    imports_done()
    os.setsid()
    _end_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    _replace_popen([_Spare() for _ in range(ranks)])
    _be_python(command, environment, folder)


class _Spare:
    """A fork of this process, from before anything has happened in it; it waits for a command."""

    def __init__(self) -> None:
        self._line, others = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _end_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            with others.makefile("rb") as file:
                try:
                    command, environment, folder, new_session = pickle.load(file)
                except EOFError:  # the job has ended without a rank
                    os._exit(0)
                _end_with_parent(0)  # as a process that `Popen` starts
                if new_session:
                    os.setsid()
                others.sendall(b"1")
            others.close()
            _be_python(command, environment, folder)
        others.close()

    def start(
        self, command: Sequence[str], environment: dict, folder: str | None, new_session: bool
    ) -> "_Started":
        self._line.sendall(pickle.dumps((list(command), environment, folder, new_session)))
        self._line.recv(1)
        self._line.close()
        return _Started(self.pid, command)


class _Started(subprocess.Popen):
    """A child of this process that `_Spare` has started."""

    def __init__(self, pid: int, command: Sequence[str]):
        self.pid, self.args, self.returncode = pid, command, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        self._sigint_wait_secs = 0.25


def _replace_popen(spares: list[_Spare]) -> None:
    """Have Lightning's launcher and torchrun start their ranks from `spares`."""

    def popen(args, env=None, cwd=None, stdout=None, stderr=None, start_new_session=False):
        assert args[0] == sys.executable and stdout is None and stderr is None, args
        return spares.pop(0).start(
            args, dict(os.environ if env is None else env), cwd, start_new_session
        )

    handlers = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(handlers).Popen = popen
    launchers = "lightning.pytorch.strategies.launchers.subprocess_script"
    importlib.import_module(launchers).subprocess = types.SimpleNamespace(Popen=popen)


def _be_python(command: Sequence[str], environment: dict, folder: str | None) -> None:
    """Be the process `command`, an interpreter with arguments, from here to its end."""
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    _forget_the_server()
    arguments = list(command[1:])
    while arguments[0] == "-u":  # unbuffered: so it is
        arguments.pop(0)
    code = 1
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _forget_the_server() -> None:
    """Undo what a fork inherits, or what the interpreter reads at its start."""
    import numpy as np
    import torch
    from nemo.utils import logging
    from nemo.utils.get_rank import is_global_rank_zero

    # A tracker of its own, which removes the shared memory of a process that is killed.
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    multiprocessing.process._parent_process = None
    multiprocessing.current_process()._config.pop("daemon", None)
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if not is_global_rank_zero():  # NeMo decides at its import who writes
        logging.remove_stream_handlers()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _end(code: int) -> None:
    """What the interpreter does at its end."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)
