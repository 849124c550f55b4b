# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One infer request over one connection of its own, and its outcome: the transport of all clients.

A connection carries a single request: a reply cannot belong to another one, and a broken one tells
of the server now. Another thread can give up a request by shutting down the socket.

A server of this package says every HEARTBEAT_S that it still works on a request ("100 Continue"),
so a dead connection that nobody closed is noticed in SILENCE_S, however long the request takes.
"""

import contextlib
import errno
import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.config.access import TOKEN_VARIABLE
from nemo_aligner.core.errors import ServerRequestError, UserError, cause_in, one_line
from nemo_aligner.servers.kserve import Buffer, decode_reply, encode_request
from nemo_aligner.servers.schema import Arrays

# The lease of a critic (admission.py): path, header of requests, how long a silent client has it.
LEASE_PATH = "/v2/nemo_aligner/lease"
LEASE_HEADER = "NeMo-Aligner-Lease"
LEASE_S = 30.0

CONNECT_TIMEOUT_S = 10.0
# A smaller body is sent as one part: to copy it costs less than a call of the system per tensor.
ONE_PART_BYTES = 2**20
PART_BYTES = 2**22  # a larger array is sent in parts, each within SILENCE_S
# A client that sends this header gets a sign of life every HEARTBEAT_S until the reply.
HEARTBEAT_HEADER = "NeMo-Aligner-Heartbeat"
HEARTBEAT_S = 10.0
SILENCE_S = 45.0
# Names one start of a server. It is in every reply; a request that names another one is refused.
INSTANCE_HEADER = "NeMo-Aligner-Server"
MAX_MISSED_PROBES = 3  # unanswered probes in a row after which a server counts as dead

# What a server says of itself, not of the request: a server job that ends (server_loop.py), Triton
# that stops or has lost the process behind it, Triton without the process that holds its tensors.
_NOT_SERVING = re.compile(
    r"\b(ServerStoppingError|ServerJobError)\b|Request for unknown model"
    r"|Server is (stopping|not ready)|Stub process .* is not healthy"
    r"|^(BrokenPipe|Connection\w+|EOF|FileNotFound)Error.*\(connection\.py:\d+ in \w+\)$"
)


class ConnectionLostError(Exception):
    """No connection, or it broke before the whole reply. `sent`: the server may have begun."""

    def __init__(self, reason: str, sent: bool):
        super().__init__(reason)
        self.sent = sent


class NotServingError(Exception):
    """The server replied that it is about to end, or no longer has the model."""


class UntrustedServerError(Exception):
    """The server cannot prove by its certificate that it is the one that was asked for."""


class NoReplyInTimeError(Exception):
    """The connection stands, but the reply did not come within the time limit."""


@dataclass(frozen=True)
class Peer:
    """A server, and what its client needs to speak to it."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        where = self.host, self.port
        if self.tls is None:
            return http.client.HTTPConnection(*where, timeout=timeout_s)
        return http.client.HTTPSConnection(*where, timeout=timeout_s, context=self.tls)

    def ask(
        self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """The reply and its body; `OSError`, `HTTPException`: there is none."""
        with contextlib.closing(self.connection(timeout_s)) as connection:
            headers = {**token_header(self.token), **(headers or {})}
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response, response.read()

    def get(self, path: str, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes] | None:
        """The reply to a GET and its body, or None. `UntrustedServerError`: not as `tls` says."""
        try:
            return self.ask("GET", path, timeout_s)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedServerError(
                f"its certificate is not one of tls_ca_file: {error.verify_message}"
            ) from error
        except (ConnectionRefusedError, TimeoutError):
            return None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None)
            plain = reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
            if self.tls is not None and (plain or self._speaks_http(timeout_s)):
                why = "tls_ca_file is set, but it does not encrypt"
                raise UntrustedServerError(why) from error
            if self.tls is None and self._encrypts(timeout_s):
                raise UntrustedServerError("it encrypts, but tls_ca_file is not set") from error
            return None

    def status(self, path: str, timeout_s: float) -> int | None:
        """The HTTP status of a GET; otherwise as `get`."""
        reply = self.get(path, timeout_s)
        return None if reply is None else reply[0].status

    def _encrypts(self, timeout_s: float) -> bool:
        """Whether a server here encrypts, whoever it is; nothing is sent to it."""
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError):
            sock = socket.create_connection((self.host, self.port), timeout_s)
            with sock, anyone.wrap_socket(sock):
                return True
        return False

    def _speaks_http(self, timeout_s: float) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            Peer(self.host, self.port).ask("GET", "/v2/health/live", timeout_s)
            return True
        return False


