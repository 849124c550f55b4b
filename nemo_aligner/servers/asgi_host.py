# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A server job without Triton: its endpoints behind uvicorn, an ASGI server, in rank 0.

The wire is that of Triton (kserve.py), the rules those of admission.py. It needs no other process
and no shared memory, and it can encrypt. ASGI has no sign of life, hence `_Connection`.
"""

import asyncio
import json
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import h11
import uvicorn
from nemo.utils import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_aligner.core.errors import cause_of
from nemo_aligner.servers.admission import (
    BODY_S,
    FIRST_REQUEST_S,
    JSON,
    MOST_CONNECTIONS,
    NEXT_REQUEST_S,
    Access,
    Admission,
    Admitted,
    RefusedError,
    Reply,
    error_reply,
    read_head,
)
from nemo_aligner.servers.exchange import HEARTBEAT_HEADER, HEARTBEAT_S, LEASE_HEADER
from nemo_aligner.servers.kserve import model_config, model_metadata
from nemo_aligner.servers.ports import port_error
from nemo_aligner.servers.schema import Endpoint, Handler
from nemo_aligner.servers.threads import in_thread

# Names of functions of the connection, in the state of an ASGI scope.
_ADMITTED, _CONTINUE = "admitted", "continue"
STOP_S = 2.0  # for the last replies, when the server ends


class AsgiHost:
    """uvicorn in a thread of rank 0, and the ASGI application that it runs."""

    name = "uvicorn"

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        access: Access,
        tls: ssl.SSLContext | None = None,
    ):
        self.host, self.port, self._tls = host, port, tls
        self.admission = Admission(endpoints, access)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, should_stop: Callable[[], bool]) -> None:
        """See `Host.start`. `UserError`: the port is taken."""
        try:
            listening = socket.create_server((self.host, self.port), backlog=1024)
        except (OSError, OverflowError) as error:
            raise port_error(self.host, self.port, error) from error
        config = uvicorn.Config(
            self,
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_keep_alive=int(NEXT_REQUEST_S),
            timeout_graceful_shutdown=int(STOP_S),
        )
        config.load()
        config.ssl = self._tls  # as it was checked at the start of the job
        self._server = uvicorn.Server(config)
        self._thread = in_thread("uvicorn", self._server.run, [listening])
        while not self._server.started and not should_stop():
            if not self._thread.is_alive():
                raise RuntimeError("uvicorn ended while it started")
            time.sleep(0.02)

    def failure(self) -> str | None:
        runs = self._thread is not None and self._thread.is_alive()
        return None if runs else "uvicorn ended by itself"

    def stop(self) -> None:
        """Close the port, then send the last replies. A second call does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(STOP_S + 1.0)
        self.admission.replies.close()

    def kill(self) -> None:
        """End nothing: there is nothing outside this process."""

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[..., Any]
    ) -> None:
        try:
            status, headers, body = await self._reply(scope, receive)
        except RefusedError as refusal:
            status, headers, body = error_reply(refusal.status, str(refusal))
        except Exception as error:
            logging.error(f"{scope['path']}: {traceback.format_exc()}")
            status, headers, body = error_reply(500, cause_of(error))
        headers = self.admission.complete(headers, body)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    async def _reply(self, scope: dict[str, Any], receive: Callable[[], Any]) -> Reply:
        found = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}

        def header(name: str) -> str | None:
            return found.get(name.lower())

        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        path = (scope["raw_path"] + query).decode("latin-1")
        request = self.admission.admit(scope["method"], path, header)
        scope["state"][_ADMITTED]()
        if request is None:
            return 200, {}, b""
        if request.what != "infer":
            return 200, {"Content-Type": JSON}, self._describe(request)
        with self.admission.leases.working_for(header(LEASE_HEADER)):
            body = _Body(receive)
            head = read_head(await body.read(request.head_size))
            tensors = await body.read(request.length - request.head_size)
            assert request.endpoint is not None
            work = asyncio.wrap_future(
                self.admission.replies.submit(request.endpoint, head, tensors, request.length)
            )
            while not (await asyncio.wait([work], timeout=HEARTBEAT_S))[0]:
                if header(HEARTBEAT_HEADER) is not None:
                    scope["state"][_CONTINUE]()
            return await work

    def _describe(self, request: Admitted) -> bytes:
        if request.what in ("live", "ready"):
            return b""
        if request.endpoint is None:
            extensions = ["binary_tensor_data", "model_configuration"]
            about: Any = {"name": "nemo_aligner", "version": "", "extensions": extensions}
        else:
            describe = model_config if request.what == "config" else model_metadata
            about = describe(self.admission.endpoints[request.endpoint])
        return json.dumps(about).encode()


class _Connection(H11Protocol):
    """A connection of uvicorn's with signs of life and the time limits of admission.py."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        own = {_ADMITTED: self._note_admitted, _CONTINUE: self._give_sign_of_life}
        super().__init__(config, server_state, {**app_state, **own}, _loop)
        self._has_admitted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self.loop.call_later(FIRST_REQUEST_S, self._close_unadmitted)

    def on_response_complete(self) -> None:
        """Read what a refused client still sends, up to BODY_S, lest it gets a reset instead."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(BODY_S, self._close_if_refused, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the form of all errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            _, headers, body = error_reply(400, msg)
            headers |= {"Content-Length": str(len(body)), "Connection": "close"}
            events = h11.Response(status_code=400, headers=[*headers.items()]), h11.Data(data=body)
            for event in (*events, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _note_admitted(self) -> None:
        self._has_admitted = True

    def _close_unadmitted(self) -> None:
        if self._has_admitted or self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:  # of a refused request
            self.loop.call_later(FIRST_REQUEST_S, self._close_unadmitted)
        else:
            self.transport.close()

    def _close_if_refused(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()

    def _give_sign_of_life(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing():
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event))


class _Body:
    def __init__(self, receive: Callable[[], Any]):
        self._receive, self._rest = receive, memoryview(b"")

    async def read(self, size: int) -> bytearray:
        """The next `size` bytes; `RefusedError` if they do not come."""
        data, at = bytearray(size), 0
        while at < size:
            if not self._rest:
                try:
                    message = await asyncio.wait_for(self._receive(), BODY_S)
                except asyncio.TimeoutError:
                    raise RefusedError(408, f"nothing came for {BODY_S:.0f} s") from None
                if not message.get("body") and not message.get("more_body"):
                    raise RefusedError(400, "the body is shorter than it was announced")
                self._rest = memoryview(message["body"])
            part = self._rest[: size - at]
            data[at : at + len(part)] = part
            self._rest = self._rest[len(part) :]
            at += len(part)
        return data
