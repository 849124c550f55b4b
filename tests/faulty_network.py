# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A network that loses things: a TCP relay between clients and one server, whose faults are those
of real networks and happen at the moments that a test names.
"""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable

# What can happen to a connection that brings a request.
FAULTS = (
    "reset at once",  # before the server gets anything
    "reset in the request",  # the server gets one byte less than all
    "reset in the reply",  # the server has done the work, the client gets half of its reply
    "cut reply",  # the same, and the connection is closed in order
    "lost reply",  # the server has done the work, the client gets a reset
    "silent",  # what the client sends is taken, and never arrives; nobody closes anything
    "silent reply",  # the server has done the work; nothing comes back, nobody closes anything
    "twice",  # the server gets the request a second time, over another connection
    "late",  # everything arrives, after `DELAY_S`
    "reordered",  # the reply comes after that to the next request, if one comes in `OVERTAKEN_S`
)
DELAY_S = 0.5
OVERTAKEN_S = 2.0


class FaultyNetwork:
    """Relays connections to `server` at `port`.

    Args:
        server: (host, port).
        fault: function(number of the POST so far, its path) -> one of `FAULTS`, or None. Probes
            (GET) pass.

    Attributes:
        happened: (path, fault) of each POST that had one.
        overtaken: replies that have come after that to a later request.
    """

    def __init__(self, server: tuple[str, int], fault: Callable[[int, str], str | None]):
        self.server, self.fault = server, fault
        self.happened: list[tuple[str, str]] = []
        self.posts = self.overtaken = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._replies = 0  # that have gone to clients
        self._replied = threading.Condition()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "FaultyNetwork":
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, http.client.HTTPException):
            head = _read_until(client, b"\r\n\r\n")
            method, path = head.split()[:2]
            fault = None
            if method == b"POST" and path.endswith(b"/infer"):
                with self._lock:
                    number, self.posts = self.posts, self.posts + 1
                fault = self.fault(number, path.decode())
                if fault is not None:
                    self.happened.append((path.decode(), fault))
            self._act(client, head, fault)

    def _act(self, client: socket.socket, head: bytes, fault: str | None) -> None:
        if fault == "reset at once":
            _reset(client)
        elif fault == "silent":
            client.settimeout(0.05)
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    if not client.recv(2**20):
                        return
        elif fault is None:
            with socket.create_connection(self.server) as server:
                _pass_on(client, server, head)
            if b"/infer" in head.split(b"\r\n")[0]:
                with self._replied:
                    self._replies += 1
                    self._replied.notify_all()
        else:
            self._work(client, head + _read_body(client, head), fault)

    def _work(self, client: socket.socket, request: bytes, fault: str) -> None:
        """The faults for which the whole request has been read."""
        if fault == "reset in the request":
            with socket.create_connection(self.server) as server:
                server.sendall(request[:-1])
                time.sleep(0.1)
                _reset(server)
            _reset(client)
            return
        if fault == "late":
            time.sleep(DELAY_S)
        reply = self._reply(request)
        if fault == "late":
            time.sleep(DELAY_S)
        if fault == "twice":
            self._reply(request)
        if fault == "lost reply":
            _reset(client)
        elif fault == "silent reply":
            self._ended.wait(600)
        elif fault in ("cut reply", "reset in the reply"):
            client.sendall(reply[: len(reply) - len(reply) // 3])
            time.sleep(0.1)
            if fault == "reset in the reply":
                _reset(client)
        else:
            if fault == "reordered":
                with self._replied:
                    before = self._replies
                    overtaken = lambda: self._replies > before  # noqa: E731
                    self.overtaken += self._replied.wait_for(overtaken, OVERTAKEN_S)
            client.sendall(reply)

    def _reply(self, request: bytes) -> bytes:
        """What the server says to the whole request, without its signs of life."""
        with socket.create_connection(self.server) as server:
            server.sendall(request)
            head = b"HTTP/1.1 100 "
            while head.startswith(b"HTTP/1.1 100 "):
                head = _read_until(server, b"\r\n\r\n")
            return head + _read_body(server, head)


def _pass_on(client: socket.socket, server: socket.socket, head: bytes) -> None:
    """Bytes of both directions, until both ends have closed."""
    server.sendall(head)
    back = threading.Thread(target=_pump, args=(server, client), daemon=True)
    back.start()
    _pump(client, server)
    back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        if not (byte := sock.recv(1)):
            raise ConnectionError("closed within a head")
        data += byte
    return data


def _read_body(sock: socket.socket, head: bytes) -> bytes:
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    left, parts = int(fields.get(b"content-length", 0)), []
    while left:
        if not (part := sock.recv(min(left, 2**20))):
            raise ConnectionError("closed within a body")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _reset(sock: socket.socket) -> None:
    """Close with a reset: what was not sent yet is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
