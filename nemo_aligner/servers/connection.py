# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests of this process to servers. Those to a server that has a state, the critic, go to one
start of one server only; what replies alike is a fleet of them (fleet.py).

Each sending has its own thread and connection (exchange.py), and every request ends with exactly
one reply or one error.

A critic that was restarted has the weights of its last checkpoint, and how much of a train request
it had applied is unknown: the remedy is to resume both jobs.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.servers.exchange import (
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
from nemo_aligner.servers.schema import Arrays, Endpoint, validate_outcome, validate_reply
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
class Request:
    title: str  # of the model, for messages
    data: Arrays
    endpoint: Endpoint | None  # schema of `data` and the reply; None: they stay as they are
    used: np.ndarray | None = None  # which values of the reply are (`validate_reply`)
    # The model, and what is sent to it, one after another; None: they depend on the server.
    served: ServedModel | None = None
    parts: list[InferRequest] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    alone: bool = False  # nothing else is in flight beside it
    repeatable: bool = False  # the server does nothing twice if it gets a part twice
    future: "concurrent.futures.Future[Arrays]" = field(default_factory=concurrent.futures.Future)
    exchange: Exchange | None = None  # while it is in flight; its other replies are ignored
    # In fleets: when it last joined the queue, and servers that (almost) ended while they had it.
    since: float = field(default_factory=time.monotonic)
    lost: int = 0
    timed_out: bool = False
    is_trial: bool = False  # asks a server that hung for a score

    @property
    def samples(self) -> int:
        return len(next(iter(self.data.values())))


@dataclass(eq=False)
class Server:
    """The state of one server; guarded by the lock of its connection or fleet."""

    peer: Peer
    missed: int = 0  # probes in a row
    in_flight: set[Request] = field(default_factory=set)
    # ---- in fleets ----
    turn: int = 0  # the lower, the longer ago it was used
    available: bool = False
    seen: bool = False  # it was available at some time
    state: str = "no reply"
    served: ServedModel | None = None  # as it described itself; None while left out
    mismatch: str | None = None  # why its model cannot be used
    hung: bool = False  # wait for a score, or until it was restarted
    pause: float = 0.0  # how long it is left out at least, the next time
    out_until: float = 0.0
    wake: bool = True  # probe now

    def __str__(self) -> str:
        return str(self.peer)


class ServerConnection:
    """One server, and the requests of this process that it has not yet replied to.

    Requests go out side by side. One sent alone waits for the replies to all earlier ones, and
    later ones wait for its reply: the server sees a train request before all submitted after it.
    `inference_timeout_s`: of one request, once it is sent; `section`: its section, for messages.
    """

    grace_s = CLOSING_GRACE_S

    def __init__(self, servers: Sequence[Server], inference_timeout_s: float, section: str):
        self.servers, self.section = servers, section
        self.inference_timeout_s = inference_timeout_s
        self._lease: Lease | None = None
        self._waiting: deque[Request] = deque()
        self._lock = threading.Condition()
        self._closed = False
        self._monitors = [in_thread(f"monitor of {s}", self._monitor, s) for s in servers]

    def take_lease(self) -> None:
        """Become the client that may change the server; `LeaseTakenError` if another one is."""
        if self._lease is None:
            self._lease = Lease(self.servers[0].peer)

    def send(self, request: Request) -> "concurrent.futures.Future[Arrays]":
        """Queue a request; returns its future at once."""
        if self._lease is not None and self._lease.id is not None:
            request.headers[LEASE_HEADER] = self._lease.id
        with self._lock:
            if self._closed:
                raise ServerRequestError(f"{request.title}: this client is closed")
            self._waiting.append(request)
            self._dispatch()
            self._lock.notify_all()
        return request.future

    def close(self) -> None:
        """Refuse new requests; those in flight get `grace_s`, then they fail."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not any(s.in_flight for s in self.servers), self.grace_s)
            for request in self._waiting:
                self._fail(request, "was not sent: this client was closed")
            self._waiting.clear()
            for server in self.servers:
                self._give_up(server, "has no reply: this client was closed")
        deadline = time.monotonic() + 1.0
        for thread in self._monitors:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._lease is not None:
            self._lease.close()

    # ---- callers hold the lock ----

    def _place(self, request: Request) -> Server | None:
        """The server that gets the first request of the queue now."""
        others = self.servers[0].in_flight
        alone = request.alone or any(other.alone for other in others)
        return None if len(others) >= MAX_IN_FLIGHT or (others and alone) else self.servers[0]

    def _settle(self, request: Request, server: Server, outcome: Arrays | Exception) -> None:
        settle(request.future, outcome)

    def _dispatch(self) -> None:
        while self._waiting and not self._closed and (server := self._place(self._waiting[0])):
            self._launch(self._waiting.popleft(), server)

    def _launch(self, request: Request, server: Server) -> None:
        served = request.served or server.served
        assert served is not None
        heartbeat = served.instance is not None
        exchange = request.exchange = Exchange(server.peer, request.headers, heartbeat)
        try:
            in_thread(f"request to {server}", self._send, request, exchange, server, served)
        except RuntimeError as error:  # no thread to be had
            self._fail(request, f"was not sent: {error}")
        else:
            server.in_flight.add(request)

    def _give_up(
        self, server: Server, why: str, kind: type[ServerRequestError] = ServerRequestError
    ) -> None:
        """Fail what is in flight at `server`; it stays so until its thread has ended, so that no
        later request overtakes it.
        """
        for request in server.in_flight:
            self._fail(request, why, kind)  # first: what is aborted would be sent again
            assert request.exchange is not None  # it is in flight
            request.exchange.abort()

    def _fail(
        self, request: Request, why: str, kind: type[ServerRequestError] = ServerRequestError
    ) -> None:
        settle(request.future, kind(f"request to {request.title} {why}"))

    def _wait_to_probe(self, server: Server) -> None:
        """Return when it is time, or this is closed. A server without requests is not probed."""
        over = lambda: self._closed or not server.in_flight
        while self._lock.wait_for(over, PROBE_INTERVAL_S) and not self._closed:
            server.missed = 0
            self._lock.wait_for(lambda: self._closed or server.in_flight)

    def _note_probe(self, server: Server, status: int | None) -> None:
        server.missed = 0 if status == 200 else server.missed + 1
        if server.missed >= MAX_MISSED_PROBES:
            why = f"failed: the server no longer replies ({server.missed} probes in a row)"
            self._give_up(server, f"{why}. {RESTART_REMEDY}", LostPeerError)
            server.missed = 0

    # ---- threads ----

    def _send(
        self, request: Request, exchange: Exchange, server: Server, served: ServedModel
    ) -> None:
        outcome: Arrays | Exception
        try:
            parts = request.parts or fit_requests(served, request.endpoint, request.data)
            replies = [self._run(request, exchange, part) for part in parts]
            outcome = merge_replies(request.endpoint, replies)
            if request.endpoint is not None and request.endpoint.batching:
                validate_reply(request.endpoint, outcome, request.samples, request.used)
            elif request.endpoint is not None:
                validate_outcome(request.endpoint, outcome)
        except Exception as error:
            outcome = self._explain(request, error)
        with self._lock:
            if request.exchange is exchange:  # else it was taken back
                server.in_flight.discard(request)
                if not request.future.done():
                    self._settle(request, server, outcome)
                self._dispatch()
                self._lock.notify_all()

    def _run(self, request: Request, exchange: Exchange, part: InferRequest) -> Arrays:
        for pause in RETRY_PAUSES_S if request.repeatable else ():
            try:
                return exchange.run(part, self.inference_timeout_s)
            except ConnectionLostError as error:
                if isinstance(error.__cause__, ConnectionRefusedError) or request.future.done():
                    raise
                logging.warning(f"{request.title}: {error}. Sending it again.")
            time.sleep(pause)
        return exchange.run(part, self.inference_timeout_s)

    def _explain(self, request: Request, error: Exception) -> Exception:
        """What went wrong, and the remedy where the server has ended."""
        what, is_alive = f"request to {request.title}", self._probe(self.servers[0]) == 200
        if isinstance(error, NoReplyInTimeError) and is_alive:
            key = f"{self.section}.inference_timeout_s"
            return LostPeerError(
                f"{what} got {error} ({key}), although the server is up. Raise {key} if the "
                "server needs longer, else look into its log: it hangs."
            )
        why = f"{what} failed: {type_and_message(error)}"
        if not is_alive:
            return LostPeerError(f"{why}. The server is gone. {RESTART_REMEDY}")
        if isinstance(error, ConnectionLostError | NotServingError):
            return LostPeerError(f"{why}. {RESTART_REMEDY}")
        return ServerRequestError(why)

    def _monitor(self, server: Server) -> None:
        while not self._closed:
            with self._lock:
                self._wait_to_probe(server)
            status = None if self._closed else self._probe(server)
            with self._lock:
                if not self._closed:
                    self._note_probe(server, status)
                    self._dispatch()
                    self._lock.notify_all()

    def _probe(self, server: Server) -> int | None:
        """HTTP status of a probe; None: no reply."""
        try:
            return server.peer.status("/v2/health/live", PROBE_TIMEOUT_S)
        except UntrustedServerError:
            return None


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
