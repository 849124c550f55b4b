# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the front of a server passes on, and what it refuses; Triton is a script here."""

import contextlib
import http.client
import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers import front as front_module
from nemo_aligner.servers.front import Front
from nemo_aligner.servers.ports import find_free_port
from tests.patience import patience, wait_until

pytestmark = pytest.mark.timeout(120)

INFER = "/v2/models/critic_infer/infer"
SAVE = "/v2/models/critic_save/infer"


class Triton(socketserver.ThreadingUnixStreamServer):
    """Replies with what it got: its length, or the bytes themselves for `critic_infer`.

    Attributes:
        seen: method, path and length of the body of each request.
    """

    daemon_threads = True

    def __init__(self, path):
        super().__init__(str(path), _Echo)
        self.seen = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, len(body)))
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(body) + (self.path == "/v2/health/live")))
        for name in ("Inference-Header-Content-Length", "Content-Type"):
            if name in self.headers:
                self.send_header(name, self.headers[name])
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True  # one byte short for /v2/health/live

    do_POST = do_GET


@pytest.fixture
def triton(tmp_path):
    with Triton(tmp_path / "http") as server:
        yield server
        server.shutdown()


@pytest.fixture
def front(triton):
    limits = {"critic_infer": 3 * 2**20, "critic_save": 100}
    server = Front("127.0.0.1", find_free_port(), triton.server_address, limits)
    server.open()
    yield server
    server.close()


def ask(front, method, path, body=None, **headers):
    """Status, headers and body of the reply; status 0 if there is none."""
    connection = http.client.HTTPConnection(*front.address, timeout=patience(20))
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, {}, b""


def test_a_request_and_its_reply_pass_unchanged(front, triton):
    head = b'{"inputs": []}'
    for size in (0, 10, 2 * 2**20 + 3):  # in one part, and in several
        body = head + bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        status, headers, reply = ask(
            front, "POST", INFER, body, Inference_Header_Content_Length=str(len(head))
        )
        assert (status, reply) == (200, body)
        assert headers["Inference-Header-Content-Length"] == str(len(head))
    for path in (
        "/v2",
        "/v2/health/ready",
        "/v2/models/critic_save/config",
        "/v2/models/critic_save",
    ):
        assert ask(front, "GET", path)[0] == 200
        assert triton.seen[-1] == ("GET", path, 0)


@pytest.mark.parametrize(
    "method, path, body, headers, status, word",
    [
        ("POST", "/v2/repository/models/evil/load", b"{}", {}, 404, "critic_infer, critic_save"),
        ("GET", "/v2/repository/index", None, {}, 404, "unknown model"),
        ("POST", "/v2/logging", b"{}", {}, 404, "unknown model"),
        ("POST", "/v2/systemsharedmemory/region/r/register", b"{}", {}, 404, "unknown model"),
        ("GET", "/v2/models/other/ready", None, {}, 404, "'/v2/models/other/ready'"),
        ("GET", "/v2/models/critic_infer/../x", None, {}, 404, "unknown model"),
        ("GET", "/v2/models/critic_infer/stats", None, {}, 404, "unknown model"),
        ("POST", "/v2/models/critic_infer/config", b"{}", {}, 405, "POST"),
        ("GET", INFER, None, {}, 405, "GET"),
        ("POST", INFER, b"[" * 500_000, {}, 400, "JSON"),
        ("POST", INFER, b"[1]", {}, 400, "no object"),
        ("POST", INFER, b"\xff", {}, 400, "JSON"),
        ("POST", INFER, iter([b"{}"] * 3), {}, 411, "Content-Length"),
        ("POST", INFER, b"{}", {"Content_Encoding": "gzip"}, 411, "as it is"),
        ("POST", INFER, b"{}", {"Content_Length": "-1"}, 400, "'-1'"),
        ("POST", INFER, b"{}", {"Inference_Header_Content_Length": "3"}, 413, "3 bytes"),
        ("POST", INFER, b" " * (2**20 + 1), {}, 413, "1048576"),
        ("POST", SAVE, b"{}" + b" " * 99, {}, 413, "101 bytes, but this server takes at most 100"),
        ("POST", INFER, bytes(2**23), {}, 413, "8388608"),
    ],
)  # fmt: skip
def test_what_triton_must_not_see_is_refused(
    front, triton, method, path, body, headers, status, word
):
    got, _headers, reply = ask(front, method, path, body, **headers)
    assert got == status and word in json.loads(reply)["error"], (got, reply)
    assert not triton.seen


def test_an_incomplete_reply_breaks_the_connection(front):
    assert ask(front, "GET", "/v2/health/live")[0] == 0


def test_without_triton_the_server_is_not_ready(front, triton):
    triton.shutdown()
    triton.server_close()
    status, _headers, reply = ask(front, "GET", "/v2/health/ready")
    assert status == 503 and "Server is not ready" in json.loads(reply)["error"]


def test_too_many_connections_are_closed(front, triton, monkeypatch):
    monkeypatch.setattr(front, "_free", threading.BoundedSemaphore(1))
    held = http.client.HTTPConnection(*front.address, timeout=patience(20))
    with contextlib.closing(held):
        held.connect()
        wait_until(lambda: ask(front, "GET", "/v2")[0] == 0, 10, lambda: "a refusal")
    wait_until(lambda: ask(front, "GET", "/v2")[0] == 200, 10, lambda: "a free place")


def test_a_connection_without_a_request_is_closed(front, monkeypatch):
    monkeypatch.setattr(front_module._Handler, "timeout", 0.2)
    silent = http.client.HTTPConnection(*front.address, timeout=patience(20))
    with contextlib.closing(silent):
        silent.connect()
        assert silent.sock.recv(1) == b""


def test_a_taken_port_is_named(front):
    host, port = front.address
    with pytest.raises(UserError, match=f"{host}:{port}.*trainer.ppo.port"):
        Front(host, port, "unused", {})
