# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The front of a server in a test, and Triton as a script behind it."""

import contextlib
import http.client
import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

from nemo_aligner.servers.front import Front
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.servers.triton_host import REQUEST_PARAMETER, TritonHost
from tests.patience import patience


def open_front(endpoints, access, port=0, tls=None, kind=Front):
    """A front that serves `endpoints`, each with its function, until `close`. 0: a free port."""
    front = kind("127.0.0.1", port or find_free_port(), endpoints, access, tls)
    front.open()
    return front


def ask(address, method, path, body=None, headers=None, limit_s=20):
    """Status, headers and body of the reply; status 0 if there is none."""
    connection = http.client.HTTPConnection(*address, timeout=patience(limit_s))
    with contextlib.closing(connection):
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, {}, b""


class ScriptedTriton(socketserver.ThreadingUnixStreamServer):
    """Hands each request over, as `TritonHost` does.

    Attributes:
        front: what hands it requests.
        seen: method, path and body of each request.
        handled: endpoints whose functions have been called; those note it.
        says: from a path to what it describes there.
        cut_short: path to which its reply lacks a byte.
    """

    daemon_threads = True

    def __init__(self, path, says=lambda path: b""):
        super().__init__(str(path), _Script)
        self.path, self.front = str(path), None
        self.seen, self.handled, self.says, self.cut_short = [], [], says, None
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def hand_over(self, name):
        self.front.hand_over(name)

    def open_front(self, handlers, access, port=0):
        self.front = open_front(handlers, access, port, kind=TritonHost)
        self.front.socket_path = self.path
        return self.front


class _Script(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing."""

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, body))
        if self.command == "POST":
            head = json.loads(body[: int(self.headers["Inference-Header-Content-Length"])])
            self.server.hand_over(head["parameters"][REQUEST_PARAMETER])
        said = self.server.says(self.path)
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(said) + (self.path == self.server.cut_short)))
        self.end_headers()
        self.wfile.write(said)
        self.close_connection = True

    do_POST = do_GET
