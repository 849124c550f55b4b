# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests that are wrong somewhere, to every endpoint of a critic server: each gets
an error of one line, the server goes on, and scores stay what they were.
"""

import json
import os
import random
import struct
from dataclasses import dataclass, field

import numpy as np
import pytest

from nemo_aligner.servers.exchange import InferRequest
from tests.chaos.test_soak import memory_mb
from tests.functional.critic_job import RAISE, VOCAB, CriticJob
from tests.scripted_triton import ask

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", 10_000))  # per endpoint
FEW = 100  # in `make test-full`
GROWTH_MB = 64  # of all processes of the server, between a tenth of the requests and their end

ROWS, WIDTH = 3, 8
TOKENS = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % (RAISE - 2)
VALID = {
    "critic_infer": {"tokens": TOKENS, "sequence_lengths": np.full((ROWS, 1), WIDTH)},
    "critic_train": {
        "tokens": TOKENS,
        "returns": np.ones((ROWS, WIDTH - 1), np.float32),
        "prev_values": np.zeros((ROWS, WIDTH - 1), np.float32),
        "mask": np.ones((ROWS, WIDTH - 1), np.float32),
    },
    "critic_save": {"dummy_var": np.array([[1]]), "actor_step": np.array([[1]])},
    "critic_resume": {"actor_step": np.array([[1]])},
    "critic_status": {"dummy_var": np.array([[1]])},
}
WRONG_VALUES = (None, True, -1, 0, 1, 2**63, 1e30, "", "INT64", "BYTES", [], [-1], [2**40], {})
WRONG_VALUES += ([[1]],)


@dataclass
class Request:
    """A request as it goes over the wire."""

    path: str
    head: dict | bytes
    buffers: list[bytes]
    method: str = "POST"
    head_length: str | None = None
    wrong: list[str] = field(default_factory=list)  # what was done to it

    @classmethod
    def valid(cls, endpoint: str) -> "Request":
        whole = InferRequest(endpoint, VALID[endpoint])
        data = b"".join(whole.body)
        size = int(whole.headers["Inference-Header-Content-Length"])
        head = json.loads(data[:size])
        buffers = []
        for tensor in head["inputs"]:
            length = tensor["parameters"]["binary_data_size"]
            buffers.append(data[size : size + length])
            size += length
        return cls(whole.path, head, buffers)

    def send(self, port: int) -> tuple[int, bytes]:
        """HTTP status and body of the reply; (0, b"") if the server only closed the connection."""
        head = self.head if isinstance(self.head, bytes) else json.dumps(self.head).encode()
        headers = {"Inference-Header-Content-Length": self.head_length or str(len(head))}
        body = head + b"".join(self.buffers)
        status, _, reply = ask(("127.0.0.1", port), self.method, self.path, body, headers, 30)
        return status, reply


def make_wrong(request: Request, draw: random.Random) -> None:
    """Change one thing of a request; a later change may undo or hide it."""
    head, inputs = request.head, None
    if isinstance(head, dict) and isinstance(head.get("inputs"), list) and head["inputs"]:
        inputs = [tensor for tensor in head["inputs"] if isinstance(tensor, dict)]
    ways = ["bytes", "length", "path", "method", "text"]
    ways += ["field", "field", "values", "values", "tensor", "top"] if inputs else []
    way = draw.choice(ways)
    request.wrong.append(way)
    if way == "bytes":
        place = draw.randrange(len(request.buffers)) if request.buffers else None
        if place is not None:
            buffer = request.buffers[place]
            cut = draw.randrange(len(buffer) + 1)
            request.buffers[place] = draw.choice([buffer[:cut], buffer + b"x" * cut])
    elif way == "length":
        request.head_length = draw.choice(["0", "1", "-1", "x", "9" * 30, str(2**31), "17"])
    elif way == "path":
        paths = ["/", "/v2", "/v2/models/none/infer", "//", "/%00", request.path * 9]
        request.path = draw.choice(paths)
    elif way == "method":
        request.method = draw.choice(["PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    elif way == "text":
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        place = draw.randrange(len(text) + 1)
        request.head = text[:place] + draw.randbytes(draw.randrange(4)) + text[place + 1 :]
    elif way == "top":
        head[draw.choice(["inputs", "outputs", "id", "parameters"])] = draw.choice(WRONG_VALUES)
    elif way == "tensor":
        tensor = draw.choice(inputs)
        if draw.random() < 0.5:
            head["inputs"].remove(tensor)
        else:
            head["inputs"].append(dict(tensor, name=draw.choice([tensor.get("name"), "x", ""])))
    elif way == "field":
        tensor = draw.choice(inputs)
        name = draw.choice(["name", "shape", "datatype", "parameters", "data"])
        if draw.random() < 0.2:
            tensor.pop(name, None)
        else:
            tensor[name] = draw.choice(WRONG_VALUES)
    else:
        place = draw.randrange(len(request.buffers))
        number = draw.choice([-1, VOCAB, 2**62, -(2**63), 0])
        integer = struct.pack("<q", number)
        real = struct.pack("<f", draw.choice([float("nan"), float("inf"), 1e30, -1e7])) * 2
        where = 8 * draw.randrange(max(len(request.buffers[place]) // 8, 1))
        buffer = bytearray(request.buffers[place])
        buffer[where : where + 8] = draw.choice([integer, real])
        request.buffers[place] = bytes(buffer)


CASES = [pytest.param(name, REQUESTS, marks=pytest.mark.chaos) for name in VALID]
CASES.append(pytest.param("critic_infer", FEW, marks=pytest.mark.full))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("endpoint, count", CASES)
def test_wrong_requests_change_nothing(endpoint, count):
    draw = random.Random(endpoint)
    with CriticJob(ranks=1) as job:
        job.wait_until_serving()
        status, scores = Request.valid("critic_infer").send(job.port)
        assert status == 200, scores
        refused, before = 0, 0.0
        for number in range(count):
            if number == count // 10:
                before = sum(memory_mb(job.rank_pids()[0]).values())
            request = Request.valid(endpoint)
            for _ in range(draw.randrange(1, 4)):
                make_wrong(request, draw)
            status, body = request.send(job.port)
            refused += status != 200
            assert b"Traceback" not in body and b"\\n" not in body, (request, body)
            assert status < 500 or status in (500, 501, 503), (request, status, body)
            assert job.processes[0].poll() is None, (request, job.log()[-3000:])
        assert refused > count / 2
        grown = sum(memory_mb(job.rank_pids()[0]).values()) - before
        assert grown < GROWTH_MB, f"{count} requests made the server {grown:.0f} MB larger"
        status, again = Request.valid("critic_infer").send(job.port)
        assert status == 200, again
        if endpoint != "critic_train":  # a change may leave it right, and it is learned from
            assert again == scores
        job.signal_rank(0)
        job.must_exit_with(0)
