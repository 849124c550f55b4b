# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server: an HTTP server that passes the requests for its endpoints on to Triton.

Triton itself listens on a Unix socket that only this user can open (socket_triton.py). What
reaches it has passed here: a GET of health, description and readiness, and a POST to an endpoint
that is served, in one body of known and limited size, whose JSON can be read; with the token, if
the server has one; and with the lease, if it changes the server (lease.py). A request for an
earlier start of this server is refused: its client does not know that the weights went back to
the last checkpoint. Everything else of
Triton's HTTP interface does not exist here: repositories of models, shared memory, logging,
tracing, chunked bodies (one of many chunks ends this Triton).
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

from nemo.utils import logging

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
_SENT_ON = ("Content-Type", "Content-Length", "Inference-Header-Content-Length")


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
        super().__init__(reason)
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
    def relaying(self) -> Iterator[None]:
        """Count a request that Triton has."""
        with self._idle:
            self._relaying += 1
        try:
            yield
        finally:
            with self._idle:
                self._relaying -= 1
                self._idle.notify_all()

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
            head = self._check(length)
        except _RefusedError as refusal:
            self._refuse(refusal)
            return
        self.connection.settimeout(BODY_S)
        connection = SocketConnection(self.server.socket_path, None)
        with (
            contextlib.closing(connection),
            self.server.relaying(),
            self.server.leases.working_for(self.headers.get(LEASE_HEADER)),
        ):
            try:
                connection.connect()
            except OSError as error:
                self._refuse(_RefusedError(503, f"Server is not ready: {error}"))
                return
            headers = {name: self.headers[name] for name in _SENT_ON if name in self.headers}
            connection.request(self.command, self.path, self._body(head, length), headers)
            self._give_signs_of_life(connection.sock)
            self._reply(connection.getresponse())
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

    def _check(self, length: int) -> bytes:
        """Return the head of the body, once the request has been found to be one to pass on."""
        match = _MODEL.fullmatch(self.path)
        endpoint, what = match.groups() if match else ("", None)
        if endpoint not in self.server.largest_body and not _GENERAL.fullmatch(self.path):
            served = ", ".join(self.server.largest_body)
            raise _RefusedError(
                404, f"Request for unknown model: nothing is at {self.path[:200]!r}; {served} are"
            )
        if self.command == "GET" and what != "infer":
            if length:
                raise _RefusedError(400, "a GET has no body")
            return b""
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
        return self._head(length)

    def _head(self, length: int) -> bytes:
        """Read the JSON of the body. Triton would end on one that is nested too deeply."""
        size = self.headers.get("Inference-Header-Content-Length", str(length))
        if not (size.isascii() and size.isdigit() and int(size) <= min(length, LARGEST_HEAD)):
            raise _RefusedError(
                413,
                f"the JSON of a request has {size[:40]} bytes, but this server takes at most "
                f"{LARGEST_HEAD}. Send tensors as binary data.",
            )
        self.connection.settimeout(BODY_S)
        head = self._read(int(size))
        try:
            if isinstance(json.loads(head), dict):
                return head
            problem = "it is no object"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        raise _RefusedError(400, f"the JSON of the request cannot be read: {problem[:200]}")

    def _body(self, head: bytes, length: int) -> bytes | Iterator[bytes]:
        """Return the whole body if it is small, else its parts."""
        if length > PART_BYTES:
            return self._parts(head, length)
        return head + self._read(length - len(head))

    def _parts(self, head: bytes, length: int) -> Iterator[bytes]:
        yield head
        left = length - len(head)
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

    def _reply(self, response: http.client.HTTPResponse) -> None:
        """Pass on what Triton replies; an incomplete reply ends the connection."""
        if response.length is None:
            raise ConnectionError("Triton's reply was cut short within its headers")
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

    def _refuse(self, refusal: _RefusedError) -> None:
        """Reply with an error and close the connection, whose body was not read."""
        body = json.dumps({"error": str(refusal)}).encode()
        self.close_connection = True
        self.send_response_only(refusal.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        # A client that still sends would get a reset instead of the reply.
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        deadline = time.monotonic() + BODY_S
        while time.monotonic() < deadline and self.rfile.read1(PART_BYTES):
            pass
