# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's side of the wire: waits for servers, checks requests, sends them and watches for
the answers.
"""

import concurrent.futures
import http.client
import threading
import time

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers.schema import Endpoint, ResponseError, validate_request


class ServerUnreachableError(UserError):
    """No server answers at the configured address."""


def http_status(host: str, port: int, path: str, timeout_s: float) -> int | None:
    """HTTP status of a GET, or None when nothing answers."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _futures_client(**kwargs):
    """A `FuturesModelClient` whose worker threads never keep the process alive (upstream's are not
    daemons).
    """
    from pytriton.client import FuturesModelClient

    class DaemonFuturesModelClient(FuturesModelClient):
        def _extend_thread_pool(self):
            with self._lock:
                if (
                    not self._closed
                    and not self._queue.empty()
                    and len(self._threads) < self._max_workers
                ):
                    self._threads.append(threading.Thread(target=self._worker, daemon=True))
                    self._threads[-1].start()

    return DaemonFuturesModelClient(**kwargs)


RESTART_REMEDY = "Look into the server job's log and restart both jobs with the same commands: they resume from their checkpoints."


class PendingAnswer:
    """A future of one request that knows where it was sent; `check(answer)` may raise
    `ResponseError`.

    It is never cancelled: PyTriton's worker thread would die of it, and the server would go on all
    the same.
    """

    # Unanswered liveness probes in a row (one per `heartbeat_s`) after which a server counts as
    # dead.
    MAX_MISSED_PROBES = 3

    def __init__(
        self, future: concurrent.futures.Future, server_name: str, host: str, port: int, check=None
    ):
        self.future, self.server_name, self.host, self.port = future, server_name, host, port
        self._check = check
        self._started = time.monotonic()
        self._missed = 0

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. A wait that ends without an answer is logged, and the server is
        probed.

        Raises:
            ServerRequestError: the server has stopped answering probes.
        """
        try:
            self.future.exception(timeout=timeout_s)
            return True
        except concurrent.futures.TimeoutError:
            pass
        waited = time.monotonic() - self._started
        logging.info(f"waiting for {self.server_name} at {self.host}:{self.port} ({waited:.0f} s)")
        alive = http_status(self.host, self.port, "/v2/health/live", timeout_s=10) == 200
        self._missed = 0 if alive else self._missed + 1
        if self._missed >= self.MAX_MISSED_PROBES:
            raise ServerRequestError(
                f"{self.server_name}: the server at {self.host}:{self.port} no longer answers "
                f"({waited:.0f} s after "
                f"the request was sent). {RESTART_REMEDY}"
            )
        return False

    def result(self, heartbeat_s: float = 30.0) -> dict:
        """The answer, by tensor name.

        Raises:
            ServerRequestError: with the remote traceback, or saying why the answer cannot be used.
        """
        while not self.done(heartbeat_s):
            pass
        error = self.future.exception()
        if error is not None:
            remedy = ""
            if http_status(self.host, self.port, "/v2/health/live", timeout_s=10) != 200:
                remedy = f" The server is gone. {RESTART_REMEDY}"
            raise ServerRequestError(
                f"request to {self.server_name} at {self.host}:{self.port} failed: "
                f"{type(error).__name__}: {error}" + remedy
            ) from error
        answer = self.future.result()
        if self._check is not None:
            try:
                self._check(answer)
            except ResponseError as error:
                raise ServerRequestError(
                    f"request to {self.server_name} at {self.host}:{self.port} failed: {error}"
                ) from error
        return answer


class HTTPCommunicator:
    """Clients of named servers (Triton endpoints).

    Args:
        init_timeout_s: how long to wait for a server to come up.
        inference_timeout_s: how long one request may take on the server; the longest is a whole
            critic update.
        progress_interval_s: time between two progress lines while waiting for a server.
        setting: configuration section named in error messages.
    """

    def __init__(
        self,
        init_timeout_s: float = 600,
        inference_timeout_s: float = 3600,
        progress_interval_s: float = 5.0,
        setting: str = "remote_critic_rm",
    ):
        self.init_timeout_s = init_timeout_s
        self.inference_timeout_s = inference_timeout_s
        self.progress_interval_s = progress_interval_s
        self.setting = setting
        self.connections = {}
        self._addresses = {}
        self._endpoints = {}
        self._attached = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def create_http_communicator_from_dict(
        self, servers: dict, endpoints: dict | None = None
    ) -> None:
        """Connect to all of `servers`, {name: (ip, port)}; `endpoints` {name: Endpoint} gives
        their schemas.
        """
        for name, (ip, port) in servers.items():
            self.add_server_by_name(name, ip=ip, port=port, endpoint=(endpoints or {}).get(name))

    def add_server_by_name(
        self,
        server_name: str,
        ip: str = "localhost",
        port: int = 5555,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Wait until `server_name` is served at `ip:port`, then connect to it.

        Raises:
            ServerUnreachableError: nothing serves it within `init_timeout_s`.
        """
        self._wait_until_ready(server_name, ip, int(port))
        self.connections[server_name] = _futures_client(
            url=f"http://{ip}:{port}",
            model_name=server_name,
            init_timeout_s=self.init_timeout_s,
            inference_timeout_s=self.inference_timeout_s,
        )
        self._addresses[server_name] = (ip, int(port))
        self._endpoints[server_name] = endpoint

    def _wait_until_ready(self, server_name: str, host: str, port: int) -> None:
        start = time.monotonic()
        next_line = start + min(2.0, self.progress_interval_s)
        pause = 0.1
        state = "no answer"
        while (waited := time.monotonic() - start) < self.init_timeout_s:
            status = http_status(
                host,
                port,
                f"/v2/models/{server_name}/ready",
                timeout_s=min(5.0, self.init_timeout_s),
            )
            if status == 200:
                logging.info(f"connected to {server_name} at {host}:{port}")
                return
            state = (
                "no answer"
                if status is None
                else f"a server answers, but '{server_name}' is not ready"
            )
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + self.progress_interval_s
                logging.info(
                    f"waiting for server {server_name} at {host}:{port}: {state} "
                    f"({waited:.0f} of {self.init_timeout_s:.0f} s)"
                )
            time.sleep(max(0.0, min(pause, self.init_timeout_s - (time.monotonic() - start))))
            pause = min(pause * 1.5, 2.0)
        raise ServerUnreachableError(
            f"server '{server_name}' is not reachable at {host}:{port} after "
            f"{self.init_timeout_s:.0f} s ({state}). "
            "Start the server job first and check that its host, port and endpoint name are "
            f"those in {self.setting} "
            f"(ip={host}, port={port}, name={server_name}); raise {self.setting}.init_timeout_s "
            "if it only needs "
            "longer to load."
        )

    def print_server_dict(self) -> None:
        """Log the address of every connected server."""
        for name, (ip, port) in self._addresses.items():
            logging.info(f"server {name}: {ip}:{port}")

    def send_data_to_server(
        self, server_name: str, data: dict, batching: bool = True, check=None
    ) -> PendingAnswer:
        """Send numpy arrays by wire name; returns at once. `check(answer)` may raise
        `ResponseError`.

        Raises:
            RequestError: the request does not fit the endpoint's schema (nothing is sent).
        """
        endpoint = self._endpoints[server_name]
        if endpoint is not None:
            validate_request(endpoint, data)
        data = {name: np.ascontiguousarray(array) for name, array in data.items()}
        client = self.connections[server_name]
        future = client.infer_batch(**data) if batching else client.infer_sample(**data)
        return PendingAnswer(future, server_name, *self._addresses[server_name], check)

    def attach(self, fleet) -> None:
        """Close `fleet` together with this communicator."""
        self._attached.append(fleet)

    def close(self) -> None:
        """End the client threads; requests in flight get a few seconds."""
        logging.info("Cleaning up communicator")
        while self._attached:
            self._attached.pop().close()
        for client in self.connections.values():
            client.close(wait=False)
        deadline = time.monotonic() + 5.0
        for client in self.connections.values():
            for thread in client._threads:
                thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self.connections.clear()
