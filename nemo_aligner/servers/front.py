# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server: an HTTP server that passes the requests for its endpoints on to Triton.

Triton itself listens on a Unix socket that only this user can open (socket_triton.py). What
reaches it has passed here: a GET of health, description and readiness, and a POST to an endpoint
that is served, in one body of known and limited size, whose JSON can be read; with the token, if
the server has one; and with the lease, if it changes the server (lease.py). A request for an
earlier start of this server is refused: its client does not know that the weights went back to
the last checkpoint. A tensor without elements is refused: in PyTriton it would fail every request
that Triton hands over with it. Everything else of
Triton's HTTP interface does not exist here: repositories of models, shared memory, logging,
tracing, chunked bodies (one of many chunks ends this Triton).

Each error goes to its client in one line. Triton knows only errors of all requests that it has
handed over together; so each request that is passed on has a name (REQUEST_PARAMETER), under which
the server's own error comes here by `Front.fail`.
"""

import contextlib
import hmac
import http.client
import json
import re
import select
import socket
import socketserver
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from nemo.utils import logging

from nemo_aligner.core.errors import cause_in, one_line
from nemo_aligner.servers.exchange import (
    HEARTBEAT_HEADER,
    HEARTBEAT_S,
    INSTANCE_HEADER,
    token_header,
)
from nemo_aligner.servers.lease import LEASE_HEADER, LEASE_PATH, LeaseBook
from nemo_aligner.servers.ports import check_port_is_free, port_error
from nemo_aligner.servers.schema import Endpoint

PART_BYTES = 2**20  # bodies are passed on in parts of this size
SMALL_BODY = 2**16  # of a request without samples
LARGEST_HEAD = 2**20  # the JSON in front of the tensors, or a body that is all JSON
MOST_CONNECTIONS = 512
# A connection that has sent no request yet, one between two requests, one within a body.
FIRST_REQUEST_S, NEXT_REQUEST_S, BODY_S = 10.0, 3600.0, 60.0

_GENERAL = re.compile(r"/v2(/health/(live|ready))?/?")
_MODEL = re.compile(r"/v2/models/([\w.-]+)(?:/versions/1)?(?:/(ready|config|infer))?/?")
_HEAD_LENGTH = "Inference-Header-Content-Length"
_SENT_ON = ("Content-Type", "Content-Length", _HEAD_LENGTH)
# Parameter of a request that holds its name.
REQUEST_PARAMETER = "nemo_aligner_request"


class SocketConnection(http.client.HTTPConnection):
    """A connection to an HTTP server on a Unix socket.

    Args:
        path: of the socket.
        timeout_s: of each wait for the server; None waits for ever.
    """

    def __init__(self, path: str, timeout_s: float | None):
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class _RefusedError(Exception):
    """A request that is not passed on: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(one_line(reason))
        self.status = status


@dataclass(frozen=True)
class Access:
    """What a server asks of its clients.

    Attributes:
        token: that every request must bring; None: none.
        largest_body: of a request with samples, in bytes.
        lease_required: whether only the client that holds the lease may change the server, also
            while nobody holds it.
    """

    token: str | None = None
    largest_body: int = 2**26
    lease_required: bool = True


