# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One reward model behind one or several servers: requests are spread, a dead server is left out
until it returns.

Every request waits in one queue until a server has room for it; it goes to the available server
with the fewest requests in flight, and among equals to the one used longest ago. Every few seconds
each is asked whether the model is ready there: one "ready" takes the server (back) in. Scoring
changes nothing, so a request may be sent again.

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
import itertools
import ssl
import time
from collections.abc import Sequence

import numpy as np
from nemo.utils import logging

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.servers.connection import RESTART_REMEDY, Request, Server, ServerConnection
from nemo_aligner.servers.exchange import (
    MAX_MISSED_PROBES,
    ConnectionLostError,
    NoReplyInTimeError,
    NotServingError,
    Peer,
    type_and_message,
)
from nemo_aligner.servers.schema import Arrays, Endpoint, validate_request
from nemo_aligner.servers.served_model import (
    DescriptionError,
    ModelProbe,
    ServerMismatchError,
)
from nemo_aligner.servers.threads import settle

MAX_LOST = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
MAX_IN_FLIGHT = 16  # enough for the server's batcher; the rest waits here, for any server
PROBE_INTERVAL_S = 5.0  # of a server that is well
RETRY_INTERVAL_S = 1.0  # of one that is left out or has just missed a probe
PROBE_TIMEOUT_S = 5.0
START_GRACE_S = 30.0
PROGRESS_INTERVAL_S = 5.0


class ServerUnreachableError(UserError):
    """No server replies at the configured address."""


class Fleet(ServerConnection):
    """The servers of one reward model.

    Args:
        endpoint: the schema of requests; None: there are none, and servers are only looked for.
        init_timeout_s: how long to wait while no server replies, at the start and later.
        first: number of the server that gets the first request, different in each client.
    """

    grace_s = 0.0

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
        self.spec, self.endpoint, self.init_timeout_s = spec, endpoint, init_timeout_s
        kind = "teacher" if spec.setting.startswith("remote_teacher") else "reward model"
        self.title = f"{kind} '{spec.name}'" if spec.name else spec.endpoint
        count = len(spec.addresses)
        self._turns = itertools.count(count)
        self._warned: set[str] = set()
        self._sample: Arrays | None = None  # one row of a request that has its reply
        self._born = time.monotonic()
        self._started = False  # it was ready once
        self._first_seen: float | None = None  # when the first server replied
        self._none_since = self._born  # when the last available server was left out
        self._next_line = self._born + min(2.0, PROGRESS_INTERVAL_S)  # progress, while waiting
        servers = [
            Server(Peer(*address, token, tls), turn=(number - first) % count, pause=FIRST_PAUSE_S)
            for number, address in enumerate(spec.addresses)
        ]
        name_key, section = f"{spec.setting}.name", spec.setting.partition(".")[0]
        self._probes = {s: ModelProbe(s.peer, spec.endpoint, section, name_key) for s in servers}
        super().__init__(servers, inference_timeout_s, section)

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
        assert self.endpoint is not None
        validate_request(self.endpoint, data)
        # Copied: the request is put in the form of a server when it is sent to that server.
        data = {name: np.array(array) for name, array in data.items()}
        return self.send(Request(self.title, data, self.endpoint))

    def describe(self) -> str:
        """Return servers and requests as text, for progress lines."""
        with self._lock:
            where = ", ".join(str(each) for each in self.servers if each.available) or "no server"
            sent = sum(len(server.in_flight) for server in self.servers)
            return f"{self.title} at {where} ({sent} request(s) sent, {len(self._waiting)} queued)"

    # ---- callers hold the lock ----

    def _place(self, request: Request) -> Server | None:
        load = {s: sum(not each.is_trial for each in s.in_flight) for s in self.servers}
        free = [s for s in self.servers if s.available and load[s] < MAX_IN_FLIGHT]
        if not free:
            return None
        server = min(free, key=lambda s: (load[s], s.turn))
        server.turn = next(self._turns)
        return server

    def _settle(self, request: Request, server: Server, outcome: Arrays | Exception) -> None:
        if request.is_trial:
            if not isinstance(outcome, Exception):
                server.hung, server.wake = False, True
        elif not isinstance(outcome, Exception):
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

    def _settle_timed_out(self, request: Request, server: Server, error: Exception) -> None:
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

    def _leave_out(self, server: Server, why: str) -> None:
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
        server.wake = True

    def _wait_to_probe(self, server: Server) -> None:
        well = server.available and not server.missed
        pause = PROBE_INTERVAL_S if well else RETRY_INTERVAL_S
        self._lock.wait_for(lambda: self._closed or server.wake, pause)
        server.wake = False

    def _try(self, server: Server) -> None:
        """Ask a server that hung for the score of a sample, unless it is being asked."""
        asked = any(each.is_trial for each in server.in_flight)
        if self._sample is not None and server.served is not None and not asked:
            trial = Request(self.title, self._sample, self.endpoint, is_trial=True)
            self._launch(trial, server)

    def _note_probe(self, server: Server, status: int | None) -> None:
        problem = self._probes[server].state
        if status == 200:
            server.missed = 0
            if server.hung:
                self._try(server)
            elif server.served and not server.available and time.monotonic() >= server.out_until:
                logging.info(f"{'connected' if not server.seen else 'back'}: {self._name(server)}")
                server.available = server.seen = True
                if self._first_seen is None:
                    self._first_seen = time.monotonic()
        elif status is not None:
            server.missed, server.hung = 0, False  # what hung has ended
            # It may still reply to what it has: only new requests go elsewhere.
            self._leave_out(server, problem)
        else:
            server.missed += 1
            if server.missed >= MAX_MISSED_PROBES:
                server.hung = False
                self._leave_out(server, f"{problem} to {server.missed} probes in a row")
                given_up, server.in_flight = server.in_flight, set()
                for request in given_up:
                    assert request.exchange is not None  # it is in flight
                    request.exchange.abort()
                    request.exchange = None
                    if not request.is_trial:
                        self._send_again(request, lost=True)
            if not server.available:
                server.state = problem
        self._expire()

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
        if self._waiting:
            self._log_waiting(self.servers, max(waited.values()))

    # ---- threads ----

    def _probe(self, server: Server) -> int | None:
        """As `ServerConnection._probe`; reads what a server that may be taken in serves."""
        probe, served, problem = self._probes[server], None, None
        warnings: list[str] = []
        try:
            status = probe.status(PROBE_TIMEOUT_S)
            if status == 200 and not server.available:
                served, warnings = probe.read(self.endpoint, PROBE_TIMEOUT_S)
        except DescriptionError as error:
            problem = str(error)
        except ServerMismatchError as error:
            problem = probe.unusable = str(error)
            warnings = [problem] if self._started else []  # else the job ends with it
        except Exception as error:  # e.g. a host name that cannot be encoded
            status, probe.state = None, repr(error)
        with self._lock:
            if not server.available:
                server.served, server.state = served, problem or server.state
            if probe.unusable is not None or served is not None:
                server.mismatch = probe.unusable
            for warning in [each for each in warnings if each not in self._warned]:
                logging.warning(warning)
            self._warned.update(warnings)
        return status

    def _explain(self, request: Request, error: Exception) -> Exception:
        return error

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

    def _log_waiting(self, servers: Sequence[Server], waited: float) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PROGRESS_INTERVAL_S
            how_long = f"{waited:.0f} of {self.init_timeout_s:.0f} s"
            logging.info(f"waiting for server {self.title} at {_list(servers)} ({how_long})")


def _list(servers: Sequence[Server]) -> str:
    return "; ".join(f"{server}: {server.state}" for server in servers)
