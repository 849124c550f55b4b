# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to a server that has a state, the critic: each goes to one start of one server only.

A critic that was restarted has the weights of its last checkpoint, and how much of a train request
it had applied is unknown: the remedy is to resume both jobs. (For reward models see fleet.py.)

* A request whose connection breaks or is silent, or whose reply is cut short, is sent again after
  each of RETRY_PAUSES_S: the server does nothing twice (an update has its `request_id`). A server
  that is not of this package cannot promise that: there the request fails at once.
* So it does if the connection is refused, or if Triton says that it lost the process behind it.
* After MAX_MISSED_PROBES unanswered probes all requests in flight fail. Of a server that answers
  probes but not the request, only `inference_timeout_s` ends it.
"""

import concurrent.futures
import http.client
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.servers.exchange import (
    INSTANCE_HEADER,
    LEASE_HEADER,
    LEASE_PATH,
    LEASE_S,
    MAX_MISSED_PROBES,
    ConnectionLostError,
    Exchange,
    InferRequest,
    NoReplyInTimeError,
    NotServingError,
    Peer,
    UntrustedServerError,
    error_text,
    type_and_message,
)
from nemo_aligner.servers.schema import Arrays, Endpoint
from nemo_aligner.servers.served_model import ServedModel, fit_requests, merge_replies
from nemo_aligner.servers.threads import in_thread, settle

RENEWAL_S = 5.0

MAX_IN_FLIGHT = 128
PROBE_INTERVAL_S = 10.0
PROBE_TIMEOUT_S = 10.0
CLOSING_GRACE_S = 5.0
RETRY_PAUSES_S = (0.2, 1.0, 3.0, 10.0)

RESTART_REMEDY = (
    "Look into the server job's log and restart both jobs with the same commands: they resume "
    "from their checkpoints."
)


@dataclass(eq=False)
class _Request:
    parts: list[InferRequest]  # sent one after another; several if the server takes few samples
    finish: Callable[[list[Arrays]], Arrays]  # makes and checks the reply
    alone: bool  # nothing else is in flight beside it
    repeatable: bool  # the server does nothing twice if it gets a part twice
    exchange: Exchange
    future: "concurrent.futures.Future[Arrays]" = field(default_factory=concurrent.futures.Future)


class ServerConnection:
    """One server, and the requests of this process that it has not yet replied to.

    Requests go out side by side. One sent alone waits for the replies to all earlier ones, and
    later ones wait for its reply: the server sees a train request before all submitted after it.
    `inference_timeout_s`: of one request, once it is sent; `setting`: its section, for messages.
    """

    def __init__(self, peer: Peer, inference_timeout_s: float, setting: str):
        self.peer = peer
        self.inference_timeout_s, self.setting = inference_timeout_s, setting
        self._lease: Lease | None = None
        self._waiting: deque[_Request] = deque()
        self._in_flight: set[_Request] = set()
        self._lock = threading.Condition()
        self._closed = False
        self._watcher = in_thread(f"watcher of {peer}", self._watch)

    def take_lease(self) -> None:
        """Become the client that may change the server; `LeaseTakenError` if another one is."""
        if self._lease is None:
            self._lease = Lease(self.peer)

    def submit(
        self,
        endpoint: str,
        data: Mapping[str, np.ndarray],
        alone: bool,
        check: Callable[[Arrays], None] | None = None,
        forms: tuple[Endpoint, ServedModel] | None = None,
    ) -> "concurrent.futures.Future[Arrays]":
        """As `HTTPCommunicator.send_data_to_server`, with the future of the reply. `alone`: keep
        the order (see the class). `forms`: the schema of `data` and of the reply, and the server's
        own description, which the request is made to fit; None sends `data` as it is.
        """
        headers: dict[str, str] = {}
        repeatable = False
        if forms is None:
            parts = [InferRequest(endpoint, data)]
        else:
            schema, served = forms
            parts = fit_requests(served, schema, dict(data))
            if served.instance is not None:
                headers[INSTANCE_HEADER] = served.instance
                repeatable = "request_id" in data or not served.lists("request_id")
        if self._lease is not None and self._lease.id is not None:
            headers[LEASE_HEADER] = self._lease.id

        def finish(replies: list[Arrays]) -> Arrays:
            reply = replies[0] if forms is None else merge_replies(forms[0], replies)
            if check is not None:
                check(reply)
            return reply

        exchange = Exchange(self.peer, headers, INSTANCE_HEADER in headers)
        request = _Request(parts, finish, alone, repeatable, exchange)
        with self._lock:
            if self._closed:
                raise ServerRequestError(f"{endpoint} at {self.peer}: this client is closed")
            self._waiting.append(request)
            self._dispatch()
        return request.future

    def close(self) -> None:
        """Refuse new requests; those in flight get CLOSING_GRACE_S, then they fail."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._fail(self._waiting.popleft(), "this client was closed before it was sent")
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._in_flight, CLOSING_GRACE_S)
            for request in self._in_flight:
                self._fail(request, "this client was closed before the reply came")
                request.exchange.abort()
        self._watcher.join(1.0)
        if self._lease is not None:
            self._lease.close()

    # ---- callers hold the lock ----

    def _dispatch(self) -> None:
        while self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
            alone = self._waiting[0].alone or any(other.alone for other in self._in_flight)
            if self._in_flight and alone:
                return
            request = self._waiting.popleft()
            try:
                in_thread(f"request to {self.peer}", self._send, request)
            except RuntimeError as error:  # no thread to be had
                self._fail(request, f"was not sent: {error}")
                continue
            self._in_flight.add(request)
            self._lock.notify_all()

    def _fail(
        self, request: _Request, why: str, kind: type[ServerRequestError] = ServerRequestError
    ) -> None:
        settle(
            request.future, kind(f"request to {request.parts[0].endpoint} at {self.peer} {why}")
        )

    # ---- threads ----

    def _send(self, request: _Request) -> None:
        failure = None
        try:
            reply = request.finish([self._run(request, part) for part in request.parts])
        except Exception as error:
            failure = self._explain(error)  # asks the server, so before the lock is taken
        with self._lock:
            if failure is None:
                settle(request.future, reply)
            else:
                self._fail(request, *failure)
            self._in_flight.discard(request)
            self._dispatch()
            self._lock.notify_all()

    def _run(self, request: _Request, part: InferRequest) -> Arrays:
        for pause in RETRY_PAUSES_S:
            try:
                return request.exchange.run(part, self.inference_timeout_s)
            except ConnectionLostError as error:
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                if refused or not request.repeatable or request.future.done():
                    raise
                logging.warning(f"{part.endpoint} at {self.peer}: {error}. Sending it again.")
            time.sleep(pause)
        return request.exchange.run(part, self.inference_timeout_s)

    def _explain(self, error: Exception) -> tuple[str, type[ServerRequestError]]:
        """What went wrong, and the remedy where the server has ended; and the kind of error."""
        is_alive, key = self._is_alive(), f"{self.setting}.inference_timeout_s"
        if isinstance(error, NoReplyInTimeError) and is_alive:
            why = f"got {error} ({key}), although the server is up. Raise {key} if the server"
            return f"{why} needs longer, else look into its log: it hangs.", LostPeerError
        why = f"failed: {type_and_message(error)}"
        if not is_alive:
            return f"{why}. The server is gone. {RESTART_REMEDY}", LostPeerError
        if isinstance(error, ConnectionLostError | NotServingError):
            return f"{why}. {RESTART_REMEDY}", LostPeerError
        return why, ServerRequestError

    def _watch(self) -> None:
        """Thread: probe the server while requests are in flight; fail them when it is silent."""
        missed = 0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._in_flight)
                self._lock.wait_for(lambda: self._closed or not self._in_flight, PROBE_INTERVAL_S)
                if self._closed:
                    return
                if not self._in_flight:
                    missed = 0
                    continue
            missed = 0 if self._is_alive() else missed + 1
            if missed < MAX_MISSED_PROBES:
                continue
            why = f"failed: the server no longer replies ({missed} probes in a row)."
            with self._lock:
                for request in self._in_flight:
                    self._fail(request, f"{why} {RESTART_REMEDY}", LostPeerError)
                    request.exchange.abort()
            missed = 0

    def _is_alive(self) -> bool:
        try:
            return self.peer.status("/v2/health/live", PROBE_TIMEOUT_S) == 200
        except UntrustedServerError:
            return False


