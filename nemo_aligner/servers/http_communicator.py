# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of named servers: they wait for the servers, check requests and send them."""

import functools
import math
import ssl
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from nemo.utils import logging

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.servers.connection import Request, Server, ServerConnection
from nemo_aligner.servers.exchange import INSTANCE_HEADER
from nemo_aligner.servers.fleet import Fleet
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.schema import Endpoint, validate_request
from nemo_aligner.servers.served_model import ServedModel, fit_requests


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
        self.served: dict[str, ServedModel] = {}  # as those with a schema describe themselves
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
        # Reward models have clients of their own, so this is about the critic.
        setting = f"{self.setting}.critic"
        spec = RewardModelSpec(None, server_name, ((ip, int(port)),), 1.0, setting)
        with closing(self.fleet(spec, endpoint)) as fleet:  # its probes end with the wait
            fleet.wait_until_ready(math.inf)
            (server,) = fleet.servers
        assert server.served is not None  # it is ready
        self.served[server_name], self._endpoints[server_name] = server.served, endpoint
        known = {each.servers[0].peer: each for each in self.connections.values()}
        self.connections[server_name] = known.get(server.peer) or ServerConnection(
            [Server(server.peer)], self.inference_timeout_s, self.setting
        )

    def fleet(self, spec: RewardModelSpec, endpoint: Endpoint | None, first: int = 0) -> Fleet:
        """The servers of a model, with the limits and secrets of this object; `close()` it."""
        limits = self.init_timeout_s, self.inference_timeout_s
        return Fleet(spec, endpoint, *limits, first, self.token, self.tls)

    def print_server_dict(self) -> None:
        for name, connection in self.connections.items():
            logging.info(f"server {name}: {connection.servers[0]}")

    def send_data_to_server(
        self,
        server_name: str,
        data: Mapping[str, np.ndarray],
        batching: bool = True,
        used: np.ndarray | None = None,
    ) -> PendingReply:
        """Send numpy arrays by wire name, unchanged until the reply; returns at once.

        `batching`: False keeps the request's place among all (see `ServerConnection`). `used`:
        which values of the reply are, as of `validate_reply`. `RequestError`, and nothing is sent:
        it does not fit the schema, or the form that the server lists.
        """
        endpoint, served = self._endpoints[server_name], self.served[server_name]
        if endpoint is not None:
            validate_request(endpoint, data)
        connection = self.connections[server_name]
        request = Request(f"{server_name} at {connection.servers[0]}", dict(data), endpoint, used)
        request.served, request.alone = served, not batching
        request.parts = fit_requests(served, endpoint, request.data)
        if served.instance is not None:
            request.headers[INSTANCE_HEADER] = served.instance
            request.repeatable = "request_id" in data or not served.lists("request_id")
        title = request.title  # alone: a request holds a whole update
        sent = SentRequest(connection.send(request), lambda: title)
        return PendingReply({server_name: sent})

    def close(self) -> None:
        """End all connections; requests in flight get a few seconds."""
        for connection in set(self.connections.values()):
            connection.close()
