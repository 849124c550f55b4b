# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server behind which is Triton: passes what may enter (admission.py) on to it.

Triton itself listens on a Unix socket that only this user can open (socket_triton.py).

A request's tensors stay in this process, where the functions run that reply: Triton gets the
request under a name (REQUEST_PARAMETER), with zeros in place of the tensors, and hands it over
when its turn has come (`Front.hand_over`); then a thread of its endpoint works on it. Through
Triton its bytes would be copied five times, and a small request would wait for a large one.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import select
import socket
import socketserver
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import cause_in
from nemo_aligner.servers.admission import (
    BODY_S,
    FIRST_REQUEST_S,
    HEAD_SIZE_HEADER,
    MOST_CONNECTIONS,
    NEXT_REQUEST_S,
    SHUTTING_DOWN,
    Access,
    Admission,
    Admitted,
    RefusedError,
    Reply,
    error_reply,
    read_head,
)
from nemo_aligner.servers.exchange import (
    HEARTBEAT_HEADER,
    HEARTBEAT_S,
    LEASE_HEADER,
    error_text,
)
from nemo_aligner.servers.kserve import encode_request, rows_of
from nemo_aligner.servers.ports import SERVER_PORT, port_error
from nemo_aligner.servers.schema import MOST_ROWS, Endpoint, Handler
from nemo_aligner.servers.threads import in_thread

PART_BYTES = 2**20
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


class HttpServer(socketserver.ThreadingTCPServer):
    """Each connection has a thread. `UserError`, with the `key` of the port: it cannot listen."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: Any, key: str = SERVER_PORT):
        self.address, self._key = address, key
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler, bind_and_activate=False)
        self._is_open = False
        self._take_port(self.server_bind)

    def _take_port(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, OverflowError) as error:
            self.server_close()
            raise port_error(*self.address, error, self._key) from error

    def open(self) -> None:
        self._take_port(self.server_activate)
        in_thread("http server", self.serve_forever, 0.1)
        self._is_open = True

    def close(self) -> None:
        """Let no more connections in. Those that are open stay, for the replies."""
        if self._is_open:
            self.shutdown()
        self.server_close()

    def verify_request(self, request: object, client_address: object) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what is an error of ours; a client or Triton that is gone is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | http.client.HTTPException):
            logging.error(f"request of {client_address}: {traceback.format_exc()}")


class Front(HttpServer):
    """The door of a server. `socket_path`: of Triton's Unix socket."""

    def __init__(
        self,
        host: str,
        port: int,
        socket_path: str,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
    ):
        super().__init__((host, port), _Handler)
        self.socket_path = socket_path
        self.admission = Admission(endpoints, access)
        self._passing: dict[object, Passing] = {}
        self._idle = threading.Condition()

    def close(self) -> None:
        super().close()
        self.admission.replies.close()

    def wait_for_replies(self, timeout_s: float) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._passing, timeout_s)

    @contextlib.contextmanager
    def passing(self, name: str, request: Passing) -> Iterator[None]:
        """Keep a request, which Triton gets under this name; at the end, unless begun, drop it."""
        with self._idle:
            self._passing[name] = request
        try:
            yield
        finally:
            with self._idle:
                del self._passing[name]
                if request.reply is not None:
                    request.reply.cancel()
                self._idle.notify_all()

    def hand_over(self, name: object) -> None:
        """Have the request that Triton got under this name worked on; returns at once."""
        with self._idle:
            request = self._passing.get(name)
            if request is not None and request.reply is None:  # else nobody waits for it any more
                request.reply = request.submit()


class HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = FIRST_REQUEST_S
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: clients ask every few seconds."""

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse what the base class refuses, such as a method, in the form of all errors."""
        self.refuse(code, message or self.responses[code][0])

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_refusal(self, status: int, line: str) -> None:
        raise NotImplementedError

    def refuse(self, status: int, line: str) -> None:
        """Reply with an error and close; reads what is still sent, or the client gets a reset."""
        self.close_connection = True
        self.send_refusal(status, line)
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        deadline = time.monotonic() + BODY_S
        while time.monotonic() < deadline and self.rfile.read1(PART_BYTES):
            pass


