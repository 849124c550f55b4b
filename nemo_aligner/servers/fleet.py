# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One reward model behind one or several servers: requests are spread, a dead server is left out
until it returns.

Every request waits in one queue until a server has room for it; it goes to the available server
with the fewest requests in flight, and among equals to the one that was used longest ago. Each
sending has a thread and a connection of its own (exchange.py). A monitor thread per server asks
every few seconds whether the model is ready there: one "ready" takes the server (back) in. Scoring
changes nothing on a server, so a request may be sent again at any time,
and the answer of a sending that was given up is thrown away: every request ends with exactly one
answer or one error.

What happens when a server dies, moment by moment:

* Before the client connects: it is waited for. Once another one answers, START_GRACE_S more; then
  the job goes on with those that are there and a warning names the missing ones, which are taken
  in when they come. If none answers within
  `init_timeout_s`: `ServerUnreachableError`.
* Between two requests: the next request finds the connection refused, or the monitor notices
  first. Left out.
* While the connection is made (refused, no route, no answer in CONNECT_TIMEOUT_S): left out; the
  request goes back to the head of the queue and to another server.
* In the middle of a request, connection reset or closed (the process or its machine was killed):
  the same. A request that has been lost MAX_LOST times (twice per server in a large fleet) is
  given up with an error, for it may be what ends the servers.
* In the middle of a request, silence: (a) The machine is gone, or Triton holds the connection
  although the process
  behind it is dead, which it does for ten seconds and more: after MAX_MISSED_PROBES unanswered
  probes the requests in flight there are taken back and sent elsewhere. (b) Triton answers probes,
  but the model behind it hangs: only `inference_timeout_s` ends that. The request gets a second
  chance on another server, and the one that hung is taken back only after it was down, that is,
  after somebody restarted it. A second time-out is an error.
* While it ends in an orderly way (SIGTERM): what it still answers counts; "is shutting down" or
  "not ready" means: left out, and that request goes elsewhere.
* After it has answered: the answer is complete (its length is checked) and stands. Cut short, it
  counts as reset.
* While it returns: it gets requests when Triton says the model is ready, not when the port opens.
  If it dies again before it has answered anything, it is left out for twice as long as the last
  time.
* All are dead: requests wait, a line every few seconds says for whom, and after `init_timeout_s`
  without any server they fail with one error that names all of them.
* An answer with an error of the model (it raised; the request does not fit), a wrong shape or NaN
  is raised at once
  and never sent again: another server of the same model would say the same.

Only one rank of each model-parallel group holds a fleet; reward_critic_clients.py brings answers
and errors to others.
"""

import concurrent.futures
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from nemo.utils import logging

from nemo_aligner.config.reward_models import RewardModelSpec
from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers.exchange import (
    ConnectionLostError,
    Exchange,
    InferRequest,
    NoAnswerInTimeError,
    NotServingError,
)
from nemo_aligner.servers.http_communicator import (
    RESTART_REMEDY,
    PendingAnswer,
    ServerUnreachableError,
    http_status,
)
from nemo_aligner.servers.schema import Endpoint, validate_request, validate_response

MAX_MISSED_PROBES = PendingAnswer.MAX_MISSED_PROBES
MAX_LOST = 5
# A server that fails again and again is taken back after longer and longer pauses.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
# Enough to let the server's batcher merge requests; the rest waits here, where any server can take
# it.
MAX_IN_FLIGHT = 16
PROBE_INTERVAL_S = 5.0  # of a server that is well
RETRY_INTERVAL_S = 1.0  # of one that is left out or has just missed a probe
PROBE_TIMEOUT_S = 5.0
START_GRACE_S = 30.0
PROGRESS_INTERVAL_S = 5.0


@dataclass(eq=False)
class _Request:
    """A request until it has its answer."""

    wire: InferRequest
    future: concurrent.futures.Future = field(default_factory=concurrent.futures.Future)
    since: float = field(
        default_factory=time.monotonic
    )  # when it joined the queue, for the last time
    lost: int = 0  # servers that ended while they had it, or refused it because they were about to
    timed_out: bool = False


@dataclass(eq=False)
class _Sending:
    """A request in flight. `given_up`: nobody waits for this sending any more."""

    request: _Request
    server: "_Server"
    exchange: Exchange
    given_up: bool = False


class _Server:
    """What is known of one server; guarded by the fleet's lock."""

    def __init__(self, host: str, port: int, turn: int):
        self.host, self.port = host, port
        self.turn = turn  # when it was last used, in sendings
        self.available = False
        self.seen = False  # it was available at some time
        self.state = "no answer"
        self.missed = 0
        self.hung = False  # wait until it was restarted
        self.pause = FIRST_PAUSE_S  # how long it is left out at least, the next time
        self.out_until = 0.0
        self.in_flight: set[_Sending] = set()
        self.wake = threading.Event()  # probe now
        self.wake.set()

    def __str__(self):
        return f"{self.host}:{self.port}"


