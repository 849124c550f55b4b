# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers for tests of the clients: sockets that follow a script, for failures at moments at which
a real server cannot be made to fail.
"""

import contextlib
import json
import socket
import threading
import time

import numpy as np

from nemo_aligner.servers.kserve import model_config
from nemo_aligner.servers.schema import Endpoint, reward_model_endpoint


def triton_config(endpoint: Endpoint, max_batch_size: int | None = None) -> dict:
    """What Triton says of `endpoint` at /v2/models/NAME/config (test_kserve.py compares it)."""
    config = model_config(endpoint)
    return config if max_batch_size is None else {**config, "max_batch_size": max_batch_size}


class ScriptedServer:
    """A socket that speaks as much HTTP as a probe and a request need.

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
        self._lock = threading.Lock()
        self._hold = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Refuse connections; those that are kept open are closed."""
        self._hold.set()
        with contextlib.suppress(OSError):  # stopped already
            # A thread waits in `accept`: closing alone would let one more connection in.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return
                data += more
            head, body = data.split(b"\r\n\r\n", 1)
            if head.split()[1].endswith(b"/config") and self.ready is not None:
                connection.sendall(http(self.config, 200))
                return
            if head.startswith(b"GET"):
                self.probes += 1
                if (reply := self.replies.get(head.split()[1])) is not None:
                    connection.sendall(reply)
                elif self.ready is None:
                    self._hold.wait()
                else:
                    head = f"HTTP/1.1 {self.ready} X\r\nContent-Length: 0\r\n\r\n"
                    connection.sendall(head.encode())
                return
            fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
            while len(body) < int(fields["content-length"]):
                body += connection.recv(65536)
            with self._lock:
                index = self.requests
                self.requests += 1
                self.open += 1
                self.at_once = max(self.at_once, self.open)
            start = int(fields["inference-header-content-length"])
            self.inputs.append([item["name"] for item in json.loads(body[:start])["inputs"]])
            reply = self.reply(index, body, start)
            with self._lock:
                self.open -= 1
            if reply is None:
                self._hold.wait()
            else:
                connection.sendall(reply)

    def reply(self, index, body, start):
        """What to send for a request whose arrays begin at `start` of its body."""
        (token,) = np.frombuffer(body[start : start + 8], np.int64)
        return self.script(index, [[float(token)]])


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