class InferRequest:
    """The bytes of a request, to be sent any number of times; `data` must not change meanwhile."""

    def __init__(self, endpoint: str, data: Mapping[str, np.ndarray]):
        head, buffers = encode_request(data)
        size = len(head) + sum(map(len, buffers))
        self.endpoint = endpoint
        self.path = f"/v2/models/{endpoint}/infer"
        self.body: list[Buffer] = [head]
        for buffer in buffers:
            parts = range(0, len(buffer), PART_BYTES)
            self.body += [buffer[first : first + PART_BYTES] for first in parts]
        if size <= ONE_PART_BYTES:
            self.body = [b"".join(self.body)]
        self.headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "Inference-Header-Content-Length": str(len(head)),
        }


class Exchange:
    """One sending of a request to one server. `run` blocks; any thread may call `abort`.
    `headers`: beside the request's and the token. `heartbeat`: the server gives signs of life.
    """

    def __init__(
        self, peer: Peer, headers: Mapping[str, str] | None = None, heartbeat: bool = False
    ):
        self._headers = {**token_header(peer.token), **(headers or {})}
        if heartbeat:
            self._headers[HEARTBEAT_HEADER] = "1"
        self._heartbeat = heartbeat
        self._connection = peer.connection(CONNECT_TIMEOUT_S)
        self._aborted = self._timed_out = False

    def run(self, request: InferRequest, timeout_s: float) -> Arrays:
        """Send the request and return the arrays of the reply. `ServerRequestError`: the server's
        own error, or an unreadable reply. `ConnectionLostError`, `NotServingError`,
        `NoReplyInTimeError`: the server failed, not the request.
        """
        connected = False
        # Each sign of life starts the time limit of the socket anew, so this one is apart.
        limit = threading.Timer(timeout_s, self._time_out)
        limit.daemon = True
        try:
            if self._aborted:  # between two parts of a request
                raise ConnectionAbortedError("the request was given up")
            self._connection.connect()
            if self._aborted:  # there was no socket to break
                raise ConnectionAbortedError("the request was given up")
            connected = True
            _watch_peer(self._connection.sock)
            self._connection.sock.settimeout(SILENCE_S if self._heartbeat else timeout_s)
            if self._heartbeat:
                limit.start()
            headers = {**request.headers, **self._headers}
            self._connection.request("POST", request.path, request.body, headers)
            response = self._connection.getresponse()
            if response.length is None and not response.chunked:
                raise http.client.HTTPException("the reply was cut short within its headers")
            body = response.read()  # raises if there is less than announced
        except (OSError, http.client.HTTPException) as error:
            # A peer that the kernel reports as lost is a TimeoutError too, but has a number.
            silent = isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT
            if self._timed_out or (connected and silent and not self._heartbeat):
                raise NoReplyInTimeError(f"no reply within {timeout_s:.0f} s") from error
            what = f"{type(error).__name__}: {error}"
            if connected and silent:
                what = f"no sign of life from the server for {SILENCE_S:.0f} s"
            raise ConnectionLostError(what, sent=connected) from error
        finally:
            limit.cancel()
            self._connection.close()
        if response.status != 200:
            raise _server_error(response.status, body)
        size = response.getheader("Inference-Header-Content-Length")
        try:
            return decode_reply(body, None if size is None else int(size))
        except Exception as error:
            begins = f"its {len(body)} bytes begin with {body[:100]!r}"
            why = f"the reply cannot be read ({type_and_message(error)}): {begins}"
            raise ServerRequestError(why) from error

    def abort(self) -> None:
        """Make `run` raise ConnectionLostError, now if it waits for the reply, and from now on."""
        self._aborted = True
        self._break()

    def _time_out(self) -> None:
        self._timed_out = True
        self._break()

    def _break(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the exchange has just ended by itself
                # an SSLSocket's own is not for threads
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def token_header(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def token_problem(token: str | None, setting: str) -> str:
    """Why a server replied with 401, and the remedy, in `token_file` of the section `setting`."""
    have = "and this job has none" if token is None else "and that of this job is another one"
    keys = f"{TOKEN_VARIABLE}, or {setting}.token_file,"
    return f"the server asks for a token, {have}. Set {keys} to the token of the server."


def type_and_message(error: Exception) -> str:
    """Return the message in one line, preceded by the error's type unless it is one of ours."""
    ours = (ServerRequestError, UserError, ConnectionLostError, NotServingError)
    return one_line(str(error) if isinstance(error, ours) else f"{type(error).__name__}: {error}")


def _watch_peer(sock: socket.socket) -> None:
    """Have the kernel break a connection that the peer's machine no longer knows, in 30 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _server_error(status: int, body: bytes) -> Exception:
    text = error_text(status, body)
    line = cause_in(text)
    lines = [part.strip() for part in [*text.splitlines(), line] if _NOT_SERVING.search(part)]
    if lines or status == 503:
        return NotServingError(lines[-1] if lines else text)
    if "\n" in text.strip():  # a server of this package sends no tracebacks
        logging.error(f"the whole error of the server: {text}")
    return ServerRequestError(line)


def error_text(status: int, body: bytes) -> str:
    """The error in a reply whose status is not 200, or what came in its place."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body[:200].decode("utf-8", errors="replace")
        return f"HTTP {status}: {one_line(text) or 'an empty body'}"
