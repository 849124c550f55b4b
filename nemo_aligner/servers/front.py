# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door of a server: lets in what may enter (admission.py) and has it worked on. The wire is
that of Triton (kserve.py), also where there is none (`server.frontend=asgi`).
"""

import concurrent.futures
import json
import ssl
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemo.utils import logging

from nemo_aligner.core.errors import ServerEndingError, ServerRequestError, UserError, cause_of
from nemo_aligner.servers.admission import (
    BINARY,
    HEAD_SIZE_HEADER,
    JSON,
    STOPPING,
    Access,
    Admission,
    Admitted,
    Reply,
    read_json,
)
from nemo_aligner.servers.exchange import INSTANCE_HEADER, LEASE_HEADER
from nemo_aligner.servers.http_server import HttpServer, Request
from nemo_aligner.servers.kserve import (
    Buffer,
    decode_request,
    encode_reply,
    model_config,
    model_metadata,
    rows_of,
    wanted_outputs,
)
from nemo_aligner.servers.schema import Endpoint, Handler

# A request is large above this number of samples, or bytes of its body.
SMALL_ROWS, SMALL_BYTES = 32, 2**17

Future = concurrent.futures.Future[Reply]
Submit = Callable[[], Future]  # has a request worked on


class Front(HttpServer):
    """The door of a server, which has one thread for each of its endpoints, and another one for
    large scoring requests.
    """

    name = "uvicorn"

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
        tls: ssl.SSLContext | None = None,
    ):
        super().__init__(host, port, tls)
        self.endpoints = [endpoint for endpoint, _ in endpoints]
        self.admission = Admission(self.endpoints, access)
        self._handlers = {endpoint.name: handler for endpoint, handler in endpoints}
        self._lines = {
            (endpoint.name, large): concurrent.futures.ThreadPoolExecutor(
                1, thread_name_prefix=f"{endpoint.name}{'-large' if large else ''}"
            )
            for endpoint in self.endpoints
            for large in (False, True)
            if endpoint.batching or not large
        }

    def start(self, should_stop: Callable[[], bool]) -> None:
        """Serve; returns once all endpoints are ready, or if it should stop."""
        self.open()

    def failure(self) -> str | None:
        """Why it can serve no more; None while it can. To be called every few seconds."""
        return None if self.is_open else "uvicorn ended by itself"

    def close_port(self) -> None:
        """As of `HttpServer`; requests that nobody has begun to work on are refused."""
        super().close_port()
        for line in self._lines.values():
            line.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.close_port()
        super().close()

    def kill(self) -> None:
        """End what it runs outside this process, at once: nothing."""

    def error(self, status: int, line: str) -> Reply:
        return status, {"Content-Type": JSON}, json.dumps({"error": line}).encode()

    def complete(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        return {INSTANCE_HEADER: self.admission.instance, **super().complete(headers, body)}

    async def reply(self, request: Request) -> Reply:
        admitted = self.admission.admit(request.method, request.path, request.header)
        request.note_admitted()
        if admitted is None:
            return 200, {}, b""
        if admitted.what != "infer":
            return await self.describe(request, admitted)
        assert admitted.endpoint is not None
        with self.admission.leases.working_for(request.header(LEASE_HEADER)):
            head = read_json(await request.read(admitted.head_size))
            tensors = await request.read(admitted.length - admitted.head_size)
            submit = partial(self.submit, admitted.endpoint, head, tensors, admitted.length)
            try:
                return await self.infer(request, admitted.endpoint, head, submit)
            except concurrent.futures.CancelledError:  # nobody had begun to work on it
                return self.error(503, STOPPING)

    async def describe(self, request: Request, admitted: Admitted) -> Reply:
        """The reply to a GET."""
        about: Any = {"name": "nemo_aligner", "version": ""}
        about["extensions"] = ["binary_tensor_data", "model_configuration"]
        if admitted.endpoint is not None:
            make = model_config if admitted.what == "config" else model_metadata
            about = make(admitted.endpoint)
        body = b"" if admitted.what in ("live", "ready") else json.dumps(about).encode()
        return 200, {"Content-Type": JSON}, body

    async def infer(
        self, request: Request, endpoint: Endpoint, head: dict[str, Any], submit: Submit
    ) -> Reply:
        """The reply to a request, which `submit` has worked on."""
        return await request.wait_for(submit())

    def submit(
        self, endpoint: Endpoint, head: dict[str, Any], tensors: Buffer, length: int
    ) -> Future:
        """Have a request, whose body has `length` bytes, worked on in its line."""
        line = self._lines[endpoint.name, endpoint.batching and is_large(head, length)]
        try:
            return line.submit(self._work_on, endpoint, head, tensors)
        except RuntimeError:  # after `close_port`
            refused = Future()
            refused.set_result(self.error(503, STOPPING))
            return refused

    def _work_on(self, endpoint: Endpoint, head: dict[str, Any], tensors: Buffer) -> Reply:
        name = endpoint.name
        try:
            wanted = wanted_outputs(endpoint, head)
            arrays = self._handlers[name](**decode_request(endpoint, head, tensors))
            size, body = encode_reply(endpoint, arrays, head, wanted)
        except UserError as error:
            logging.warning(f"{name} refuses a request: {cause_of(error)}")
            return self.error(400, cause_of(error))
        except Exception as error:
            # An operation that raised a `ServerRequestError` has logged it.
            if not isinstance(error, ServerRequestError | ServerEndingError):
                logging.error(f"{name} failed:\n{traceback.format_exc()}")
            status = 503 if isinstance(error, ServerEndingError) else 500
            return self.error(status, cause_of(error))
        if size is None:
            return 200, {"Content-Type": JSON}, body
        return 200, {"Content-Type": BINARY, HEAD_SIZE_HEADER: str(size)}, body


def is_large(head: dict[str, Any], length: int) -> bool:
    """Whether a scoring request, with a body of `length` bytes, is for the large ones' line."""
    return rows_of(head) > SMALL_ROWS or length > SMALL_BYTES
