# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A front with Triton behind it, in rank 0 of a server job, and the removal of all it leaves.

Triton listens on a Unix socket that only this user can open (socket_triton.py). A request's
tensors stay in this process, where the functions run that reply: Triton gets the request under a
name (REQUEST_PARAMETER), with zeros in place of the tensors, and hands it over when its turn has
come; then a thread of its endpoint works on it. Through Triton its bytes would be copied five
times, and a small request would wait for a large one.
"""

import contextlib
import functools
import gc
import glob
import http.client
import os
import shutil
import socket
import ssl
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from nemo.utils import logging

from nemo_aligner.core.errors import cause_in
from nemo_aligner.core.leftovers import SHARED_MEMORY, shared_memory_prefix, temporary_folder
from nemo_aligner.servers.admission import HEAD_SIZE_HEADER, Access, Admitted, RefusedError, Reply
from nemo_aligner.servers.exchange import error_text
from nemo_aligner.servers.front import Front, Future, Submit
from nemo_aligner.servers.http_server import Request
from nemo_aligner.servers.kserve import encode_request, rows_of
from nemo_aligner.servers.schema import MOST_ROWS, Arrays, Endpoint, Handler, triton_tensors
from nemo_aligner.servers.threads import future_of
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
REQUEST_PARAMETER = "nemo_aligner_request"  # holds the name of a request


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


@dataclass(eq=False)
class Passing:
    """A request from when Triton gets it until it is replied to."""

    submit: Submit
    reply: Future | None = None  # None until Triton hands it over


class TritonHost(Front):
    """A front with Triton behind it. `batcher`: of PyTriton's DynamicBatcher."""

    name = "Triton"

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
        tls: ssl.SSLContext | None = None,
        batcher: Mapping[str, Any] | None = None,
    ):
        super().__init__(host, port, endpoints, access, tls)
        self._batcher = batcher or {}
        self._triton: Any = None  # a `SocketTriton` while it runs
        self.socket_path = ""  # of Triton
        self.passing: dict[object, Passing] = {}  # by the name that Triton knows
        self._passing_lock = threading.Lock()
        self._directory: str | None = None
        self._memory_prefix: str | None = None
        self._lock = threading.Lock()
        # By endpoint, the processes without which it cannot serve.
        self._stubs: dict[str, list[psutil.Process]] = {}
        self._last_seen: dict[str, float] = {}  # when its stub was alive, while Triton starts
        self._unanswered = 0  # probes since Triton last replied to one

    # ---- requests ----

    async def describe(self, request: Request, admitted: Admitted) -> Reply:
        return await self._ask_for(request)

    async def infer(
        self, request: Request, endpoint: Endpoint, head: dict[str, Any], submit: Submit
    ) -> Reply:
        name, passing = uuid.uuid4().hex, Passing(submit)
        # What else it says is refused when its tensors are read.
        rows = min(max(rows_of(head), 1), MOST_ROWS)
        zeros_head, zeros = encode_request(endpoint.empty_request(rows), {REQUEST_PARAMETER: name})
        with self._passing_lock:
            self.passing[name] = passing
        try:
            try:
                said = await self._ask_for(request, zeros_head, zeros)
            except RefusedError:
                if passing.reply is None:
                    raise
            if passing.reply is not None:
                return await request.wait_for(passing.reply)
        finally:
            with self._passing_lock:  # after this nobody begins to work on it
                del self.passing[name]
                if passing.reply is not None:
                    passing.reply.cancel()
        if said[0] != 200:
            return said
        return self.error(500, f"Triton has not handed over a request to {endpoint.name}")

    def hand_over(self, name: object) -> None:
        """Have the request that Triton got under this name worked on; returns at once."""
        with self._passing_lock:
            passing = self.passing.get(name)
            if passing is not None and passing.reply is None:  # else nobody waits for it any more
                passing.reply = passing.submit()

    async def _ask_for(
        self, request: Request, head: bytes = b"", tensors: Sequence[Any] = ()
    ) -> Reply:
        headers = {HEAD_SIZE_HEADER: str(len(head))} if head else {}
        asked = request.method, request.path, b"".join([head, *tensors]) or None, headers
        return await request.wait_for(future_of("ask Triton", self._ask, *asked))

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        with contextlib.closing(SocketConnection(self.socket_path, None)) as connection:
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise RefusedError(503, f"Server is not ready: {error}") from error
        if response.status == 200:
            kind = response.getheader("Content-Type")
            return 200, {} if kind is None else {"Content-Type": kind}, content
        text = error_text(response.status, content)  # of Triton's or PyTriton's own
        line = cause_in(text)
        if line != text:
            logging.error(f"{path}: {text}")
        return self.error(response.status, line)

    # ---- the life of Triton ----

    def start(self, should_stop: Callable[[], bool]) -> None:
        """See `Front.start`. Triton may end or hang on a busy machine: it is started again, with
        more patience. `UserError`: the port is taken, or this Python cannot run Triton.
        `TritonStartError`: Triton did not start, each time.
        """
        prepare_triton_environment()
        self.take_port()
        for number, patience_s in enumerate(START_S, 1):
            try:
                self._start(should_stop, patience_s)
                return
            except TritonStartError as error:
                if number == len(START_S):
                    raise
                self._end_triton()
                logging.warning(f"{error}; starting it again ({number + 1} of {len(START_S)})")

    def _start(self, should_stop: Callable[[], bool], patience_s: float) -> None:
        self._directory = str(temporary_folder("triton_", folder_of_workspaces()))  # of mode 0700
        self._memory_prefix = shared_memory_prefix()
        self._stubs, self._last_seen, self._unanswered = {}, {}, 0
        from nemo_aligner.servers.socket_triton import SocketTriton

        triton = self._triton = SocketTriton(self._directory, self._memory_prefix)
        self.socket_path = triton.socket_path
        try:
            for endpoint in self.endpoints:
                self._bind(endpoint)
            self._run(should_stop, patience_s)
        except Exception:
            with contextlib.suppress(OSError), open(triton.log_path, errors="replace") as log:
                end = "".join(log.readlines()[-15:])
                logging.error(f"Triton did not start. The end of its log:\n{end}")
            raise

    def _bind(self, endpoint: Endpoint) -> None:
        from pytriton.model_config import DynamicBatcher, ModelConfig

        def hand_over(requests: list[Any]) -> list[Arrays]:
            # Triton hands over together what arrives together. Computed as one batch, the last
            # bits of a score would depend on that, and a bad request would fail good ones.
            for request in requests:
                self.hand_over(request.parameters[REQUEST_PARAMETER])
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
        self.open()

    def _says(self, state: str, timeout_s: float) -> bool:
        """Whether Triton says in time that it is "live", or "ready" with all endpoints."""
        with (
            contextlib.closing(SocketConnection(self.socket_path, timeout_s)) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
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
        """See `Front.failure`. Triton says "ready" even without a stub; a silent one is killed."""
        if self._triton is None or not self._triton.is_alive():
            return "Triton ended by itself"
        if not self.is_open:
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
    def close(self) -> None:
        """Stop Triton and remove what it leaves; a second call waits for the first."""
        self.close_port()
        self._end_triton()
        super().close()

    def _end_triton(self) -> None:
        if self._triton is not None:
            # PyTriton collects garbage once per endpoint, half a second each with torch loaded.
            gc.freeze()
            try:
                self._triton.stop()
            except Exception:
                logging.warning(f"stopping Triton: {traceback.format_exc()}")
            gc.unfreeze()
            self._triton = None
        self._clean()

    def kill(self) -> None:
        """Kill Triton and clean up, for a process that ends and cannot wait for `close`."""
        self._kill_processes()
        self._clean()

    def _kill_processes(self) -> None:
        _kill(psutil.Process().children(recursive=True), lambda each: "triton" in each.name())

    def _clean(self) -> None:
        directory = self._directory  # `kill` may come while `close` does this
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


class SocketConnection(http.client.HTTPConnection):
    """A connection to an HTTP server on the Unix socket at `path`."""

    def __init__(self, path: str, timeout_s: float | None):
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _kill(processes: Iterable[psutil.Process], which: Callable[[psutil.Process], bool]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if which(process):
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
