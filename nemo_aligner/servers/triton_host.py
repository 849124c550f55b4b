# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton in a server job's rank 0, the front before it, and the removal of all they leave."""

import contextlib
import functools
import gc
import glob
import os
import shutil
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import psutil
from nemo.utils import logging

from nemo_aligner.core.leftovers import SHARED_MEMORY, shared_memory_prefix, temporary_folder
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.front import REQUEST_PARAMETER, Front, SocketConnection, Triton
from nemo_aligner.servers.schema import MOST_ROWS, Arrays, Endpoint, Handler, triton_tensors
from nemo_aligner.servers.triton_environment import (
    folder_of_workspaces,
    prepare_triton_environment,
)

Method = TypeVar("Method", bound=Callable[..., Any])

# Within which Triton is ready, or is started again; after the last the job gives up. It needs a
# few seconds; one that hangs for a reason that `_check_start` does not see costs the first.
START_S = (60.0, 120.0, 300.0)
LOOK_S = 0.2  # between two looks at its processes while it starts
REPLACED_S = 15.0  # within which Triton replaces a stub that it has ended itself
PROBE_S = 5.0  # within which a Triton that runs says so
MOST_UNANSWERED = 6  # probes in a row


def lock_method(lock_name: str) -> Callable[[Method], Method]:
    """Decorator: run the method while holding the lock named by e.g. "self.lock"."""
    attribute = lock_name.removeprefix("self.")

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def locked(self: object, *args: Any, **kwargs: Any) -> Any:
            with getattr(self, attribute):
                return method(self, *args, **kwargs)

        return locked  # type: ignore[return-value]

    return decorate


class TritonStartError(RuntimeError):
    """Triton, or one of its processes, ended while it started, or it did not become ready."""