class Fleet:
    """The servers of one reward model.

    Args:
        spec: endpoint and addresses.
        endpoint: the schema of the endpoint.
        init_timeout_s: how long to wait while no server answers, at the start and later.
        inference_timeout_s: how long one request may take on a server.
        first: number of the server that gets the first request; clients that start together begin
            at different ones.
    """

    def __init__(
        self,
        spec: RewardModelSpec,
        endpoint: Endpoint,
        init_timeout_s: float,
        inference_timeout_s: float,
        first: int = 0,
    ):
        self.spec, self.endpoint = spec, endpoint
        self.init_timeout_s, self.inference_timeout_s = init_timeout_s, inference_timeout_s
        self.title = f"reward model '{spec.name}'" if spec.name else spec.endpoint
        count = len(spec.addresses)
        self.servers = [
            _Server(host, port, turn=(index - first) % count)
            for index, (host, port) in enumerate(spec.addresses)
        ]
        self._turn = count
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Condition()
        self._closed = False
        self._born = time.monotonic()
        self._started = False  # it was ready once
        self._first_seen = None  # when the first server answered
        self._none_since = self._born  # when the last available server was left out
        self._next_line = self._born + min(
            2.0, PROGRESS_INTERVAL_S
        )  # of progress, while waiting for servers
        self._monitors = [
            threading.Thread(
                target=self._monitor, args=(server,), daemon=True, name=f"monitor of {server}"
            )
            for server in self.servers
        ]
        for thread in self._monitors:
            thread.start()

    # ---- the caller's side ----

    def wait_until_ready(self, timeout_s: float) -> bool:
        """True once all servers have answered, or one and START_GRACE_S have gone by; False after
        `timeout_s`.

        Raises:
            ServerUnreachableError: none has answered within `init_timeout_s` after the fleet was
                made.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._started:
                now = time.monotonic()
                missing = [server for server in self.servers if not server.seen]
                late = now - self._born >= self.init_timeout_s
                some = self._first_seen is not None
                if not missing or (some and (late or now - self._first_seen >= START_GRACE_S)):
                    self._started = True
                    if missing:
                        logging.warning(
                            f"{self.title}: going on with {len(self.servers) - len(missing)} of "
                            f"{len(self.servers)} "
                            f"servers, without {_list(missing)}. They are taken in when they come."
                        )
                elif late:
                    raise ServerUnreachableError(self._unreachable(now - self._born))
                else:
                    if now >= self._next_line:
                        self._next_line = now + PROGRESS_INTERVAL_S
                        self._say_waiting(missing, now - self._born)
                    if now >= deadline:
                        return False
                    self._lock.wait(min(deadline - now, 0.1))
        return True

    def submit(self, data: dict) -> concurrent.futures.Future:
        """Queue a request of numpy arrays by wire name; returns at once. The future holds the
        answer's arrays.

        Raises:
            RequestError: the request does not fit the endpoint's schema.
        """
        validate_request(self.endpoint, data)
        request = _Request(InferRequest(self.spec.endpoint, data))
        with self._lock:
            if self._closed:
                raise ServerRequestError(f"{self.title}: this client is closed")
            self._waiting.append(request)
            self._dispatch()
        return request.future

    def describe(self) -> str:
        """Servers and requests, for progress lines."""
        with self._lock:
            available = [str(server) for server in self.servers if server.available]
            flying = sum(len(server.in_flight) for server in self.servers)
            where = ", ".join(available) if available else "no server"
            return (
                f"{self.title} at {where} ({flying} request(s) sent, {len(self._waiting)} queued)"
            )

    def close(self) -> None:
        """End all threads; requests without an answer fail."""
        with self._lock:
            self._closed = True
            error = ServerRequestError(
                f"{self.title}: this client was closed before the answer came"
            )
            for server in self.servers:
                for sending in self._take_back(server):
                    sending.request.future.set_exception(error)
                server.wake.set()
            while self._waiting:
                self._waiting.popleft().future.set_exception(error)
            self._lock.notify_all()
        deadline = time.monotonic() + PROBE_TIMEOUT_S + 1.0
        for thread in self._monitors:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- sending; callers hold the lock, except for `_send` ----

    def _dispatch(self) -> None:
        """Send queued requests while a server has room."""
        while self._waiting and not self._closed:
            free = [s for s in self.servers if s.available and len(s.in_flight) < MAX_IN_FLIGHT]
            if not free:
                return
            server = min(free, key=lambda s: (len(s.in_flight), s.turn))
            sending = _Sending(self._waiting[0], server, Exchange(server.host, server.port))
            threading.Thread(
                target=self._send, args=(sending,), daemon=True, name=f"request to {server}"
            ).start()
            self._waiting.popleft()
            server.in_flight.add(sending)
            server.turn = self._turn
            self._turn += 1

    def _send(self, sending: _Sending) -> None:
        """Thread of one sending."""
        answer = error = None
        try:
            answer = sending.exchange.run(sending.request.wire, self.inference_timeout_s)
            validate_response(self.endpoint, answer, sending.request.wire.rows)
        except Exception as exception:
            error = exception
        with self._lock:
            sending.server.in_flight.discard(sending)
            if not sending.given_up:
                self._settle(sending, answer, error)
                self._dispatch()

    def _settle(self, sending: _Sending, answer: dict | None, error: Exception | None) -> None:
        """Finish the request of a sending that has ended, or queue it again."""
        request, server = sending.request, sending.server
        if error is None:
            server.pause = FIRST_PAUSE_S
            request.future.set_result(answer)
        elif isinstance(error, ConnectionLostError):
            self._leave_out(server, str(error))
            self._send_again(request, lost=error.sent)
        elif isinstance(error, NotServingError):
            self._leave_out(server, str(error))
            self._send_again(request, lost=True)
        elif isinstance(error, NoAnswerInTimeError):
            self._settle_timed_out(request, server, error)
        else:
            error_type = (
                ""
                if isinstance(error, (ServerRequestError, UserError))
                else f"{type(error).__name__}: "
            )
            failure = ServerRequestError(
                f"request to {self._name(server)} failed: {error_type}{error}"
            )
            failure.__cause__ = error
            request.future.set_exception(failure)

    def _settle_timed_out(self, request: _Request, server: _Server, error: Exception) -> None:
        if len(self.servers) > 1:
            server.hung = True
            self._leave_out(server, f"{error}, although it answers probes; it must be restarted")
        if len(self.servers) > 1 and not request.timed_out:
            request.timed_out = True
            self._send_again(request)
            return
        section = self.spec.setting.partition(".")[0]
        request.future.set_exception(
            ServerRequestError(
                f"{self._name(server)} gave {error} ({section}.inference_timeout_s) to a request "
                "of "
                f"{request.wire.rows} row(s), although it answers probes. Raise "
                f"{section}.inference_timeout_s if the "
                "model needs longer, else look into the server's log: it hangs, restart it."
            )
        )

    def _send_again(self, request: _Request, lost: bool = False) -> None:
        request.lost += lost
        if request.lost >= max(MAX_LOST, 2 * len(self.servers)):
            request.future.set_exception(
                ServerRequestError(
                    f"{self.title}: {request.lost} times a server ended while it had the same "
                    "request of "
                    f"{request.wire.rows} row(s) ({len(request.wire.body)} bytes) or was about to "
                    "end: "
                    f"{_list(self.servers)}. "
                    "The request itself may be what ends them (memory?): look into the servers' "
                    "logs, and send "
                    "smaller micro-batches or shorter rows."
                )
            )
            return
        request.since = time.monotonic()
        self._waiting.appendleft(request)  # it is older than what waits there

    def _take_back(self, server: _Server) -> list:
        """The sendings in flight at `server`, given up."""
        sendings = list(server.in_flight)
        server.in_flight.clear()
        for sending in sendings:
            sending.given_up = True
            sending.exchange.abort()
        return sendings

    def _leave_out(self, server: _Server, why: str) -> None:
        server.state = why
        if not server.available:
            return
        server.available = False
        server.out_until = time.monotonic() + server.pause
        server.pause = min(2 * server.pause, LONGEST_PAUSE_S)
        left = sum(s.available for s in self.servers)
        logging.warning(
            f"{self._name(server)} is left out ({why}); {left} of {len(self.servers)} server(s) "
            "go on. "
            "It is taken back when it answers again."
        )
        if not left:
            self._none_since = time.monotonic()
        server.wake.set()

    # ---- monitors ----

    def _monitor(self, server: _Server) -> None:
        """Thread of one server: probe it until the fleet is closed."""
        while True:
            with self._lock:
                well = server.available and not server.missed
            server.wake.wait(PROBE_INTERVAL_S if well else RETRY_INTERVAL_S)
            server.wake.clear()
            if self._closed:
                return
            problem = "no answer"
            try:
                status = http_status(
                    server.host,
                    server.port,
                    f"/v2/models/{self.spec.endpoint}/ready",
                    PROBE_TIMEOUT_S,
                )
            except Exception as error:  # a host name that cannot even be looked up
                status, problem = None, repr(error)
            with self._lock:
                self._note_probe(server, status, problem)
                self._expire()
                self._dispatch()
                self._lock.notify_all()

    def _note_probe(self, server: _Server, status: int | None, problem: str) -> None:
        """Change the state of `server` after a probe: HTTP status, None without an answer."""
        if status == 200:
            server.missed = 0
            if not server.available and not server.hung and time.monotonic() >= server.out_until:
                logging.info(f"{'connected' if not server.seen else 'back'}: {self._name(server)}")
                server.available = server.seen = True
                if self._first_seen is None:
                    self._first_seen = time.monotonic()
            return
        server.hung = False  # whatever hung has ended
        if status is not None:
            server.missed = 0
            # It may still answer what it has: only new requests go elsewhere.
            self._leave_out(server, f"a server answers, but '{self.spec.endpoint}' is not ready")
            return
        server.missed += 1
        if server.missed >= MAX_MISSED_PROBES:
            self._leave_out(server, f"{problem} to {server.missed} probes in a row")
            for sending in self._take_back(server):
                self._send_again(sending.request, lost=True)
        if not server.available:
            server.state = problem

    def _expire(self) -> None:
        """Fail the requests that have waited too long for any server; say so while others wait."""
        if not self._waiting or any(server.available for server in self.servers):
            return
        now = time.monotonic()
        waited = {request: now - max(self._none_since, request.since) for request in self._waiting}
        for request, seconds in waited.items():
            if seconds >= self.init_timeout_s:
                self._waiting.remove(request)
                section = self.spec.setting.partition(".")[0]
                request.future.set_exception(
                    ServerRequestError(
                        f"{self.title}: no server has answered for {seconds:.0f} s "
                        f"({section}.init_timeout_s): "
                        f"{_list(self.servers)}. {RESTART_REMEDY}"
                    )
                )
        if self._waiting and now >= self._next_line:
            self._next_line = now + PROGRESS_INTERVAL_S
            self._say_waiting(self.servers, max(waited.values()))

    # ---- words ----

    def _name(self, server: _Server) -> str:
        return f"{self.title} at {server}"

    def _say_waiting(self, servers: list, waited: float) -> None:
        logging.info(
            f"waiting for server {self.title} at {_list(servers)} ({waited:.0f} of "
            f"{self.init_timeout_s:.0f} s)"
        )

    def _unreachable(self, waited: float) -> str:
        section = self.spec.setting.partition(".")[0]
        addresses = "; ".join(f"ip={s.host}, port={s.port}" for s in self.servers)
        return (
            f"server '{self.spec.endpoint}' is not reachable at "
            f"{', '.join(map(str, self.servers))} after "
            f"{waited:.0f} s ({_list(self.servers)}). Start the server job first and check that "
            "host, port and "
            f"endpoint name are those in {self.spec.setting} ({addresses}; "
            f"name={self.spec.endpoint}); raise "
            f"{section}.init_timeout_s if it only needs longer to load."
        )


class PendingRewards:
    """The rewards that all reward models give for the same rows, on the rank that sent them.

    Args:
        fleets: by name of the reward model.
        data: arrays by wire name; every fleet gets the same.
    """

    def __init__(self, fleets: dict, data: dict):
        self._fleets = fleets
        self._futures = {name: fleet.submit(data) for name, fleet in fleets.items()}
        self._started = time.monotonic()

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all rewards or the first error. A wait that ends without is
        logged.
        """
        done, pending = concurrent.futures.wait(
            self._futures.values(), timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        if not pending or any(future.exception() for future in done):
            return True
        waited = time.monotonic() - self._started
        for name, future in self._futures.items():
            if future in pending:
                logging.info(f"waiting for {self._fleets[name].describe()} ({waited:.0f} s)")
        return False

    def result(self) -> dict:
        """Rewards float32 [N, 1] by name of the reward model, once `done`.

        Raises:
            ServerRequestError: with the remote traceback.
        """
        for future in self._futures.values():
            if future.done() and future.exception() is not None:
                raise future.exception()
        return {name: future.result()["rewards"] for name, future in self._futures.items()}


def _list(servers: list) -> str:
    return "; ".join(f"{server}: {server.state}" for server in servers)
