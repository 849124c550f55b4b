# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Python code of a user, a function or a class in a file, and the processes that run it."""

import ast
import re
import threading
from pathlib import Path
from typing import Any

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.servers.worker_process import WorkerEndedError, WorkerProcess

# How long the file may take to load.
LOAD_TIMEOUT_S = 120.0


def split_spec(spec: str, key: str, kind: str, example: str) -> tuple[str, str]:
    """(absolute path, name) of "path/to/file.py:name", the value of `key`.

    Raises:
        ConfigError: it is not of that form.
        UserError: there is no such file, it is no Python, or does not hold the name at all. More
            is known when it runs.
    """
    path, _, name = str(spec).rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{key}={spec} does not name a {kind}; write path/to/file.py:{kind}, such as "
            f"{example}."
        )
    absolute = Path(path).expanduser().absolute()
    if not absolute.is_file():
        raise UserError(
            f"{key}={spec}: the file {absolute} does not exist; a relative path counts from the "
            "folder in which the job is started."
        )
    source = absolute.read_text(encoding="utf-8", errors="replace")
    try:
        statements = ast.parse(source, absolute.name).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}={spec}: the file cannot be imported: {error}.") from None
    if not re.search(rf"\b({name}|import \*|__getattr__)", source):
        type_ = {"class": ast.ClassDef}.get(kind, ast.FunctionDef)
        own = ", ".join(node.name for node in statements if isinstance(node, type_))
        raise UserError(
            f"{key}={spec}: the file has no {kind} '{name}'; it has {own or 'none at all'}."
        )
    return str(absolute), name


class ClosedError(UserError):
    """The workers are shut down, so none can start."""


class Workers:
    """The worker processes that run one function or class. Any thread may call the methods; a
    worker ends with the thread that started it.

    Args:
        program: path of the program that a worker runs (`reward_worker.py`).
        setting: "key=value" of the configuration, for messages.

    Attributes:
        described: what the program told of the code, once a worker has loaded it.
    """

    described: Any = None

    def __init__(self, path: str, name: str, program: str, setting: str):
        self.path, self.name, self.program, self.setting = path, name, program, setting
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[WorkerProcess] = set()

    def start(self) -> WorkerProcess:
        """Start a worker and wait until it has loaded the code.

        Raises:
            UserError: it cannot be loaded.
            ClosedError: after `close`.
        """
        worker = WorkerProcess(self.path, self.name, self.program)
        with self._lock:
            self._running.add(worker)
            closed = self._closed
        try:
            if closed:
                raise ClosedError(f"{self.setting} is shut down")
            kind, text = worker.receive(LOAD_TIMEOUT_S)
        except TimeoutError:
            kind, text = "error", f"loading the file took longer than {LOAD_TIMEOUT_S:g} s"
        except WorkerEndedError as error:
            kind, text = "error", f"loading the file ended the process ({error})"
        except BaseException:
            self.end(worker)
            raise
        if kind == "error":
            self.end(worker)
            raise UserError(f"{self.setting} ({self.path}): {text}")
        self.described = text
        return worker

    def end(self, worker: WorkerProcess | None) -> None:
        """Kill a worker; only the thread that started it calls it. None is nothing to do."""
        if worker is not None:
            worker.kill()
            worker.release()
            with self._lock:
                self._running.discard(worker)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._running)
        for worker in workers:
            worker.kill()
