# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One infer request over one connection of its own, and what became of it.

A connection carries a single request, so an answer cannot belong to another one, and a connection
that broke says something about the server now, not about a connection that idled for minutes.
Triton's library writes and reads the bodies; the transport is plain `http.client`, whose socket
another thread can shut down: a request to a server that has fallen silent can be given up at once
(PyTriton's client cannot; it would also wait for the server first).
"""

import errno
import http.client
import json
import re
import socket

import numpy as np

from nemo_aligner.core.errors import ServerRequestError

CONNECT_TIMEOUT_S = 10.0

# What a server says of itself, not of the request: the first two are raised by a server job that
# ends (server_loop.py), the others come from Triton while it stops or has lost the process behind
# it.
_NOT_SERVING = re.compile(
    r"\b(ServerStoppingError|ServerJobError)\b|Request for unknown model|Server is (stopping|not ready)"
    r"|Stub process .* is not healthy"
)


class ConnectionLostError(Exception):
    """No connection, or it broke before the answer was complete. `sent`: the server may have begun
    to work on it.
    """

    def __init__(self, reason: str, sent: bool):
        super().__init__(reason)
        self.sent = sent


class NotServingError(Exception):
    """The server answered that it is about to end, or no longer has the model."""


class NoAnswerInTimeError(Exception):
    """The connection stands, but the answer did not come within the time limit."""


class InferRequest:
    """The bytes of an infer request; they can be sent any number of times.

    Args:
        endpoint: name of the served model.
        data: arrays by wire name, batched [N, ...].
    """

    def __init__(self, endpoint: str, data: dict):
        import tritonclient.http
        from tritonclient.utils import np_to_triton_dtype

        inputs = []
        for name, array in data.items():
            inputs.append(
                tritonclient.http.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            )
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(array))
        self.path = f"/v2/models/{endpoint}/infer"
        self.body, header_length = tritonclient.http.InferenceServerClient.generate_request_body(
            inputs
        )
        self.headers = {"Content-Type": "application/octet-stream"}
        if header_length is not None:
            self.headers["Inference-Header-Content-Length"] = str(header_length)
        self.rows = len(next(iter(data.values())))


class Exchange:
    """One sending of a request to one server. `run` blocks; `abort` may be called from any
    thread.
    """

    def __init__(self, host: str, port: int):
        self._connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)

    def run(self, request: InferRequest, timeout_s: float) -> dict:
        """Arrays of the answer, by wire name.

        Raises:
            ConnectionLostError, NotServingError, NoAnswerInTimeError: it may be sent elsewhere.
            ServerRequestError: the server's own error, or an answer that cannot be read.
        """
        connected = False
        try:
            self._connection.connect()
            connected = True
            _watch_peer(self._connection.sock)
            self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", request.path, request.body, request.headers)
            response = self._connection.getresponse()
            if response.length is None and not response.chunked:
                raise http.client.HTTPException("the answer was cut short within its headers")
            body = response.read()  # raises if there is less than announced
        except (OSError, http.client.HTTPException) as error:
            # The kernel's verdict that the peer is gone is a TimeoutError too, but has a number.
            if connected and isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
                raise NoAnswerInTimeError(f"no answer within {timeout_s:.0f} s") from error
            raise ConnectionLostError(
                f"{type(error).__name__}: {error}", sent=connected
            ) from error
        finally:
            self._connection.close()
        if response.status != 200:
            raise _server_error(response.status, body)
        return _read_answer(response, body)

    def abort(self) -> None:
        """Wake `run` up with a ConnectionLostError if it waits for the answer."""
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has just ended by itself


def _watch_peer(sock: socket.socket) -> None:
    """Have the kernel ask a silent peer for a sign of life, so that a machine that vanished, or
    came back and knows nothing of this connection, breaks it within half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _server_error(status: int, body: bytes) -> Exception:
    text = body.decode("utf-8", errors="replace")
    try:
        text = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {status}: {text[:2000]}"
    lines = [line.strip() for line in text.splitlines() if _NOT_SERVING.search(line)]
    if lines or status == 503:
        return NotServingError(lines[-1] if lines else text)
    return ServerRequestError(text)


def _read_answer(response, body: bytes) -> dict:
    import tritonclient.http

    header_length = response.getheader("Inference-Header-Content-Length")
    try:
        result = tritonclient.http.InferenceServerClient.parse_response_body(
            body, header_length=None if header_length is None else int(header_length)
        )
        names = [output["name"] for output in result.get_response()["outputs"]]
        return {name: result.as_numpy(name) for name in names}
    except Exception as error:
        raise ServerRequestError(
            f"the answer cannot be read ({type(error).__name__}: {error})"
        ) from error
