# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of named servers: they wait for the servers, check requests and send them."""

import functools
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.connection import ServerConnection
from nemo_aligner.servers.exchange import (
    ModelProbe,
    UntrustedServerError,
    asks_for_no_token,
    http_status,
    token_problem,
)
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.schema import Arrays, Endpoint
from nemo_aligner.servers.served_model import (
    DescriptionError,
    ServedModel,
    ServerMismatchError,
    check_served_model,
    read_served_model,
    warnings_about,
)
from nemo_aligner.servers.validation import validate_request


class ServerUnreachableError(UserError):
    """No server replies at the configured address."""


class Closeable(Protocol):
    """A client with connections of its own, such as a fleet."""

    def close(self) -> None:
        """End all connections."""


class _of_class_or_instance:
    """Decorator of a method that can be called on the class too: then it gets a new object."""

    def __init__(self, method: Callable[..., "HTTPCommunicator"]) -> None:
        self.method = method

    def __get__(
        self, instance: "HTTPCommunicator | None", owner: "type[HTTPCommunicator]"
    ) -> Callable[..., "HTTPCommunicator"]:
        return functools.partial(self.method, owner() if instance is None else instance)


class HTTPCommunicator:
    """Clients of named servers (Triton endpoints).

    Args:
        inference_timeout_s: how long one request may take on the server; the longest is a whole
            critic update.
        progress_interval_s: time between two progress lines while waiting for a server.
        setting: section of the configuration named in error messages.

    Attributes:
        connections: the connection to each named server; names at one address share it.
        served: each server that was added with a schema, as it describes itself.
    """

    def __init__(
        self,
        init_timeout_s: float = 600,
        inference_timeout_s: float = 3600,
        progress_interval_s: float = 5.0,
        setting: str = "remote_critic_rm",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.init_timeout_s = init_timeout_s
        self.inference_timeout_s = inference_timeout_s
        self.progress_interval_s = progress_interval_s
        self.setting, self.token, self.tls = setting, token, tls
        self.connections: dict[str, ServerConnection] = {}
        self.served: dict[str, ServedModel] = {}
        self._endpoints: dict[str, Endpoint | None] = {}
        self._attached: list[Closeable] = []

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
        """Connect to all of `servers`, {name: (ip, port)}; returns the communicator, a new one if
        called on the class, as in NeMo-Aligner. `endpoints` gives their schemas (see
        `add_server_by_name`).
        """
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
        """Wait until `server_name` is served at `ip:port`, then connect to it.

        Args:
            endpoint: the schema of what is sent. The server's own description is read, and it
                gets what it lists of the schema, in the form that it lists. None sends requests
                as they are.

        Raises:
            ServerUnreachableError: nothing serves it within `init_timeout_s`.
            ServerMismatchError: it does not have the name, cannot be used with the schema, or asks
                for another token.
        """
        port = int(port)
        served = self._wait_until_ready(server_name, ip, port, endpoint is not None)
        if served is not None and endpoint is not None:
            check_served_model(served, endpoint, f"{ip}:{port}")
            self.served[server_name] = served
            for warning in warnings_about(served, endpoint, f"{ip}:{port}"):
                logging.warning(warning)
        for connection in self.connections.values():
            if (connection.host, connection.port) == (ip, port):
                break
        else:
            connection = ServerConnection(
                ip, port, self.inference_timeout_s, self.setting, self.token, self.tls
            )
        self.connections[server_name] = connection
        self._endpoints[server_name] = endpoint

    def _wait_until_ready(
        self, server_name: str, host: str, port: int, describe: bool
    ) -> ServedModel | None:
        """Return the server's description once it is ready; None unless `describe`."""
        start = time.monotonic()
        next_line = start + min(2.0, self.progress_interval_s)
        pause = 0.1
        state = "no reply"
        # Reward models have clients of their own, so this is about the critic.
        name_key = f"{self.setting}.critic.name"
        probe = ModelProbe(host, port, server_name, name_key, self.token, self.tls)
        while (waited := time.monotonic() - start) < self.init_timeout_s:
            path, limit_s = f"/v2/models/{server_name}/ready", min(5.0, self.init_timeout_s)
            try:
                status = probe.status(limit_s)
            except UntrustedServerError as error:
                raise ServerMismatchError(
                    f"'{server_name}' at {host}:{port} cannot be used: {error} ({self.setting})."
                ) from error
            if probe.unknown is not None:
                raise ServerMismatchError(probe.unknown)
            if status == 401:
                raise ServerMismatchError(
                    f"'{server_name}' at {host}:{port} cannot be used: "
                    + token_problem(self.token, self.setting)
                )
            state = (
                "no reply"
                if status is None
                else f"a server replies, but '{server_name}' is not ready"
            )
            if status == 200:
                try:
                    served = None
                    if describe:
                        served = read_served_model(
                            host, port, server_name, 5.0, self.token, self.tls
                        )
                    if (
                        self.token is not None
                        and http_status(host, port, path, limit_s, tls=self.tls) == 200
                    ):
                        logging.warning(asks_for_no_token(f"{host}:{port}"))
                    logging.info(f"connected to {server_name} at {host}:{port}")
                    return served
                except DescriptionError as error:
                    state = str(error)
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + self.progress_interval_s
                logging.info(
                    f"waiting for server {server_name} at {host}:{port}: {state} "
                    f"({waited:.0f} of {self.init_timeout_s:.0f} s)"
                )
            time.sleep(max(0.0, min(pause, self.init_timeout_s - (time.monotonic() - start))))
            pause = min(pause * 1.5, 0.5)
        raise ServerUnreachableError(
            f"server '{server_name}' is not reachable at {host}:{port} after "
            f"{self.init_timeout_s:.0f} s ({state}). Start the server job first and check that "
            f"its host, port and endpoint name are those in {self.setting} (ip={host}, "
            f"port={port}, name={server_name}); raise {self.setting}.init_timeout_s if it only "
            "needs longer to load."
        )

    def print_server_dict(self) -> None:
        for name, connection in self.connections.items():
            logging.info(f"server {name}: {connection}")

    def send_data_to_server(
        self,
        server_name: str,
        data: Mapping[str, np.ndarray],
        batching: bool = True,
        check: Callable[[Arrays], None] | None = None,
    ) -> PendingReply:
        """Send numpy arrays by wire name; returns at once. The arrays must not change before the
        reply has come.

        Args:
            batching: False for an endpoint that takes one request at a time: the request keeps
                its place among all requests to that server (see `ServerConnection`). True lets it
                overtake and be overtaken by others of its kind.
            check: called with the reply; may raise `ReplyError`.

        Raises:
            RequestError: the request does not fit the endpoint's schema, or cannot be given the
                form that the server lists (nothing is sent).
        """
        endpoint = self._endpoints[server_name]
        if endpoint is not None:
            validate_request(endpoint, data)
        connection = self.connections[server_name]
        forms = None if endpoint is None else (endpoint, self.served[server_name])
        future = connection.submit(server_name, data, alone=not batching, check=check, forms=forms)
        sent = SentRequest(future, lambda: f"{server_name} at {connection}")
        return PendingReply({server_name: sent})

    def attach(self, client: Closeable) -> None:
        self._attached.append(client)

    def close(self) -> None:
        """End all connections; requests in flight get a few seconds."""
        while self._attached:
            self._attached.pop().close()
        for connection in set(self.connections.values()):
            connection.close()
        self.connections.clear()
