# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to one model behind one or several servers: they are spread, a dead server is left out
until it returns.

Every request waits in one queue until a server has room for it; it goes to the available server
with the fewest requests in flight, and among equals to the one used longest ago. Each sending has
its own thread and connection (exchange.py). A monitor thread per server asks every few seconds
whether the model is ready there. Scoring changes nothing, so a request may be sent again, and
every request ends with exactly one reply or one error. (For the critic see http_communicator.py.)

What happens when a server dies, by moment:

* Before the client connects: the client waits, but only START_GRACE_S once another one replies;
  then the job starts without it, with a warning, and takes it in when it comes.
* The connection cannot be made or breaks, or the reply is cut short: left out; the request goes
  back to the head of the queue. One that has been lost MAX_LOST times (twice per server in a large
  fleet) fails, for it may be what ends the servers.
* Silence during a request: after MAX_MISSED_PROBES unanswered probes what is in flight there is
  sent elsewhere. If Triton answers probes, but the model hangs, only `inference_timeout_s` ends
  the request. It gets a second chance on another server; a second time-out is an error.
* During an orderly end (SIGTERM): what it still replies counts; "is shutting down" or "not ready"
  means: left out, and that request goes elsewhere.
* One that was left out is back when it is ready and has scored a sample that some server has
  scored before. It gets requests in the form that it lists now (served_model.py). One whose model
  cannot be used ends the job at the start, and is left out later.
* All are dead: requests wait, and fail after `init_timeout_s`.
* An error of the model, a wrong shape or NaN is raised at once: another server would reply alike.

Only one rank of each model-parallel group holds a fleet (scoring_clients.py).
"""

import concurrent.futures
import functools
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo.utils import logging

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.servers.exchange import (
    MAX_MISSED_PROBES,
    ConnectionLostError,
    Exchange,
    InferRequest,
    NoReplyInTimeError,
    NotServingError,
    Peer,
    type_and_message,
)
from nemo_aligner.servers.schema import Arrays, Endpoint, validate_reply, validate_request
from nemo_aligner.servers.served_model import (
    DescriptionError,
    ModelProbe,
    ServedModel,
    ServerMismatchError,
    fit_requests,
    merge_replies,
)
from nemo_aligner.servers.threads import in_thread, settle

MAX_LOST = 5
MAX_IN_FLIGHT = 16  # enough for the server's batcher; the rest waits here, for any server
PROBE_INTERVAL_S = 5.0  # of a server that is well
RETRY_INTERVAL_S = 1.0  # of one that is left out or has just missed a probe
PROBE_TIMEOUT_S = 5.0
START_GRACE_S = 30.0
PROGRESS_INTERVAL_S = 5.0

RESTART_REMEDY = (
    "Look into the server job's log and restart both jobs with the same commands: they resume "
    "from their checkpoints."
)


class ServerUnreachableError(UserError):
    """No server replies at the configured address."""


@dataclass(eq=False)
class Request:
    data: Arrays
    check: Callable[[Arrays], None]  # of the reply
    future: "concurrent.futures.Future[Arrays]" = field(default_factory=concurrent.futures.Future)
    since: float = field(default_factory=time.monotonic)  # when it last joined the queue
    lost: int = 0  # servers that ended, or were about to end, while they had it
    timed_out: bool = False
    exchange: Exchange | None = None  # while it is in flight; its other replies are ignored

    @property
    def samples(self) -> int:
        return len(next(iter(self.data.values())))


@dataclass(eq=False)
class Server:
    """The state of one server; guarded by the fleet's lock."""

    peer: Peer
    available: bool = False
    seen: bool = False  # it was available at some time
    state: str = "no reply"
    # as it described itself; None while left out, and without a schema of requests
    served: ServedModel | None = None
    is_fit: bool = False  # it has described itself, and after it was left out given a score
    mismatch: str | None = None  # why its model cannot be used
    missed: int = 0
    trial: Exchange | None = None  # asks it for a score before it is taken back
    in_flight: set[Request] = field(default_factory=set)
    wake: threading.Event = field(default_factory=threading.Event)  # probe now

    def __str__(self) -> str:
        return str(self.peer)