class _Handler(HttpHandler):
    server: Front

    def _handle(self) -> None:
        admission = self.server.admission
        try:
            request = admission.admit(self.command, self.path, self.headers.get)
            self.connection.settimeout(BODY_S)
            if request is None:
                self._send(200, {}, b"")
            elif request.what == "infer":
                head = read_head(bytes(self._read(request.head_size)))
                tensors = self._read(request.length - request.head_size)
                with admission.leases.working_for(self.headers.get(LEASE_HEADER)):
                    self._infer(request, head, tensors)
            else:
                with self._asking_triton(self.command, self.path) as response:
                    self._pass_on(response)
        except RefusedError as refusal:
            self.refuse(refusal.status, str(refusal))
            return
        self.connection.settimeout(NEXT_REQUEST_S)

    do_GET = do_POST = do_DELETE = _handle

    def _read(self, size: int) -> memoryview:
        data = np.empty(size, np.uint8).data
        if size and self.rfile.readinto(data) < size:
            raise ConnectionError("the client has closed the connection within a body")
        return data

    @contextlib.contextmanager
    def _asking_triton(
        self, method: str, path: str, body: bytes | None = None, head_size: int | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request to Triton; gives its reply. `RefusedError`: it is down."""
        connection = SocketConnection(self.server.socket_path, None)
        headers = {} if head_size is None else {HEAD_SIZE_HEADER: str(head_size)}
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as error:
                raise RefusedError(503, f"Server is not ready: {error}") from error
            connection.request(method, path, body, headers)
            waiting = select.poll()
            waiting.register(connection.sock, select.POLLIN)
            while not waiting.poll(1000 * HEARTBEAT_S):
                self._give_sign_of_life()
            response = connection.getresponse()
            if response.length is None:
                raise ConnectionError("Triton's reply was cut short within its headers")
            yield response

    def _infer(self, request: Admitted, head: dict[str, Any], tensors: memoryview) -> None:
        assert request.endpoint is not None
        endpoint, name = self.server.admission.endpoints[request.endpoint], uuid.uuid4().hex
        submit = self.server.admission.replies.submit
        passing = Passing(functools.partial(submit, endpoint.name, head, tensors, request.length))
        # What else it says is refused when its tensors are read.
        rows = min(max(rows_of(head), 1), MOST_ROWS)
        zeros_head, zeros = encode_request(endpoint.empty_request(rows), {REQUEST_PARAMETER: name})
        body = b"".join([zeros_head, *zeros])
        with self.server.passing(name, passing):
            with self._asking_triton("POST", self.path, body, len(zeros_head)) as response:
                said = self._read_error(response) if response.status != 200 else None
            if passing.reply is not None:
                self._send(*self._wait_for(passing.reply))
            elif said is not None:
                self.send_refusal(response.status, said)
            else:
                self.send_refusal(500, f"Triton has not handed over a request to {endpoint.name}")

    def _wait_for(self, reply: "concurrent.futures.Future[Reply]") -> Reply:
        while True:
            try:
                return reply.result(HEARTBEAT_S)
            except concurrent.futures.TimeoutError:
                self._give_sign_of_life()
            except concurrent.futures.CancelledError:  # nobody had begun to work on it
                return SHUTTING_DOWN

    def _give_sign_of_life(self) -> None:
        if HEARTBEAT_HEADER in self.headers:
            self.send_response_only(100)
            self.end_headers()

    def _pass_on(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200 and response.length:
            self.send_refusal(response.status, self._read_error(response))
            return
        kind = response.getheader("Content-Type")
        headers = {} if kind is None else {"Content-Type": kind}
        self._send(response.status, headers, response.read())

    def _read_error(self, response: http.client.HTTPResponse) -> str:
        """Return an error of Triton's or PyTriton's own in one line; the log gets all of it."""
        text = error_text(response.status, response.read())
        line = cause_in(text)
        if line != text:
            logging.error(f"{self.path}: {text}")
        return line

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send(status, self.server.admission.complete(headers, body), body)

    def send_refusal(self, status: int, line: str) -> None:
        self._send(*error_reply(status, line))
