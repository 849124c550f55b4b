# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server: lets in what may enter (admission.py) and has it worked on. The wire is
that of Triton (kserve.py), also where there is none (`server.frontend=asgi`).

Triton itself listens on a Unix socket that only this user can open (socket_triton.py). A request's
tensors stay in this process, where the functions run that reply: Triton gets the request under a
name (REQUEST_PARAMETER), with zeros in place of the tensors, and hands it over when its turn has
come (`Triton.hand_over`); then a thread of its endpoint works on it. Through Triton its bytes
would be copied five times, and a small request would wait for a large one.
"""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo.utils import logging

from nemo_aligner.core.errors import cause_in
from nemo_aligner.servers.admission import (
    HEAD_SIZE_HEADER,
    JSON,
    SHUTTING_DOWN,
    Access,
    Admission,
    Admitted,
    RefusedError,
    Reply,
    error_reply,
    read_head,
)
from nemo_aligner.servers.exchange import LEASE_HEADER, error_text
from nemo_aligner.servers.http_server import HttpServer, Request, future_of
from nemo_aligner.servers.kserve import encode_request, model_config, model_metadata, rows_of
from nemo_aligner.servers.schema import MOST_ROWS, Endpoint, Handler

REQUEST_PARAMETER = "nemo_aligner_request"  # holds the name of a request


class SocketConnection(http.client.HTTPConnection):
    """A connection to an HTTP server on the Unix socket at `path`."""

    def __init__(self, path: str, timeout_s: float | None):
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass
class Passing:
    """A request from when Triton gets it until it is replied to."""

    submit: "Callable[[], concurrent.futures.Future[Reply]]"  # has it worked on
    reply: "concurrent.futures.Future[Reply] | None" = None  # None until Triton hands it over


class Triton:
    """The Triton behind a front, on the Unix socket at `path`, and the requests that it has."""

    def __init__(self, path: str):
        self._path = path
        self._lock = threading.Lock()
        self.passing: dict[object, Passing] = {}

    @contextlib.contextmanager
    def keeping(self, name: str, request: Passing) -> Iterator[None]:
        """Keep a request, which Triton gets under this name; at the end, unless begun, drop it."""
        with self._lock:
            self.passing[name] = request
        try:
            yield
        finally:
            with self._lock:
                del self.passing[name]
                if request.reply is not None:
                    request.reply.cancel()

    def hand_over(self, name: object) -> None:
        """Have the request that Triton got under this name worked on; returns at once."""
        with self._lock:
            request = self.passing.get(name)
            if request is not None and request.reply is None:  # else nobody waits for it any more
                request.reply = request.submit()

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        """Triton's reply to a request. `RefusedError`: it is down."""
        connection = SocketConnection(self._path, None)
        with contextlib.closing(connection):
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
        return error_reply(response.status, line)


class Front(HttpServer):
    """The door of a server; without `triton` a `Host` by itself."""

    name = "uvicorn"

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
        tls: ssl.SSLContext | None = None,
        triton: Triton | None = None,
    ):
        super().__init__(host, port, tls)
        self.admission = Admission(endpoints, access)
        self.triton = triton

    def start(self, should_stop: Callable[[], bool]) -> None:
        """See `Host.start`; it takes a moment."""
        self.open()

    def failure(self) -> str | None:
        return None if self.is_open else "uvicorn ended by itself"

    def close_port(self) -> None:
        """As of `HttpServer`; requests that nobody has begun to work on are refused."""
        super().close_port()
        self.admission.replies.close()

    def close(self) -> None:
        self.close_port()
        super().close()

    stop = close

    def kill(self) -> None:
        """End nothing: there is nothing outside this process."""

    def error(self, status: int, line: str) -> Reply:
        return error_reply(status, line)

    def complete(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        return self.admission.complete(headers, body)

    async def reply(self, request: Request) -> Reply:
        admitted = self.admission.admit(request.method, request.path, request.header)
        request.note_admitted()
        if admitted is None:
            return 200, {}, b""
        if admitted.what == "infer":
            with self.admission.leases.working_for(request.header(LEASE_HEADER)):
                return await self._infer(request, admitted)
        if self.triton is None:
            return 200, {"Content-Type": JSON}, self._describe(admitted)
        return await self._ask_triton(self.triton, request)

    async def _infer(self, request: Request, admitted: Admitted) -> Reply:
        head = read_head(await request.read(admitted.head_size))
        tensors = await request.read(admitted.length - admitted.head_size)
        assert admitted.endpoint is not None
        submit = self.admission.replies.submit
        work = partial(submit, admitted.endpoint, head, tensors, admitted.length)
        try:
            if self.triton is None:
                return await request.wait_for(work())
            return await self._through(self.triton, request, Passing(work), admitted, head)
        except concurrent.futures.CancelledError:  # nobody had begun to work on it
            return SHUTTING_DOWN

    async def _through(
        self,
        triton: Triton,
        request: Request,
        passing: Passing,
        admitted: Admitted,
        head: dict[str, Any],
    ) -> Reply:
        endpoint, name = self.admission.endpoints[str(admitted.endpoint)], uuid.uuid4().hex
        # What else it says is refused when its tensors are read.
        rows = min(max(rows_of(head), 1), MOST_ROWS)
        zeros_head, zeros = encode_request(endpoint.empty_request(rows), {REQUEST_PARAMETER: name})
        body = b"".join([zeros_head, *zeros])
        with triton.keeping(name, passing):
            try:
                said = await self._ask_triton(triton, request, body, len(zeros_head))
            except RefusedError:
                if passing.reply is None:
                    raise
            if passing.reply is not None:
                return await request.wait_for(passing.reply)
        if said[0] != 200:
            return said
        return error_reply(500, f"Triton has not handed over a request to {endpoint.name}")

    async def _ask_triton(
        self, triton: Triton, request: Request, body: bytes | None = None, head_size: int = 0
    ) -> Reply:
        headers = {HEAD_SIZE_HEADER: str(head_size)} if body else {}
        asked = request.method, request.path, body, headers
        return await request.wait_for(future_of("ask Triton", triton.ask, *asked))

    def _describe(self, request: Admitted) -> bytes:
        if request.what in ("live", "ready"):
            return b""
        if request.endpoint is None:
            extensions = ["binary_tensor_data", "model_configuration"]
            about: Any = {"name": "nemo_aligner", "version": "", "extensions": extensions}
        else:
            describe = model_config if request.what == "config" else model_metadata
            about = describe(self.admission.endpoints[request.endpoint])
        return json.dumps(about).encode()
