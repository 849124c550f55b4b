# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The threads of rank 0 that work on requests: behind uvicorn (asgi_host.py) on all that come,
behind Triton (front.py) on those that it hands over.

Each endpoint has a thread, and a second one for its large scoring requests: a small one never
stands in a line behind a large one.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

from nemo_aligner.servers.admission import HEAD_SIZE_HEADER, error_body, failure_of
from nemo_aligner.servers.kserve import (
    Buffer,
    decode_request,
    encode_reply,
    rows_of,
    wanted_outputs,
)
from nemo_aligner.servers.schema import Endpoint, Handler

# A request is large above this number of samples, or bytes of its body.
SMALL_ROWS, SMALL_BYTES = 32, 2**17

JSON, BINARY = "application/json", "application/octet-stream"

# Status, headers and body.
Reply = tuple[int, dict[str, str], bytes]


def error_reply(status: int, line: str) -> Reply:
    return status, {"Content-Type": JSON}, error_body(line)


def shutting_down() -> Reply:
    return error_reply(503, "Server is stopping")


class DirectReplies:
    """The endpoints of a server, each with its function, and the threads that work on requests."""

    def __init__(self, endpoints: Sequence[tuple[Endpoint, Handler]]):
        self._endpoints = {endpoint.name: endpoint for endpoint, _function in endpoints}
        self._handlers = {endpoint.name: function for endpoint, function in endpoints}
        self._lines = {
            (endpoint.name, large): concurrent.futures.ThreadPoolExecutor(
                1, thread_name_prefix=f"{endpoint.name}{'-large' if large else ''}"
            )
            for endpoint, _function in endpoints
            for large in (False, True)
            if endpoint.batching or not large
        }

    def is_large(self, name: str, head: dict[str, Any], length: int) -> bool:
        """Whether this request, with `length` bytes, is for the line of the large ones."""
        return self._endpoints[name].batching and is_large(head, length)

    def submit(
        self, name: str, head: dict[str, Any], tensors: Buffer, large: bool
    ) -> "concurrent.futures.Future[Reply]":
        """Have a request worked on in its line, unless the server is ending."""
        try:
            return self._lines[name, large].submit(self._reply, name, head, tensors)
        except RuntimeError:  # after `close`
            refused: concurrent.futures.Future[Reply] = concurrent.futures.Future()
            refused.set_result(shutting_down())
            return refused

    def close(self) -> None:
        """Drop the requests that no thread has begun to work on."""
        for line in self._lines.values():
            line.shutdown(wait=False, cancel_futures=True)

    def _reply(self, name: str, head: dict[str, Any], tensors: Buffer) -> Reply:
        """Thread of a line: work on one request."""
        endpoint = self._endpoints[name]
        try:
            wanted = wanted_outputs(endpoint, head)
            arrays = self._handlers[name](**decode_request(endpoint, head, tensors))
            size, body = encode_reply(endpoint, arrays, head, wanted)
        except Exception as error:
            return error_reply(*failure_of(name, error))
        if size is None:
            return 200, {"Content-Type": JSON}, body
        return 200, {"Content-Type": BINARY, HEAD_SIZE_HEADER: str(size)}, body


def is_large(head: dict[str, Any], length: int) -> bool:
    """Whether a scoring request, with a body of `length` bytes, is for the large ones' line."""
    return rows_of(head) > SMALL_ROWS or length > SMALL_BYTES