class TritonHost:
    """Triton, and the removal of all it leaves. `batcher`: of PyTriton's DynamicBatcher."""

    name = "Triton"

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
        batcher: Mapping[str, Any],
        tls: ssl.SSLContext | None = None,
    ):
        self.host, self.port, self._endpoints = host, port, endpoints
        self._access, self._batcher, self._tls = access, batcher, tls
        self._triton: Any = None  # a `SocketTriton` while it runs
        self._front: Front | None = None
        self._directory: str | None = None
        self._memory_prefix: str | None = None
        self._lock = threading.Lock()
        # By endpoint, the processes without which it cannot serve.
        self._stubs: dict[str, list[psutil.Process]] = {}
        self._last_seen: dict[str, float] = {}  # when its stub was alive, while Triton starts
        self._unanswered = 0  # probes since Triton last replied to one

    def start(self, should_stop: Callable[[], bool]) -> None:
        """See `Host.start`. Triton may end or hang on a busy machine: it is started again, with
        more patience. `UserError`: the port is taken, or this Python cannot run Triton.
        `TritonStartError`: Triton did not start, each time.
        """
        prepare_triton_environment()
        for number, patience_s in enumerate(START_S, 1):
            try:
                self._start(should_stop, patience_s)
                return
            except TritonStartError as error:
                if number == len(START_S):
                    raise
                self.stop()
                logging.warning(f"{error}; starting it again ({number + 1} of {len(START_S)})")

    def _start(self, should_stop: Callable[[], bool], patience_s: float) -> None:
        self._directory = str(temporary_folder("triton_", folder_of_workspaces()))  # of mode 0700
        self._memory_prefix = shared_memory_prefix()
        self._stubs, self._last_seen, self._unanswered = {}, {}, 0
        from nemo_aligner.servers.socket_triton import SocketTriton

        triton = SocketTriton(self._directory, self._memory_prefix)
        behind = Triton(triton.socket_path)
        given = self._endpoints, self._access, self._tls, behind
        self._front = Front(self.host, self.port, *given)
        self._front.take_port()
        self._triton = triton
        try:
            for endpoint, _function in self._endpoints:
                self._bind(endpoint, behind)
            self._run(should_stop, patience_s)
        except Exception:
            with contextlib.suppress(OSError), open(triton.log_path, errors="replace") as log:
                end = "".join(log.readlines()[-15:])
                logging.error(f"Triton did not start. The end of its log:\n{end}")
            raise

    def _bind(self, endpoint: Endpoint, behind: Triton) -> None:
        from pytriton.model_config import DynamicBatcher, ModelConfig

        def hand_over(requests: list[Any]) -> list[Arrays]:
            # Triton hands over together what arrives together. Computed as one batch, the last
            # bits of a score would depend on that, and a bad request would fail good ones.
            for request in requests:
                behind.hand_over(request.parameters[REQUEST_PARAMETER])
            return [endpoint.empty_reply(len(next(iter(each.values())))) for each in requests]

        batcher = DynamicBatcher(**self._batcher)
        config = ModelConfig(batching=False, max_batch_size=0)
        if endpoint.batching:
            config = ModelConfig(batching=True, max_batch_size=MOST_ROWS, batcher=batcher)
        self._triton.bind(
            model_name=endpoint.name,
            infer_func=hand_over,
            inputs=triton_tensors(endpoint.inputs),
            outputs=triton_tensors(endpoint.outputs),
            config=config,
            strict=True,
        )

    def _run(self, should_stop: Callable[[], bool], patience_s: float) -> None:
        self._triton.launch()
        begun = looked = time.monotonic()
        while not self._says("ready", timeout_s=10):
            if should_stop():
                return
            if self._triton.has_ended():
                raise TritonStartError("Triton ended while it started")
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._check_start()
            if time.monotonic() - begun > patience_s:
                self._kill_processes()  # one that hangs could not be asked to end
                raise TritonStartError(f"Triton is not ready after {patience_s:.0f} s")
            time.sleep(0.1)
        # Triton lets every user read the shared memory in which it hands requests on.
        for path in self._shared_memory():
            os.chmod(path, 0o600)
        self._note_stubs()
        self._triton.connect()
        assert self._front is not None
        self._front.open()

    def _says(self, state: str, timeout_s: float) -> bool:
        """Whether Triton says in time that it is "live", or "ready" with all endpoints."""
        connection = SocketConnection(self._triton.socket_path, timeout_s)
        with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
            connection.request("GET", f"/v2/health/{state}")
            return connection.getresponse().status == 200
        return False

    def _note_stubs(self) -> None:
        """Note the processes that an endpoint needs: its last stub, the first describes it."""
        for endpoint, parts in self._find_stubs().items():
            known = self._stubs.get(endpoint, [])
            known = known if known[:1] == parts[:1] else []
            self._stubs[endpoint] = [*known, *(part for part in parts if part not in known)]

    def _check_start(self) -> None:
        self._note_stubs()
        now = time.monotonic()
        for endpoint, (stub, *helpers) in self._stubs.items():
            if _is_alive(stub):
                self._last_seen[endpoint] = now
                lost = not all(map(_is_alive, helpers))
            else:
                lost = now - self._last_seen.setdefault(endpoint, now) > REPLACED_S
            if lost:
                raise TritonStartError(f"Triton's process for {endpoint} ended while it started")

    def _find_stubs(self) -> dict[str, list[psutil.Process]]:
        """By endpoint, what hands its requests to this process, and its child with the tensors."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended since it was listed
                words = process.cmdline()
                # A zombie has no words. Triton first runs a stub without arguments.
                if len(words) > 1 and "triton_python_backend_stub" in words[0]:
                    parts = found[Path(words[1]).parts[-3]] = [process]  # ENDPOINT/1/model.py
                    for child in process.children():
                        if "multiprocessing.spawn" in " ".join(child.cmdline()):
                            parts.append(child)
        return found

    def failure(self) -> str | None:
        """See `Host.failure`. Triton says "ready" even without a stub; a silent one is killed."""
        if self._triton is None or not self._triton.is_alive():
            return "Triton ended by itself"
        if self._front is None or self._front.failure() is not None:
            return "the front of Triton ended by itself"
        for endpoint, processes in self._stubs.items():
            if not all(map(_is_alive, processes)):
                return f"Triton's process for {endpoint} ended by itself"
        self._unanswered = 0 if self._says("live", PROBE_S) else self._unanswered + 1
        if self._unanswered < MOST_UNANSWERED:
            return None
        self._kill_processes()  # one that is stopped could not be asked to end
        return f"Triton runs, but has not replied to {self._unanswered} requests in a row"

    @lock_method("self._lock")
    def stop(self) -> None:
        """Stop Triton and remove what it leaves; a second call waits for the first."""
        if self._front is not None:
            self._front.close_port()
        if self._triton is not None:
            # PyTriton collects garbage once per endpoint, half a second each with torch loaded.
            gc.freeze()
            try:
                self._triton.stop()
            except Exception:
                logging.warning(f"stopping Triton: {traceback.format_exc()}")
            gc.unfreeze()
            self._triton = None
        if self._front is not None:
            self._front.close()
            self._front = None
        self._clean()

    def kill(self) -> None:
        """Kill Triton and clean up, for a process that ends and cannot wait for `stop`."""
        self._kill_processes()
        self._clean()

    def _kill_processes(self) -> None:
        _kill(psutil.Process().children(recursive=True), lambda each: "triton" in each.name())

    def _clean(self) -> None:
        directory = self._directory  # `kill` may come while `stop` does this
        if directory is not None:
            # A Triton that was killed while it started leaves processes that wait for it for ever.
            program = directory + os.sep
            _kill(
                psutil.process_iter(), lambda each: "".join(each.cmdline()[:1]).startswith(program)
            )
            shutil.rmtree(directory, ignore_errors=True)
            self._directory = None
        for leftover in self._shared_memory():
            with contextlib.suppress(OSError):
                os.unlink(leftover)

    def _shared_memory(self) -> list[str]:
        prefix = self._memory_prefix
        return [] if prefix is None else glob.glob(f"{SHARED_MEMORY}/{prefix}*")


def _kill(processes: Iterable[psutil.Process], which: Callable[[psutil.Process], bool]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if which(process):
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
