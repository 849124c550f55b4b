# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of named servers: they wait for the servers, check requests and send them."""

import functools
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.connection import ServerConnection
from nemo_aligner.servers.exchange import Peer
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.schema import Arrays, Endpoint
from nemo_aligner.servers.served_model import (
    DescriptionError,
    ModelProbe,
    ServedModel,
    ServerMismatchError,
)
from nemo_aligner.servers.validation import validate_request

PROGRESS_INTERVAL_S = 5.0  # between two lines while a server is waited for


class ServerUnreachableError(UserError):
    """No server replies at the configured address."""


def unreachable(
    name: str, states: Mapping[str, str], waited_s: float, setting: str
) -> ServerUnreachableError:
    """The error when `setting` names servers, here with their states, none of which replies."""
    where = "; ".join(f"{address}: {state}" for address, state in states.items())
    key = f"{setting.partition('.')[0]}.init_timeout_s"
    return ServerUnreachableError(
        f"server '{name}' is not reachable at {', '.join(states)} after {waited_s:.0f} s "
        f"({where}). Start the server job first and check host, port and name in {setting} "
        f"(name={name}); raise {key} if it only needs longer to load."
    )


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
        self.connections: dict[str, ServerConnection] = {}  # by name, shared at one address
        self.served: dict[
            str, ServedModel
        ] = {}  # those with a schema, as they describe themselves
        self._endpoints: dict[str, Endpoint | None] = {}

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
        peer = Peer(ip, int(port), self.token, self.tls)
        served = self._wait_until_ready(server_name, peer, endpoint)
        if served is not None:
            self.served[server_name] = served
        known = {connection.peer: connection for connection in self.connections.values()}
        self.connections[server_name] = known.get(peer) or ServerConnection(
            peer, self.inference_timeout_s, self.setting
        )
        self._endpoints[server_name] = endpoint

    def _wait_until_ready(
        self, server_name: str, peer: Peer, endpoint: Endpoint | None
    ) -> ServedModel | None:
        start = time.monotonic()
        next_line = start + min(2.0, PROGRESS_INTERVAL_S)
        pause = 0.1
        # Reward models have clients of their own, so this is about the critic.
        name_key = f"{self.setting}.critic.name"
        probe = ModelProbe(peer, server_name, self.setting, name_key)
        while (waited := time.monotonic() - start) < self.init_timeout_s:
            status = probe.status(min(5.0, self.init_timeout_s))
            if probe.unusable is not None:
                raise ServerMismatchError(probe.unusable)
            if status == 200:
                try:
                    served, warnings = probe.read(endpoint, min(5.0, self.init_timeout_s))
                except DescriptionError as error:
                    probe.state = str(error)
                else:
                    logging.info(f"connected to {server_name} at {peer}")
                    for warning in warnings:
                        logging.warning(warning)
                    return served
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + PROGRESS_INTERVAL_S
                logging.info(
                    f"waiting for server {server_name} at {peer}: {probe.state} "
                    f"({waited:.0f} of {self.init_timeout_s:.0f} s)"
                )
            time.sleep(max(0.0, min(pause, self.init_timeout_s - (time.monotonic() - start))))
            pause = min(pause * 1.5, 0.5)
        raise unreachable(server_name, {str(peer): probe.state}, self.init_timeout_s, self.setting)

    def print_server_dict(self) -> None:
        for name, connection in self.connections.items():
            logging.info(f"server {name}: {connection.peer}")

    def send_data_to_server(
        self,
        server_name: str,
        data: Mapping[str, np.ndarray],
        batching: bool = True,
        check: Callable[[Arrays], None] | None = None,
    ) -> PendingReply:
        """Send numpy arrays by wire name, unchanged until the reply; returns at once.

        `batching`: False keeps the request's place among all (see `ServerConnection`). `check`:
        called with the reply; may raise `ReplyError`. `RequestError`, and nothing is sent: it does
        not fit the schema, or the form that the server lists.
        """
        endpoint = self._endpoints[server_name]
        if endpoint is not None:
            validate_request(endpoint, data)
        connection = self.connections[server_name]
        forms = None if endpoint is None else (endpoint, self.served[server_name])
        future = connection.submit(server_name, data, alone=not batching, check=check, forms=forms)
        sent = SentRequest(future, lambda: f"{server_name} at {connection.peer}")
        return PendingReply({server_name: sent})

    def close(self) -> None:
        """End all connections; requests in flight get a few seconds."""
        for connection in set(self.connections.values()):
            connection.close()
        self.connections.clear()
