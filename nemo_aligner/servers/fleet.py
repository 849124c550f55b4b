# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One reward model behind one or several servers: requests are spread, a dead server is left out
until it returns.

Every request waits in one queue until a server has room for it; it goes to the available server
with the fewest requests in flight, and among equals to the one used longest ago. Each sending has
its own thread and connection (exchange.py). A monitor thread per server asks every few seconds
whether the model is ready there: one "ready" takes the server (back) in. Scoring changes nothing,
so a request may be sent again, and every request ends with exactly one reply or one error.

What happens when a server dies, by moment:

* Before the client connects: the client waits, but only START_GRACE_S once another one replies;
  then the job starts without it, with a warning, and takes it in when it comes.
* The connection cannot be made or breaks, or the reply is cut short: left out; the request goes
  back to the head of the queue. One that has been lost MAX_LOST times (twice per server in a large
  fleet) fails, for it may be what ends the servers.
* Silence during a request: after MAX_MISSED_PROBES unanswered probes what is in flight there is
  sent elsewhere. If Triton answers probes, but the model hangs, only `inference_timeout_s` ends
  the request. It gets a second chance on another server; a second time-out is an error. The one
  that hung is taken back when it has scored a sample of another request, or was down.
* During an orderly end (SIGTERM): what it still replies counts; "is shutting down" or "not ready"
  means: left out, and that request goes elsewhere.
* On its return: it gets requests in the form that it lists now (served_model.py). If it dies again
  before its first reply, it is left out for twice as long. One whose model cannot be used ends the
  job at the start, and is left out later.
* All are dead: requests wait, and fail after `init_timeout_s`.
* An error of the model, a wrong shape or NaN is raised at once: another server would reply alike.

Only one rank of each model-parallel group holds a fleet (scoring_clients.py).
"""

import concurrent.futures
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import LostPeerError, ServerRequestError
from nemo_aligner.servers.connection import RESTART_REMEDY
from nemo_aligner.servers.exchange import (
    MAX_MISSED_PROBES,
    ConnectionLostError,
    Exchange,
    NoReplyInTimeError,
    NotServingError,
    Peer,
    type_and_message,
)
from nemo_aligner.servers.http_communicator import unreachable
from nemo_aligner.servers.schema import Arrays, Endpoint
from nemo_aligner.servers.served_model import (
    DescriptionError,
    ModelProbe,
    ServedModel,
    ServerMismatchError,
    fit_requests,
    merge_replies,
)
from nemo_aligner.servers.threads import in_thread, settle
from nemo_aligner.servers.validation import validate_reply, validate_request

MAX_LOST = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
MAX_IN_FLIGHT = 16  # enough for the server's batcher; the rest waits here, for any server
PROBE_INTERVAL_S = 5.0  # of a server that is well
RETRY_INTERVAL_S = 1.0  # of one that is left out or has just missed a probe
PROBE_TIMEOUT_S = 5.0
START_GRACE_S = 30.0
PROGRESS_INTERVAL_S = 5.0


@dataclass(eq=False)
class _Request:
    data: Arrays
    future: "concurrent.futures.Future[Arrays]" = field(default_factory=concurrent.futures.Future)
    since: float = field(default_factory=time.monotonic)  # when it last joined the queue
    lost: int = 0  # servers that ended, or were about to end, while they had it
    timed_out: bool = False
    exchange: Exchange | None = None  # while it is in flight; its other replies are ignored

    @property
    def samples(self) -> int:
        return len(next(iter(self.data.values())))


class _Server:
    """The state of one server; guarded by the fleet's lock."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self.available = False
        self.seen = False  # it was available at some time
        self.state = "no reply"
        self.served: ServedModel | None = None  # as it described itself; None while left out
        self.mismatch: str | None = None  # why its model cannot be used
        self.missed = 0
        self.hung = False  # wait for a score, or until it was restarted
        self.trial: Exchange | None = None  # asks one that hung for a score
        self.pause = FIRST_PAUSE_S  # how long it is left out at least, the next time
        self.out_until = 0.0
        self.in_flight: set[_Request] = set()
        self.wake = threading.Event()  # probe now
        self.wake.set()

    def __str__(self) -> str:
        return str(self.peer)


