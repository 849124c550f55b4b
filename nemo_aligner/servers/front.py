# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server behind which is Triton: passes what may enter (admission.py) on to it.

Triton itself listens on a Unix socket that only this user can open (socket_triton.py). Everything
of its HTTP interface that admission.py does not let in does not exist here: repositories of
models, shared memory, logging, tracing, chunked bodies (one of many chunks ends this Triton).

A large scoring request does not go to Triton, which would let the small ones behind it wait: rank 0
works on it itself (direct_replies.py).

Triton knows only errors of all requests that it has handed over together; so each request that is
passed on has a name (REQUEST_PARAMETER), under which the server's own error comes here by
`Front.fail`.
"""

import concurrent.futures
import contextlib
import http.client
import json
import select
import socket
import socketserver
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from nemo.utils import logging

from nemo_aligner.core.errors import cause_in
from nemo_aligner.servers.admission import (
    BODY_S,
    FIRST_REQUEST_S,
    HEAD_SIZE_HEADER,
    MOST_CONNECTIONS,
    NEXT_REQUEST_S,
    Access,
    Admission,
    Admitted,
    RefusedError,
    read_head,
    unreadable,
)
from nemo_aligner.servers.direct_replies import DirectReplies, error_reply
from nemo_aligner.servers.exchange import HEARTBEAT_HEADER, HEARTBEAT_S, INSTANCE_HEADER
from nemo_aligner.servers.lease import LEASE_HEADER
from nemo_aligner.servers.ports import check_port_is_free, port_error
from nemo_aligner.servers.schema import Endpoint, Handler

PART_BYTES = 2**20  # bodies are passed on in parts of this size
_SENT_ON = ("Content-Type", "Content-Length", HEAD_SIZE_HEADER)
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


class Front(socketserver.ThreadingTCPServer):
    """The door of a server; each connection has a thread.

    Args:
        host, port: to listen on.
        socket_path: of Triton's Unix socket.
        endpoints: that are served, each with the function that handles its requests.
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
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
    ):
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.address = host, port
        self.socket_path = socket_path
        self.admission = Admission([endpoint for endpoint, _function in endpoints], access)
        self.direct = DirectReplies(endpoints)
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
        self.direct.close()

    def wait_for_replies(self, timeout_s: float) -> None:
        """Wait until all replies have been sent, at most `timeout_s`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._relaying, timeout_s)

    @contextlib.contextmanager
    def relaying(self, name: str) -> Iterator[None]:
        """Count a request that has no reply yet; until the end it may `fail`."""
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
        self._refuse(RefusedError(code, message or self.responses[code][0]))

    def _handle(self) -> None:
        admission = self.server.admission
        name = uuid.uuid4().hex
        head, rest = b"", 0
        large: Admitted | None = None
        try:
            request = admission.admit(self.command, self.path, self.headers.get)
            self.connection.settimeout(BODY_S)
            if request is not None and request.what == "infer":
                content = read_head(self._read(request.head_size))
                head = _named(content, name)
                rest = request.length - request.head_size
                assert request.endpoint is not None
                if self.server.direct.is_large(request.endpoint, content, request.length):
                    large = request
        except RefusedError as refusal:
            self._refuse(refusal)
            return
        if request is None:
            self.send_response_only(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif large is not None:
            with self.server.relaying(name):
                self._reply_directly(large.endpoint or "", content, self._read(rest))
        else:
            headers = {key: self.headers[key] for key in _SENT_ON if key in self.headers}
            headers["Content-Length"] = str(len(head) + rest)
            if HEAD_SIZE_HEADER in headers:
                headers[HEAD_SIZE_HEADER] = str(len(head))
            connection = SocketConnection(self.server.socket_path, None)
            with (
                contextlib.closing(connection),
                self.server.relaying(name),
                admission.leases.working_for(self.headers.get(LEASE_HEADER)),
            ):
                try:
                    connection.connect()
                except OSError as error:
                    self._refuse(RefusedError(503, f"Server is not ready: {error}"))
                    return
                connection.request(self.command, self.path, self._body(head, rest), headers)
                self._give_signs_of_life(connection.sock)
                self._reply(connection.getresponse(), self.server.failure_of(name))
        self.connection.settimeout(NEXT_REQUEST_S)

    # ---- the request ----

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

    def _reply_directly(self, endpoint: str, head: dict[str, Any], tensors: bytes) -> None:
        """Reply to a large scoring request without Triton."""
        work = self.server.direct.submit(endpoint, head, tensors, large=True)
        while not concurrent.futures.wait([work], HEARTBEAT_S).done:
            self._give_sign_of_life()
        try:
            status, headers, body = work.result()
        except concurrent.futures.CancelledError:  # nobody had begun to work on it
            self._send_error_line(503, "the server is shutting down")
            return
        self._send(status, headers, body)

    def _give_signs_of_life(self, triton: socket.socket) -> None:
        """Return once Triton replies; until then tell the client that its request is alive."""
        waiting = select.poll()
        waiting.register(triton, select.POLLIN)
        while not waiting.poll(1000 * HEARTBEAT_S):
            self._give_sign_of_life()

    def _give_sign_of_life(self) -> None:
        """Tell the client that its request is worked on, if it wants to know."""
        if HEARTBEAT_HEADER in self.headers:
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
        self.send_header(INSTANCE_HEADER, self.server.admission.instance)
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
        self._send(*error_reply(status, line))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send a reply that this process has made."""
        self.send_response_only(status)
        self.send_header(INSTANCE_HEADER, self.server.admission.instance)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, refusal: RefusedError) -> None:
        """Reply with an error and close the connection, whose body was not read."""
        self.close_connection = True
        self._send_error_line(refusal.status, str(refusal))
        # A client that still sends would get a reset instead of the reply.
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        deadline = time.monotonic() + BODY_S
        while time.monotonic() < deadline and self.rfile.read1(PART_BYTES):
            pass


def _named(head: dict[str, Any], name: str) -> bytes:
    """Return the JSON of a request that is passed on under this name.

    Raises:
        RefusedError: it is nested too deeply to be written.
    """
    # Other parameters mean nothing here, and Triton hands them on.
    binary = head.get("parameters", {}).get("binary_data_output", False)
    parameters = {"binary_data_output": binary, REQUEST_PARAMETER: name}
    try:
        return json.dumps({**head, "parameters": parameters}).encode()
    except RecursionError as error:
        raise unreadable(error) from error