class Front(socketserver.ThreadingTCPServer):
    """The door of a server; each connection has a thread.

    Args:
        host, port: to listen on.
        socket_path: of Triton's Unix socket.
        endpoints: that are served.
        access: what is asked of the clients.

    Raises:
        UserError: it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(
        self,
        host: str,
        port: int,
        socket_path: str,
        endpoints: Sequence[Endpoint],
        access: Access,
    ):
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.address = host, port
        self.socket_path = socket_path
        self.largest_body = {
            endpoint.name: SMALL_BODY if endpoint.has_fixed_size else access.largest_body
            for endpoint in endpoints
        }
        self.exclusive = {endpoint.name for endpoint in endpoints if endpoint.is_exclusive}
        self.leases = LeaseBook(access.lease_required)
        self.instance = uuid.uuid4().hex
        self._credentials = token_header(access.token).get("Authorization")
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._relaying = 0
        self._failures: dict[object, tuple[int, str] | None] = {}
        self._idle = threading.Condition()
        self._serving = threading.Thread(
            target=self.serve_forever, args=(0.1,), daemon=True, name="front"
        )
        check_port_is_free(host, port)
        self.server_bind()

    def open(self) -> None:
        """Let connections in."""
        try:
            self.server_activate()
        except OSError as error:
            raise port_error(*self.address, error) from error
        self._serving.start()

    def close(self) -> None:
        """Let no more connections in. Those that are open stay, for the replies."""
        if self._serving.is_alive():
            self.shutdown()
        self.server_close()

    def admits(self, credentials: str | None) -> bool:
        """Whether a request with this Authorization header may pass; takes as long for any."""
        if self._credentials is None:
            return True
        return hmac.compare_digest((credentials or "").encode(), self._credentials.encode())

    def wait_for_replies(self, timeout_s: float) -> None:
        """Wait until the replies of Triton have been passed on, at most `timeout_s`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._relaying, timeout_s)

    @contextlib.contextmanager
    def relaying(self, name: str) -> Iterator[None]:
        """Count a request that Triton has; until the end it may `fail`."""
        with self._idle:
            self._relaying += 1
            self._failures[name] = None
        try:
            yield
        finally:
            with self._idle:
                self._relaying -= 1
                del self._failures[name]
                self._idle.notify_all()

    def fail(self, name: object, status: int, line: str) -> bool:
        """Have the request of this name get an error in place of Triton's reply.

        Returns:
            Whether Triton has such a request.
        """
        with self._idle:
            if name in self._failures:
                self._failures[name] = status, line
            return name in self._failures

    def failure_of(self, name: str) -> tuple[int, str] | None:
        """Return HTTP status and error of a request that Triton has; None if it did not fail."""
        with self._idle:
            return self._failures[name]

    def verify_request(self, request: object, client_address: object) -> bool:
        """Close a connection at once while there are too many."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what is an error of this file; a client or Triton that is gone is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | http.client.HTTPException):
            logging.error(f"request of {client_address}: {traceback.format_exc()}")


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Front
    protocol_version = "HTTP/1.1"
    timeout = FIRST_REQUEST_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: clients probe every few seconds."""

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse what the base class refuses, such as a method, in the form of all errors."""
        self._refuse(_RefusedError(code, message or self.responses[code][0]))

    def _handle(self) -> None:
        try:
            if not self.server.admits(self.headers.get("Authorization")):
                raise _RefusedError(401, "this server asks for a token")
            if self.headers.get(INSTANCE_HEADER, self.server.instance) != self.server.instance:
                raise _RefusedError(503, "the server was started anew since this client connected")
            length = self._body_length()
            if self.path == LEASE_PATH and self.server.exclusive:
                self._lease(length)
                return
            name = uuid.uuid4().hex
            head, rest = self._check(length, name)
        except _RefusedError as refusal:
            self._refuse(refusal)
            return
        self.connection.settimeout(BODY_S)
        connection = SocketConnection(self.server.socket_path, None)
        headers = {key: self.headers[key] for key in _SENT_ON if key in self.headers}
        headers["Content-Length"] = str(len(head) + rest)
        if _HEAD_LENGTH in headers:
            headers[_HEAD_LENGTH] = str(len(head))
        with (
            contextlib.closing(connection),
            self.server.relaying(name),
            self.server.leases.working_for(self.headers.get(LEASE_HEADER)),
        ):
            try:
                connection.connect()
            except OSError as error:
                self._refuse(_RefusedError(503, f"Server is not ready: {error}"))
                return
            connection.request(self.command, self.path, self._body(head, rest), headers)
            self._give_signs_of_life(connection.sock)
            self._reply(connection.getresponse(), self.server.failure_of(name))
        self.connection.settimeout(NEXT_REQUEST_S)

    def _lease(self, length: int) -> None:
        """Give, renew or take back the lease of the actor that asks."""
        lease, leases = self.headers.get(LEASE_HEADER), self.server.leases
        if length or self.command == "GET":
            raise _RefusedError(405, f"{LEASE_PATH} takes POST and DELETE, without a body")
        if self.command == "DELETE":
            leases.give_back(lease)
        elif (problem := leases.renew(lease)) is not None:
            raise _RefusedError(409, problem)
        self.send_response_only(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    # ---- the request ----

    def _body_length(self) -> int:
        if "Transfer-Encoding" in self.headers or "Content-Encoding" in self.headers:
            raise _RefusedError(411, "send the body in one piece, as it is, with Content-Length")
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            raise _RefusedError(400, f"Content-Length is {length[:40]!r}; send a number of bytes")
        return int(length)

    def _check(self, length: int, name: str) -> tuple[bytes, int]:
        """Return the head of the body, with the request's name, and the number of bytes after it,
        once the request has been found to be one to pass on.
        """
        match = _MODEL.fullmatch(self.path)
        endpoint, what = match.groups() if match else ("", None)
        if endpoint not in self.server.largest_body and not _GENERAL.fullmatch(self.path):
            served = ", ".join(self.server.largest_body)
            raise _RefusedError(
                404,
                f"Request for unknown model: nothing at {self.path[:200]!r}; it serves {served}",
            )
        if self.command == "GET" and what != "infer":
            if length:
                raise _RefusedError(400, "a GET has no body")
            return b"", 0
        if self.command != "POST" or what != "infer":
            raise _RefusedError(405, f"{self.path[:200]!r} does not take {self.command}")
        largest = self.server.largest_body[endpoint]
        if length > largest:
            raise _RefusedError(
                413,
                f"a request to {endpoint} has {length} bytes, but this server takes at most "
                f"{largest}. Send fewer samples at once, or raise max_request_mb of the server.",
            )
        lease = self.headers.get(LEASE_HEADER)
        if endpoint in self.server.exclusive and (
            problem := self.server.leases.refusal(endpoint, lease)
        ):
            raise _RefusedError(403, problem)
        return self._head(length, name)

    def _head(self, length: int, name: str) -> tuple[bytes, int]:
        """Read the JSON of the body. Triton would end on one that is nested too deeply."""
        size = self.headers.get(_HEAD_LENGTH, str(length))
        if not (size.isascii() and size.isdigit() and int(size) <= min(length, LARGEST_HEAD)):
            raise _RefusedError(
                413,
                f"the JSON of a request has {size[:40]} bytes, but this server takes at most "
                f"{LARGEST_HEAD}. Send tensors as binary data.",
            )
        self.connection.settimeout(BODY_S)
        data = self._read(int(size))
        try:
            head = json.loads(data)
            problem = _problem_of(head)
            if problem is None:
                # Others mean nothing here, and Triton hands them on.
                binary = head.get("parameters", {}).get("binary_data_output", False)
                head["parameters"] = {"binary_data_output": binary, REQUEST_PARAMETER: name}
                return json.dumps(head).encode(), length - int(size)
        except (ValueError, RecursionError) as error:
            problem = f"its JSON cannot be read: {error}"
        raise _RefusedError(400, f"the request is refused: {problem[:400]}")

    def _body(self, head: bytes, rest: int) -> bytes | Iterator[bytes]:
        """Return the whole body if it is small, else its parts."""
        return self._parts(head, rest) if rest > PART_BYTES else head + self._read(rest)

    def _parts(self, head: bytes, left: int) -> Iterator[bytes]:
        yield head
        while left:
            part = self._read(min(left, PART_BYTES))
            left -= len(part)
            yield part

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionError("the client has closed the connection within a body")
        return data

    # ---- the reply ----

    def _give_signs_of_life(self, triton: socket.socket) -> None:
        """Return once Triton replies; until then tell the client that its request is alive."""
        if HEARTBEAT_HEADER not in self.headers:
            return
        waiting = select.poll()
        waiting.register(triton, select.POLLIN)
        while not waiting.poll(1000 * HEARTBEAT_S):
            self.send_response_only(100)
            self.end_headers()

    def _reply(self, response: http.client.HTTPResponse, failure: tuple[int, str] | None) -> None:
        """Pass on what Triton replies, or the error of the request; an incomplete reply ends the
        connection.
        """
        if response.length is None:
            raise ConnectionError("Triton's reply was cut short within its headers")
        if failure is None and response.status != 200 and response.length:
            failure = response.status, self._read_error(response)
        if failure is not None:
            self._send_error_line(*failure)
            return
        self.send_response_only(response.status)
        self.send_header(INSTANCE_HEADER, self.server.instance)
        for name in _SENT_ON:
            if (value := response.getheader(name)) is not None:
                self.send_header(name, value)
        self.end_headers()
        left = response.length
        while left:
            part = response.read(min(left, PART_BYTES))
            if not part:
                raise ConnectionError("Triton's reply was cut short")
            left -= len(part)
            self.wfile.write(part)

    def _read_error(self, response: http.client.HTTPResponse) -> str:
        """Return an error of Triton's or PyTriton's own in one line; the log gets all of it."""
        body = response.read()
        try:
            text = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            text = body.decode(errors="replace")
        line = cause_in(text)
        if line != text:
            logging.error(f"{self.path}: {text}")
        return line

    def _send_error_line(self, status: int, line: str) -> None:
        body = json.dumps({"error": line}).encode()
        self.send_response_only(status)
        self.send_header(INSTANCE_HEADER, self.server.instance)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, refusal: _RefusedError) -> None:
        """Reply with an error and close the connection, whose body was not read."""
        self.close_connection = True
        self._send_error_line(refusal.status, str(refusal))
        # A client that still sends would get a reset instead of the reply.
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        deadline = time.monotonic() + BODY_S
        while time.monotonic() < deadline and self.rfile.read1(PART_BYTES):
            pass


def _problem_of(head: Any) -> str | None:
    """Return why the JSON of a request is refused; None if it may pass."""
    if not isinstance(head, dict) or not isinstance(head.get("parameters", {}), dict):
        return "its JSON is no object, or its parameters are none"
    inputs = head.get("inputs")
    for tensor in inputs if isinstance(inputs, list) else []:
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if isinstance(shape, list) and 0 in shape:
            return (
                f"its input tensor {tensor.get('name')!r} has shape {shape}; send at least one "
                "row and one column"
            )
    return None
