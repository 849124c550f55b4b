# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of named servers that have a state, such as the critic's endpoints.

A critic that was restarted has the weights of its last checkpoint, and how much of a train request
it had applied is unknown: so each request goes to one start of one server only, and the remedy is
to resume both jobs. (For reward models see fleet.py.)

* A request whose connection breaks or is silent, or whose reply is cut short, is sent again after
  each of RETRY_PAUSES_S: the server does nothing twice (an update has its `request_id`). A server
  that is not of this package cannot promise that: there the request fails at once.
* So it does if the connection is refused, or if Triton says that it lost the process behind it.
* After MAX_MISSED_PROBES unanswered probes all requests in flight fail. Of a server that answers
  probes but not the request, only `inference_timeout_s` ends it.
"""

import concurrent.futures
import functools
import http.client
import math
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.servers import fleet
from nemo_aligner.servers.exchange import (
    INSTANCE_HEADER,
    LEASE_HEADER,
    LEASE_PATH,
    LEASE_S,
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
from nemo_aligner.servers.fleet import RESTART_REMEDY, Fleet
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.schema import Arrays, Endpoint
from nemo_aligner.servers.threads import in_thread, settle

RENEWAL_S = 5.0
RETRY_PAUSES_S = (0.2, 1.0, 3.0, 10.0)


class ServerConnection(Fleet):
    """One endpoint of a server with a state. Arguments as of `Fleet`; `lease`: gives the one that
    requests name.
    """

    PATIENCE = 2  # a wrong verdict ends the job

    def __init__(self, *args: object, lease: "Callable[[], Lease | None]", **options: object):
        self._lease = lease
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _exchange(self, server: fleet.Server) -> Exchange:
        instance = None if server.served is None else server.served.instance
        lease = self._lease()
        headers = {} if instance is None else {INSTANCE_HEADER: instance}
        if lease is not None and lease.id is not None:
            headers[LEASE_HEADER] = lease.id
        return Exchange(server.peer, headers, heartbeat=instance is not None)

    def _run(self, exchange: Exchange, part: InferRequest, limit_s: float) -> Arrays:
        served = self.servers[0].served
        is_ours = served is not None and served.instance is not None
        is_once = served is not None and served.lists("request_id")
        may_repeat = is_ours and (not is_once or "request_id" in part.names)
        for pause in RETRY_PAUSES_S if may_repeat else ():
            try:
                return exchange.run(part, limit_s)
            except ConnectionLostError as error:
                if isinstance(error.__cause__, ConnectionRefusedError) or exchange.aborted:
                    raise
                logging.warning(f"{part.endpoint}: {error}. Sending it again.")
            time.sleep(pause)
        return exchange.run(part, limit_s)

    def _explain(self, error: Exception) -> Exception:
        """What went wrong, and the remedy where the server has ended."""
        server, key = self.servers[0], f"{self.section}.inference_timeout_s"
        try:
            is_alive = server.peer.status("/v2/health/live", self.probe_timeout_s) == 200
        except UntrustedServerError:
            is_alive = False
        request = f"request to {self.title} at {server}"
        if isinstance(error, NoReplyInTimeError) and is_alive:
            why = f"got {error} ({key}), although the server is up. Raise {key} if the server"
            return LostPeerError(
                f"{request} {why} needs longer, else look into its log: it hangs."
            )
        why = f"{request} failed: {type_and_message(error)}"
        if not is_alive:
            return LostPeerError(f"{why}. The server is gone. {RESTART_REMEDY}")
        if isinstance(error, ConnectionLostError | NotServingError):
            return LostPeerError(f"{why}. {RESTART_REMEDY}")
        return ServerRequestError(why)

    # ---- callers hold the lock ----

    def _settle(
        self, request: fleet.Request, server: fleet.Server, outcome: Arrays | Exception
    ) -> None:
        settle(request.future, outcome)

    def _pause_s(self, server: fleet.Server) -> float:
        interval_s = self.PATIENCE * fleet.PROBE_INTERVAL_S
        return interval_s if server.available else fleet.RETRY_INTERVAL_S

    def _note_probe(self, server: fleet.Server, status: int | None, problem: str) -> None:
        if not server.in_flight:
            server.missed = 0
        super()._note_probe(server, status, problem)

    def _leave_out(self, server: fleet.Server, why: str) -> None:
        """Do nothing: a request says what is wrong."""
        server.state = why

    def _give_up(self, server: fleet.Server, problem: str) -> None:
        why = f"failed: the server no longer replies ({server.missed} probes in a row)."
        for request in self._take_back(server):
            text = f"request to {self.title} at {server} {why} {RESTART_REMEDY}"
            settle(request.future, LostPeerError(text))
        server.missed = 0


class _of_class_or_instance:
    """Decorator of a method that can be called on the class too: then it gets a new object."""

    def __init__(self, method: Callable[..., "HTTPCommunicator"]) -> None:
        self.method = method

    def __get__(
        self, instance: "HTTPCommunicator | None", owner: "type[HTTPCommunicator]"
    ) -> Callable[..., "HTTPCommunicator"]:
        return functools.partial(self.method, owner() if instance is None else instance)


@dataclass(eq=False)
class HTTPCommunicator:
    """Clients of named servers (Triton endpoints)."""

    init_timeout_s: float = 600
    inference_timeout_s: float = 3600  # of one request; the longest is a whole critic update
    setting: str = "remote_critic_rm"  # section of the configuration, for messages
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.connections: dict[str, ServerConnection] = {}  # by name
        self.lease: Lease | None = None
        self._last: concurrent.futures.Future[Arrays] | None = None  # that keeps its place

    def __enter__(self) -> "HTTPCommunicator":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @_of_class_or_instance
    def create_http_communicator_from_dict(
        self: "HTTPCommunicator",
        servers: Mapping[str, tuple[str, int]],
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> "HTTPCommunicator":
        """Connect to `servers`, {name: (ip, port)}; called on the class, it makes a new object."""
        for name, (ip, port) in servers.items():
            self.add_server_by_name(name, ip=ip, port=port, endpoint=(endpoints or {}).get(name))
        return self

    def add_server_by_name(
        self,
        server_name: str,
        ip: str = "localhost",
        port: int = 5555,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Wait until `server_name` is served at `ip:port`, then connect. `endpoint`: the schema of
        requests, which get the form that the server lists; None sends them as they are.
        `ServerUnreachableError`: not within `init_timeout_s`. `ServerMismatchError`: it has no
        such name, cannot be used with the schema, or asks for another token.
        """
        # Reward models have clients of their own, so this is about the critic.
        setting = f"{self.setting}.critic"
        spec = RewardModelSpec(None, server_name, ((ip, int(port)),), 1.0, setting)
        limits = self.init_timeout_s, self.inference_timeout_s
        connection = ServerConnection(
            *(spec, endpoint, *limits), token=self.token, tls=self.tls, lease=lambda: self.lease
        )
        try:
            connection.wait_until_ready(math.inf)
        except BaseException:
            connection.close()
            raise
        self.connections[server_name] = connection

    def take_lease(self, server_name: str) -> None:
        """Become the client that may change a server; `LeaseTakenError` if another one is."""
        if self.lease is None:
            self.lease = Lease(self.connections[server_name].servers[0].peer)

    def print_server_dict(self) -> None:
        for name, connection in self.connections.items():
            logging.info(f"server {name}: {connection.servers[0]}")

    def lists(self, server_name: str, tensor: str) -> bool:
        """Whether a server, asked with a schema, takes an input of this name."""
        served = self.connections[server_name].servers[0].served
        return served is not None and served.lists(tensor)

    def send_data_to_server(
        self,
        server_name: str,
        data: Mapping[str, np.ndarray],
        batching: bool = True,
        check: Callable[[Arrays], None] | None = None,
    ) -> PendingReply:
        """Send numpy arrays by wire name, unchanged until the reply; returns at once.

        `batching`: False keeps the request's place: it is sent when those of this kind that were
        submitted before have ended. `check`: called with the reply; may raise `ReplyError`.
        `RequestError`, and nothing is sent: it does not fit the schema.
        """
        connection = self.connections[server_name]
        request = connection.request(dict(data), check or (lambda reply: None))
        last = None if batching else self._last
        if last is None:
            connection.queue(request)
        else:
            last.add_done_callback(lambda _: connection.queue(request))
        if not batching:
            self._last = request.future
        sent = SentRequest(request.future, lambda: f"{server_name} at {connection.servers[0]}")
        return PendingReply({server_name: sent})

    def close(self) -> None:
        """End all connections; requests without a reply fail."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        if self.lease is not None:
            self.lease.close()


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