class LeaseTakenError(UserError):
    """Another actor has the lease of this critic."""


class Lease:
    """The lease of one actor, renewed by a thread until `close`. `id`: what requests name; None
    for a server without leases. `LeaseTakenError`: another actor has kept and renewed it.
    """

    def __init__(self, peer: Peer):
        self._peer = peer
        self.id: str | None = uuid.uuid4().hex
        self._closed = threading.Event()
        self._take()
        self._thread = None if self.id is None else in_thread(f"lease of {peer}", self._keep)

    def close(self) -> None:
        if self._thread is not None and not self._closed.is_set():
            self._closed.set()
            self._thread.join(15.0)
            self._ask("DELETE")

    def _take(self) -> None:
        deadline = time.monotonic() + LEASE_S + 2 * RENEWAL_S
        is_said = False
        while (reply := self._ask("POST"))[0] in (None, 409) and time.monotonic() <= deadline:
            if not is_said:
                is_said = True
                logging.info(f"waiting for the lease of {self._peer}: {reply[1]}")
            time.sleep(1.0)
        status, error = reply
        if status == 409:
            raise LeaseTakenError(f"the critic at {self._peer} cannot be used: {error}")
        if status is None:
            logging.warning(f"{self._peer} has not replied to requests for its lease")
        elif status != 200:
            self.id = None  # a server of others

    def _ask(self, method: str) -> tuple[int | None, str]:
        """Return HTTP status, None without a reply, and the server's error."""
        try:
            response, body = self._peer.ask(method, LEASE_PATH, 10.0, {LEASE_HEADER: str(self.id)})
        except (OSError, http.client.HTTPException):
            return None, "no reply"
        return response.status, error_text(response.status, body)

    def _keep(self) -> None:
        while not self._closed.wait(RENEWAL_S):
            status, error = self._ask("POST")
            if status == 409:
                logging.error(f"this actor has lost the lease of {self._peer}: {error}")
