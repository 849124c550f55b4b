# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP servers of jobs: uvicorn, an ASGI server, in a thread, which can encrypt.

ASGI has no sign of life for a client that waits, hence `_Connection`.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import h11
import uvicorn
from nemo.utils import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_aligner.core.errors import cause_of
from nemo_aligner.servers.admission import (
    BODY_S,
    FIRST_REQUEST_S,
    MOST_CONNECTIONS,
    NEXT_REQUEST_S,
    STOPPING,
    RefusedError,
    Reply,
)
from nemo_aligner.servers.exchange import HEARTBEAT_HEADER, HEARTBEAT_S
from nemo_aligner.servers.ports import SERVER_PORT, port_error
from nemo_aligner.servers.threads import in_thread

T = TypeVar("T")

# Names of functions of the connection, in the state of an ASGI scope.
_ADMITTED, _CONTINUE = "admitted", "continue"
STOP_S = 2.0  # for the last replies, when the server ends


class Request:
    """A request as ASGI has it; to be used on the event loop."""

    def __init__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]]):
        self.method: str = scope["method"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        self.path: str = (scope["raw_path"] + query).decode("latin-1")
        found = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.header: Callable[[str], str | None] = lambda name: found.get(name.lower())
        self.note_admitted: Callable[[], None] = scope["state"][_ADMITTED]
        self._give_sign_of_life: Callable[[], None] = scope["state"][_CONTINUE]
        self._receive, self._rest = receive, memoryview(b"")
        self._watcher: asyncio.Task[None] | None = None

    async def read(self, size: int) -> bytearray:
        """The next `size` bytes of the body; `RefusedError` if they do not come."""
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

    async def wait_for(self, future: "concurrent.futures.Future[T]") -> T:
        """The result of `future`; the client, whose body has been read, gets signs of life
        meanwhile if it wants them. `CancelledError` of futures: it was cancelled, which it is if
        nobody has begun with it when the client has gone.
        """
        work, watcher = asyncio.wrap_future(future), self.watch()
        while not (await asyncio.wait([work], timeout=HEARTBEAT_S))[0]:
            if watcher.done():
                future.cancel()
            elif self.header(HEARTBEAT_HEADER) is not None:
                self._give_sign_of_life()
        if work.cancelled():
            raise concurrent.futures.CancelledError
        return work.result()

    def watch(self) -> "asyncio.Task[None]":
        """What ends when the client, whose body has been read, leaves."""

        async def until_it_leaves() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass

        self._watcher = self._watcher or asyncio.ensure_future(until_it_leaves())
        return self._watcher

    def asker(self) -> Callable[[], bool]:
        """A function for other threads that says whether the client still waits, now."""
        watcher, loop = self.watch(), asyncio.get_running_loop()

        async def has_left() -> bool:
            for _ in range(8):  # rounds of the loop, in which it reads what has come
                await asyncio.sleep(0)
            return watcher.done()

        return lambda: not asyncio.run_coroutine_threadsafe(has_left(), loop).result(BODY_S)

    def forget(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()


class HttpServer:
    """uvicorn in a thread: serves from `open` to `close`. `key`: of the port, for messages."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, key: str = SERVER_PORT
    ):
        self.address = self.host, self.port = host, port
        self._key, self._socket = key, socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._has_port = False
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
        config.ssl = tls  # as it was checked at the start of the job
        self._server, self._thread = uvicorn.Server(config), threading.Thread()

    def take_port(self) -> None:
        """Keep others from the port; it is not open yet. `UserError`: it is taken."""
        self._try_port(lambda: self._socket.bind(self.address))
        self._has_port = True

    def _try_port(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise port_error(*self.address, error, self._key) from error

    def open(self) -> None:
        """`UserError`: the port is taken."""
        if not self._has_port:
            self.take_port()
        self._try_port(lambda: self._socket.listen(1024))
        self._thread = in_thread("uvicorn", self._server.run, [self._socket])
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("uvicorn ended while it started")
            time.sleep(0.01)

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close_port(self) -> None:
        """Let no more connections in. Those that are open stay, for the replies."""
        for listener in getattr(self._server, "servers", ()):  # none while it starts
            with contextlib.suppress(RuntimeError):  # the loop has ended
                listener.get_loop().call_soon_threadsafe(listener.close)

    def close(self) -> None:
        """Close the port, then send the last replies. A second call does nothing."""
        self._server.should_exit = True
        if self.is_open:
            self._thread.join(STOP_S + 1.0)
        self._socket.close()

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        request = Request(scope, receive)
        try:
            status, headers, body = await self.reply(request)
        except asyncio.CancelledError:  # `close` waits no longer
            status, headers, body = self.error(503, STOPPING)
        except RefusedError as refusal:
            status, headers, body = self.error(refusal.status, str(refusal))
        except Exception as error:
            logging.error(f"{scope['path']}: {traceback.format_exc()}")
            status, headers, body = self.error(500, cause_of(error))
        finally:
            request.forget()
        headers = self.complete(headers, body)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    async def reply(self, request: Request) -> Reply:
        raise NotImplementedError

    def error(self, status: int, line: str) -> Reply:
        """A refusal in the form of this server."""
        raise NotImplementedError

    def complete(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        """The headers of a reply, of which `headers` are its own."""
        return {**headers, "Content-Length": str(len(body))}


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
            _, headers, body = self.config.loaded_app.error(400, msg)
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