class Fleet:
    """The servers of one model.

    Args:
        endpoint: the schema of requests, which get the form that the server lists; None: they are
            sent as they are.
        init_timeout_s: how long to wait while no server replies, at the start and later.
        inference_timeout_s: of one request, once it is sent.
        first: number of the server that gets the first request, different in each client.
    """

    PATIENCE = 1  # by which intervals and time limits of probes are multiplied

    def __init__(
        self,
        spec: RewardModelSpec,
        endpoint: Endpoint | None,
        init_timeout_s: float,
        inference_timeout_s: float,
        first: int = 0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.spec, self.endpoint = spec, endpoint
        self.init_timeout_s, self.inference_timeout_s = init_timeout_s, inference_timeout_s
        self.probe_timeout_s = self.PATIENCE * PROBE_TIMEOUT_S
        self.section = spec.setting.partition(".")[0]
        kind = "teacher" if self.section == "remote_teacher" else "reward model"
        self.title = f"{kind} '{spec.name}'" if spec.name else spec.endpoint
        self.servers = [Server(Peer(*address, token, tls)) for address in spec.addresses]
        self._turns = deque(self.servers)  # the one used longest ago comes first
        self._turns.rotate(-first)
        self._waiting: deque[Request] = deque()
        self._warned: set[str] = set()
        self._sample: Request | None = None  # for one row of a request that has its reply
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
                    raise self._unreachable(now - self._born)
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

    def submit(
        self, data: Arrays, check: Callable[[Arrays], None] | None = None
    ) -> "concurrent.futures.Future[Arrays]":
        """Queue a request, whose arrays must not change until the reply; returns its future at
        once. Arguments and errors as of `request`.
        """
        request = self.request(data, check)
        self.queue(request)
        return request.future

    def request(self, data: Arrays, check: Callable[[Arrays], None] | None = None) -> Request:
        """`RequestError`: it does not fit the schema. `check`: of the reply, in place of
        `validate_reply`; may raise `ReplyError`.
        """
        if self.endpoint is not None:
            validate_request(self.endpoint, data)
        if check is None:
            assert self.endpoint is not None  # of a model that scores
            samples = len(next(iter(data.values())))
            check = functools.partial(validate_reply, self.endpoint, samples=samples)
        return Request(dict(data), check)

    def queue(self, request: Request) -> None:
        with self._lock:
            if self._closed:
                error = ServerRequestError(f"{self.title}: this client is closed")
                settle(request.future, error)
                return
            self._waiting.append(request)
            self._dispatch()

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
        deadline = time.monotonic() + self.probe_timeout_s + 1.0
        for thread in self._monitors:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- sending; callers hold the lock, except for `_send` ----

    def _dispatch(self) -> None:
        while self._waiting and not self._closed:
            free = [s for s in self._turns if s.available and len(s.in_flight) < MAX_IN_FLIGHT]
            if not free:
                return
            server = min(free, key=lambda s: len(s.in_flight))
            request = self._waiting[0]
            exchange = request.exchange = self._exchange(server)
            in_thread(f"request to {server}", self._send, request, exchange, server, server.served)
            self._waiting.popleft()
            server.in_flight.add(request)
            self._turns.remove(server)
            self._turns.append(server)

    def _exchange(self, server: Server) -> Exchange:
        is_ours = server.served is not None and server.served.instance is not None
        return Exchange(server.peer, heartbeat=is_ours)

    def _ask(
        self, request: Request, exchange: Exchange, served: ServedModel | None, limit_s: float
    ) -> Arrays | Exception:
        try:
            if served is None or self.endpoint is None:
                parts = [InferRequest(self.spec.endpoint, request.data)]
            else:
                parts = fit_requests(served, self.endpoint, request.data)
            replies = [self._run(exchange, part, limit_s) for part in parts]
            reply = replies[0] if self.endpoint is None else merge_replies(self.endpoint, replies)
            request.check(reply)
            return reply
        except Exception as error:
            return self._explain(error)

    def _run(self, exchange: Exchange, part: InferRequest, limit_s: float) -> Arrays:
        return exchange.run(part, limit_s)

    def _explain(self, error: Exception) -> Exception:
        return error

    def _send(
        self, request: Request, exchange: Exchange, server: Server, served: ServedModel | None
    ) -> None:
        outcome = self._ask(request, exchange, served, self.inference_timeout_s)
        with self._lock:
            if request.exchange is exchange:  # else it was taken back
                server.in_flight.discard(request)
                self._settle(request, server, outcome)
                self._dispatch()

    def _settle(self, request: Request, server: Server, outcome: Arrays | Exception) -> None:
        if not isinstance(outcome, Exception):
            if self._sample is None:
                self._sample = self.request({n: a[:1].copy() for n, a in request.data.items()})
            settle(request.future, outcome)
        elif isinstance(outcome, ConnectionLostError | NotServingError):
            self._leave_out(server, str(outcome))
            self._send_again(request, lost=getattr(outcome, "sent", True))
        elif isinstance(outcome, NoReplyInTimeError):
            self._settle_timed_out(request, server, outcome)
        else:
            why = f"request to {self._name(server)} failed: {type_and_message(outcome)}"
            settle(request.future, ServerRequestError(why))

    def _settle_timed_out(self, request: Request, server: Server, error: Exception) -> None:
        if len(self.servers) > 1:
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

    def _send_again(self, request: Request, lost: bool = False) -> None:
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

    def _take_back(self, server: Server) -> list[Request]:
        """The requests in flight at `server`, given up there."""
        requests = list(server.in_flight)
        server.in_flight.clear()
        for request in requests:
            assert request.exchange is not None  # it is in flight
            request.exchange.abort()
            request.exchange = None
        return requests

    def _leave_out(self, server: Server, why: str) -> None:
        server.state = why
        if not server.available:
            return
        server.available, server.is_fit = False, False
        left = sum(s.available for s in self.servers)
        others = f"{left} of {len(self.servers)} server(s) continue"
        logging.warning(f"{self._name(server)} is left out ({why}) until it replies; {others}.")
        if not left:
            self._none_since = time.monotonic()
        server.wake.set()

    # ---- monitors ----

    def _monitor(self, server: Server) -> None:
        name_key = f"{self.spec.setting}.name"
        probe = ModelProbe(server.peer, self.spec.endpoint, self.section, name_key)
        while not self._closed:
            try:
                status = probe.status(self.probe_timeout_s)
            except Exception as error:  # e.g. a host name that cannot be encoded
                status, probe.state = None, repr(error)
            if probe.unusable is not None:
                with self._lock:
                    server.mismatch = probe.unusable
            elif status == 200 and not server.available:
                self._read_description(server, probe)
            with self._lock:
                self._note_probe(server, status, probe.state)
                self._expire()
                self._dispatch()
                self._lock.notify_all()
            server.wake.wait(self._pause_s(server))
            server.wake.clear()

    def _pause_s(self, server: Server) -> float:
        well = server.available and not server.missed
        return PROBE_INTERVAL_S if well else RETRY_INTERVAL_S

    def _read_description(self, server: Server, probe: ModelProbe) -> None:
        served = problem = mismatch = None
        warnings: list[str] = []
        try:
            served, warnings = probe.read(self.endpoint, self.probe_timeout_s)
        except DescriptionError as error:
            problem = str(error)
        except ServerMismatchError as error:
            problem = mismatch = str(error)
            warnings = [mismatch] if self._started else []  # else the job ends with it
        with self._lock:
            server.served, server.mismatch = served, mismatch
            for warning in [each for each in warnings if each not in self._warned]:
                logging.warning(warning)
            self._warned.update(warnings)
            sample = self._sample if server.seen and problem is None else None
            if sample is not None and not self._closed:
                server.trial = self._exchange(server)
        if sample is not None and server.trial is not None:
            limit_s = min(self.init_timeout_s, self.inference_timeout_s)
            outcome = self._ask(sample, server.trial, served, limit_s)
            problem = str(outcome) if isinstance(outcome, Exception) else None
        with self._lock:
            server.trial, server.is_fit = None, problem is None
            server.state = problem or server.state

    def _note_probe(self, server: Server, status: int | None, problem: str) -> None:
        if status is not None:
            server.missed = 0
        if status == 200:
            if not server.available and server.is_fit:
                logging.info(f"{'connected' if not server.seen else 'back'}: {self._name(server)}")
                server.available = server.seen = True
                if self._first_seen is None:
                    self._first_seen = time.monotonic()
            return
        if status is not None:
            # It may still reply to what it has: only new requests go elsewhere.
            self._leave_out(server, problem)
            return
        server.missed += 1
        if server.missed >= MAX_MISSED_PROBES:
            self._give_up(server, problem)
        if not server.available:
            server.state = problem

    def _give_up(self, server: Server, problem: str) -> None:
        self._leave_out(server, f"{problem} to {server.missed} probes in a row")
        for request in self._take_back(server):
            self._send_again(request, lost=True)

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

    def _unreachable(self, waited_s: float) -> ServerUnreachableError:
        name, setting = self.spec.endpoint, self.spec.setting
        return ServerUnreachableError(
            f"server '{name}' is not reachable at {', '.join(map(str, self.servers))} after "
            f"{waited_s:.0f} s ({_list(self.servers)}). Start the server job first and check "
            f"host, port and name in {setting} (name={name}); raise {self.section}.init_timeout_s "
            "if it only needs longer to load."
        )

    def _name(self, server: Server) -> str:
        return f"{self.title} at {server}"

    def _log_waiting(self, servers: list[Server], waited: float) -> None:
        how_long = f"{waited:.0f} of {self.init_timeout_s:.0f} s"
        logging.info(f"waiting for server {self.title} at {_list(servers)} ({how_long})")


def _list(servers: list[Server]) -> str:
    return "; ".join(f"{server}: {server.state}" for server in servers)
