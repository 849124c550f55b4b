# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers for tests of the clients that follow a script, for failures at moments at which a real
server cannot be made to fail.
"""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from nemo_aligner.servers.kserve import model_config
from nemo_aligner.servers.schema import Endpoint, reward_model_endpoint


def triton_config(endpoint: Endpoint, max_batch_size: int | None = None) -> dict:
    """What Triton says of `endpoint` at /v2/models/NAME/config (test_kserve.py compares it)."""
    config = model_config(endpoint)
    return config if max_batch_size is None else {**config, "max_batch_size": max_batch_size}


class ScriptedServer(ThreadingHTTPServer):
    """What a probe and a request get is sent as it is, then the connection is closed.

    Attributes:
        ready: reply to probes: an HTTP status, or None for silence.
        replies: whole replies to the probes of some paths, in place of `ready`.
        script: function(index of the request, its rewards) -> bytes to send before the connection
            is closed, or None to keep it open and send nothing. The reward of a request is its
            first token.
        config: what it says of its model.
        requests: number of requests so far.
        inputs: their names, for each request.
        at_once: the most requests that were open at the same time.
    """

    def __init__(self, script=None, ready=200):
        self.script, self.ready = script or (lambda index, rewards: answer(rewards)), ready
        self.config = triton_config(reward_model_endpoint())
        self.probes = self.requests = self.open = self.at_once = 0
        self.inputs, self.replies = [], {}
        self.lock, self.ends = threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Refuse connections; those that are kept open are closed."""
        self.ends.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """A client has left."""

    def reply(self, index, body, start):
        """What to send for a request whose arrays begin at `start` of its body."""
        (token,) = np.frombuffer(body[start : start + 8], np.int64)
        return self.script(index, [[float(token)]])


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing."""

    def send(self, reply):
        if reply is None:
            self.server.ends.wait()
        else:
            self.wfile.write(reply)

    def do_GET(self):
        server = self.server
        if self.path.endswith("/config") and server.ready is not None:
            self.send(http(server.config, 200))
            return
        server.probes += 1
        empty = f"HTTP/1.1 {server.ready} X\r\nContent-Length: 0\r\n\r\n".encode()
        self.send(server.replies.get(self.path.encode(), None if server.ready is None else empty))

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            index = server.requests
            server.requests += 1
            server.open += 1
            server.at_once = max(server.at_once, server.open)
        start = int(self.headers["Inference-Header-Content-Length"])
        server.inputs.append([item["name"] for item in json.loads(body[:start])["inputs"]])
        reply = server.reply(index, body, start)
        with server.lock:
            server.open -= 1
        self.send(reply)


def answer(rewards, status=200):
    output = {"name": "rewards", "datatype": "FP32", "shape": [len(rewards), len(rewards[0])]}
    return http({"outputs": [{**output, "data": [x for row in rewards for x in row]}]}, status)


def http(content, status):
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def failure(text, status=500):
    return lambda index, rewards: http({"error": text}, status)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def slowly(index, rewards):
    time.sleep(0.1)
    return answer(rewards)