class Fleet:
    """The servers of one reward model.

    Args:
        init_timeout_s: how long to wait while no server replies, at the start and later.
        first: number of the server that gets the first request, different in each client.
    """

    def __init__(
        self,
        spec: RewardModelSpec,
        endpoint: Endpoint,
        init_timeout_s: float,
        inference_timeout_s: float,
        first: int = 0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.spec, self.endpoint = spec, endpoint
        self.init_timeout_s, self.inference_timeout_s = init_timeout_s, inference_timeout_s
        self.section = spec.setting.partition(".")[0]
        kind = "teacher" if spec.setting.startswith("remote_teacher") else "reward model"
        self.title = f"{kind} '{spec.name}'" if spec.name else spec.endpoint
        self.servers = [_Server(Peer(*address, token, tls)) for address in spec.addresses]
        self._turns = deque(self.servers)  # the one used longest ago comes first
        self._turns.rotate(-first)
        self._waiting: deque[_Request] = deque()
        self._warned: set[str] = set()
        self._sample: Arrays | None = None  # one row of a request that has its reply
        self._lock = threading.Condition()
        self._closed = False
        self._born = time.monotonic()
        self._started = False  # it was ready once
        self._first_seen: float | None = None  # when the first server replied
        self._none_since = self._born  # when the last available server was left out
        self._next_line = self._born + min(2.0, PROGRESS_INTERVAL_S)  # progress, while waiting
        self._monitors = [
            in_thread(f"monitor of {server}", self._monitor, server) for server in self.servers
        ]

    def wait_until_ready(self, timeout_s: float) -> bool:
        """True once all servers have replied, or one did START_GRACE_S ago; else False.
        `ServerUnreachableError`: none within `init_timeout_s`. `ServerMismatchError`: no fit.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._started:
                now = time.monotonic()
                for server in self.servers:
                    if server.mismatch is not None:
                        raise ServerMismatchError(server.mismatch)
                missing = [server for server in self.servers if not server.seen]
                late = now - self._born >= self.init_timeout_s
                first = self._first_seen
                if not missing or (first is not None and (late or now - first >= START_GRACE_S)):
                    self._started = True
                    if missing:
                        logging.warning(
                            f"{self.title}: continuing with {len(self.servers) - len(missing)} of "
                            f"{len(self.servers)} servers, without {_list(missing)}. They are "
                            "taken in when they come."
                        )
                elif late:
                    states = {str(server): server.state for server in self.servers}
                    waited = now - self._born
                    raise unreachable(self.spec.endpoint, states, waited, self.spec.setting)
                else:
                    if now >= self._next_line:
                        self._next_line = now + PROGRESS_INTERVAL_S
                        self._log_waiting(missing, now - self._born)
                    if now >= deadline:
                        return False
                    self._lock.wait(min(deadline - now, 0.1))
        return True

    done = wait_until_ready  # for `wait_for_all`

    def result(self) -> None:
        """None: it has been ready."""

    def submit(self, data: Arrays) -> "concurrent.futures.Future[Arrays]":
        """Queue a request; returns its future at once. `RequestError`: it does not fit."""
        validate_request(self.endpoint, data)
        # Copied: the request is put in the form of a server when it is sent to that server.
        request = _Request({name: np.array(array) for name, array in data.items()})
        with self._lock:
            if self._closed:
                raise ServerRequestError(f"{self.title}: this client is closed")
            self._waiting.append(request)
            self._dispatch()
        return request.future

    def describe(self) -> str:
        """Return servers and requests as text, for progress lines."""
        with self._lock:
            where = ", ".join(str(each) for each in self.servers if each.available) or "no server"
            sent = sum(len(server.in_flight) for server in self.servers)
            return f"{self.title} at {where} ({sent} request(s) sent, {len(self._waiting)} queued)"

    def close(self) -> None:
        """End all threads; requests without a reply fail."""
        with self._lock:
            self._closed = True
            for server in self.servers:
                self._waiting.extend(self._take_back(server))
                if server.trial is not None:
                    server.trial.abort()
                server.wake.set()
            why = f"{self.title}: this client was closed before the reply came"
            while self._waiting:
                settle(self._waiting.popleft().future, ServerRequestError(why))
            self._lock.notify_all()
        deadline = time.monotonic() + PROBE_TIMEOUT_S + 1.0
        for thread in self._monitors:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- sending; callers hold the lock, except for `_send` ----

    def _dispatch(self) -> None:
        while self._waiting and not self._closed:
            free = [s for s in self._turns if s.available and len(s.in_flight) < MAX_IN_FLIGHT]
            if not free:
                return
            server = min(free, key=lambda s: len(s.in_flight))
            assert server.served is not None  # it is available
            request = self._waiting[0]
            exchange = request.exchange = _exchange(server.peer, server.served)
            in_thread(f"request to {server}", self._send, request, exchange, server, server.served)
            self._waiting.popleft()
            server.in_flight.add(request)
            self._turns.remove(server)
            self._turns.append(server)

    def _ask(self, exchange: Exchange, served: ServedModel, data: Arrays) -> Arrays | Exception:
        try:
            parts = fit_requests(served, self.endpoint, data)
            replies = [exchange.run(part, self.inference_timeout_s) for part in parts]
            reply = merge_replies(self.endpoint, replies)
            validate_reply(self.endpoint, reply, len(next(iter(data.values()))))
            return reply
        except Exception as error:
            return error

    def _send(
        self, request: _Request, exchange: Exchange, server: _Server, served: ServedModel
    ) -> None:
        outcome = self._ask(exchange, served, request.data)
        with self._lock:
            if request.exchange is exchange:  # else it was taken back
                server.in_flight.discard(request)
                self._settle(request, server, outcome)
                self._dispatch()

    def _settle(self, request: _Request, server: _Server, outcome: Arrays | Exception) -> None:
        if not isinstance(outcome, Exception):
            server.pause = FIRST_PAUSE_S
            if self._sample is None:
                self._sample = {name: array[:1] for name, array in request.data.items()}
            settle(request.future, outcome)
        elif isinstance(outcome, ConnectionLostError | NotServingError):
            self._leave_out(server, str(outcome))
            self._send_again(request, lost=getattr(outcome, "sent", True))
        elif isinstance(outcome, NoReplyInTimeError):
            self._settle_timed_out(request, server, outcome)
        else:
            why = f"request to {self._name(server)} failed: {type_and_message(outcome)}"
            settle(request.future, ServerRequestError(why))

    def _settle_timed_out(self, request: _Request, server: _Server, error: Exception) -> None:
        if len(self.servers) > 1:
            server.hung = True
            why = f"{error}, although it replies to probes; it hangs, or was stopped"
            self._leave_out(server, why)
            if not request.timed_out:
                request.timed_out = True
                self._send_again(request)
                return
        key = f"{self.section}.inference_timeout_s"
        what = f"a request of {request.samples} sample(s)"
        why = f"{self._name(server)} gave {error} ({key}) to {what}"
        remedy = f"Raise {key} if the model needs longer, else it hangs (see its log): restart it."
        settle(request.future, LostPeerError(f"{why}, although it replies to probes. {remedy}"))

    def _send_again(self, request: _Request, lost: bool = False) -> None:
        request.lost += lost
        if request.lost >= max(MAX_LOST, 2 * len(self.servers)):
            size = sum(array.nbytes for array in request.data.values())
            why = (
                f"{self.title}: {request.lost} times a server ended (or was about to) while it "
                f"had the same request of {request.samples} sample(s) ({size} bytes): "
                f"{_list(self.servers)}. It may be what ends them (memory?): see their logs, and "
                "send smaller micro-batches or shorter samples."
            )
            settle(request.future, ServerRequestError(why))
            return
        request.since = time.monotonic()
        self._waiting.appendleft(request)  # it is older than what waits there

    def _take_back(self, server: _Server) -> list[_Request]:
        """The requests in flight at `server`, given up there."""
        requests = list(server.in_flight)
        server.in_flight.clear()
        for request in requests:
            assert request.exchange is not None  # it is in flight
            request.exchange.abort()
            request.exchange = None
        return requests

    def _leave_out(self, server: _Server, why: str) -> None:
        server.state = why
        if not server.available:
            return
        server.available, server.served = False, None
        server.out_until = time.monotonic() + server.pause
        server.pause = min(2 * server.pause, LONGEST_PAUSE_S)
        left = sum(s.available for s in self.servers)
        others = f"{left} of {len(self.servers)} server(s) continue"
        logging.warning(f"{self._name(server)} is left out ({why}) until it replies; {others}.")
        if not left:
            self._none_since = time.monotonic()
        server.wake.set()

    # ---- monitors ----

    def _monitor(self, server: _Server) -> None:
        name_key = f"{self.spec.setting}.name"
        probe = ModelProbe(server.peer, self.spec.endpoint, self.section, name_key)
        while True:
            with self._lock:
                well = server.available and not server.missed
            server.wake.wait(PROBE_INTERVAL_S if well else RETRY_INTERVAL_S)
            server.wake.clear()
            if self._closed:
                return
            try:
                status = probe.status(PROBE_TIMEOUT_S)
            except Exception as error:  # e.g. a host name that cannot be encoded
                status, probe.state = None, repr(error)
            if probe.unusable is not None:
                with self._lock:
                    server.mismatch = probe.unusable
            elif status == 200 and not server.available:
                self._read_description(server, probe)
                if server.hung:
                    self._try(server)
            with self._lock:
                self._note_probe(server, status, probe.state)
                self._expire()
                self._dispatch()
                self._lock.notify_all()

    def _read_description(self, server: _Server, probe: ModelProbe) -> None:
        served = problem = mismatch = None
        warnings: list[str] = []
        try:
            served, warnings = probe.read(self.endpoint, PROBE_TIMEOUT_S)
        except DescriptionError as error:
            problem = str(error)
        except ServerMismatchError as error:
            problem = mismatch = str(error)
            warnings = [mismatch] if self._started else []  # else the job ends with it
        with self._lock:
            server.served, server.mismatch = served, mismatch
            server.state = problem or server.state
            for warning in [each for each in warnings if each not in self._warned]:
                logging.warning(warning)
            self._warned.update(warnings)

    def _try(self, server: _Server) -> None:
        """Ask a server that hung for the score of a sample, unless it is being asked."""
        with self._lock:
            sample, served = self._sample, server.served
            if server.trial is not None or sample is None or served is None:
                return
            trial = server.trial = _exchange(server.peer, served)

        def ask() -> None:
            reply = self._ask(trial, served, sample)
            with self._lock:
                server.trial = None
                if not isinstance(reply, Exception):
                    server.hung = False
                    server.wake.set()

        in_thread(f"trial of {server}", ask)

    def _note_probe(self, server: _Server, status: int | None, problem: str) -> None:
        if status == 200:
            server.missed = 0
            is_fit = server.served is not None and not server.hung
            if not server.available and is_fit and time.monotonic() >= server.out_until:
                logging.info(f"{'connected' if not server.seen else 'back'}: {self._name(server)}")
                server.available = server.seen = True
                if self._first_seen is None:
                    self._first_seen = time.monotonic()
            return
        if status is not None:
            server.missed, server.hung = 0, False  # what hung has ended
            # It may still reply to what it has: only new requests go elsewhere.
            self._leave_out(server, problem)
            return
        server.missed += 1
        if server.missed >= MAX_MISSED_PROBES:
            server.hung = False
            self._leave_out(server, f"{problem} to {server.missed} probes in a row")
            for request in self._take_back(server):
                self._send_again(request, lost=True)
        if not server.available:
            server.state = problem

    def _expire(self) -> None:
        if not self._waiting or any(server.available for server in self.servers):
            return
        now = time.monotonic()
        waited = {request: now - max(self._none_since, request.since) for request in self._waiting}
        for request, seconds in waited.items():
            if seconds >= self.init_timeout_s:
                self._waiting.remove(request)
                why = f"no server has replied for {seconds:.0f} s ({self.section}.init_timeout_s)"
                text = f"{self.title}: {why}: {_list(self.servers)}. {RESTART_REMEDY}"
                settle(request.future, LostPeerError(text))
        if self._waiting and now >= self._next_line:
            self._next_line = now + PROGRESS_INTERVAL_S
            self._log_waiting(self.servers, max(waited.values()))

    # ---- messages ----

    def _name(self, server: _Server) -> str:
        return f"{self.title} at {server}"

    def _log_waiting(self, servers: list[_Server], waited: float) -> None:
        how_long = f"{waited:.0f} of {self.init_timeout_s:.0f} s"
        logging.info(f"waiting for server {self.title} at {_list(servers)} ({how_long})")


def _exchange(peer: Peer, served: ServedModel) -> Exchange:
    return Exchange(peer, heartbeat=served.instance is not None)


def _list(servers: list[_Server]) -> str:
    return "; ".join(f"{server}: {server.state}" for server in servers)
