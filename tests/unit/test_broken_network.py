# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to the critic over a network that loses them: each has one reply, and is done once.

The fronts of the server are the real ones; Triton, or the handlers, are scripts that count.
"""

import contextlib
import dataclasses
import functools
import json
import time

import numpy as np
import pytest

from nemo_aligner.config.server_rules import FRONTENDS
from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers import connection as connection_module
from nemo_aligner.servers import exchange, http_server
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.connection import RESTART_REMEDY
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import TensorSpec, critic_infer_endpoint, critic_train_endpoint
from tests.cases import some_of
from tests.faulty_network import FAULTS, FaultyNetwork
from tests.patience import patience
from tests.scripted_server import triton_config
from tests.scripted_triton import ScriptedTriton, open_front

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
COUNT = TensorSpec("count", np.int64, (1,))
ENDPOINTS = {
    endpoint.name: dataclasses.replace(endpoint, outputs=(*endpoint.outputs, COUNT))
    for endpoint in (critic_infer_endpoint(True), critic_train_endpoint())
}


def says(path):
    """The descriptions of the endpoints."""
    if not path.endswith("config"):
        return b"{}"
    return json.dumps(triton_config(ENDPOINTS[path.split("/")[3]])).encode()


def handle(triton, name, **_arrays):
    """Work on a request for `triton.works_s`; the reply is how many have come."""
    triton.handled.append(name)
    time.sleep(triton.works_s)
    outputs = {spec.name: np.zeros((1, 1), spec.dtype) for spec in ENDPOINTS[name].outputs}
    return {**outputs, "count": np.array([len(triton.handled)])}


@pytest.fixture
def triton(tmp_path):
    with ScriptedTriton(tmp_path / "http", says) as server:
        server.works_s = 0.0
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Silence is noticed in tenths of seconds."""
    monkeypatch.setattr(connection_module, "RETRY_PAUSES_S", (0.05, 0.05, 0.05))
    monkeypatch.setattr(exchange, "SILENCE_S", min(patience(0.6), 4.0))
    monkeypatch.setattr(http_server, "HEARTBEAT_S", 0.1)


def handlers(triton):
    handler = lambda name: functools.partial(handle, triton, name)
    return [(endpoint, handler(name)) for name, endpoint in ENDPOINTS.items()]


def serve_triton(triton, port=0):
    return contextlib.closing(triton.open_front(handlers(triton), Access(), port))


def serve_asgi(triton, port=0):
    return contextlib.closing(open_front(handlers(triton), Access(), port))


@pytest.fixture(params=[serve_triton, serve_asgi], ids=FRONTENDS)
def serve(request):
    return request.param


# The client decides, and the test waits long.
SERVES = [pytest.param(serve_triton, marks=pytest.mark.full), serve_asgi]
asgi_alone = pytest.mark.parametrize("serve", SERVES, ids=FRONTENDS, indirect=True)


class Client:
    """A client of both endpoints that holds the lease."""

    def __init__(self, port, inference_timeout_s=100.0):
        self.communicator = HTTPCommunicator(patience(20), patience(inference_timeout_s))
        servers = dict.fromkeys(ENDPOINTS, ("127.0.0.1", port))
        self.communicator.create_http_communicator_from_dict(servers, ENDPOINTS)
        self.communicator.connections["critic_train"].take_lease()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.communicator.close()

    def send(self, name, **more):
        """The reply to a request, as the number of requests that Triton had got."""
        data = {"tokens": np.ones((1, 3), np.int64)}
        if name == "critic_infer":
            data["sequence_lengths"] = np.full((1, 1), 3, np.int64)
        else:
            keys = ("returns", "prev_values", "mask")
            data |= {key: np.ones((1, 2), np.float32) for key in keys} | more
        reply = self.communicator.send_data_to_server(name, data, name == "critic_infer")
        return reply.result()["count"].item()


@contextlib.contextmanager
def over_network(serving, fault):
    """A client of a server, and the network between them, with its faults."""
    with serving as server, FaultyNetwork(server.address, fault) as network:
        with Client(network.port) as client:
            yield client, network


UPDATE = {"request_id": np.array([b"an-update"])}


@some_of("name", [*reversed(ENDPOINTS)])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_costs_a_repetition(serve, triton, fault, name):
    once = lambda number, path: None if number else fault
    with over_network(serve(triton), once) as (client, network):
        assert client.send(name, **UPDATE) >= 1
        assert network.happened == [(f"/v2/models/{name}/infer", fault)]
    assert set(triton.handled) == {name} and len(triton.handled) <= 2


@pytest.mark.parametrize("more, tries", [(UPDATE, 4), ({}, 1)])
def test_a_network_that_always_fails_is_one_error_after_a_few_tries(serve, triton, more, tries):
    """Nobody could tell whether an update without an id had been made: it is not sent again."""
    with over_network(serve(triton), lambda number, path: "lost reply") as (client, _):
        with pytest.raises(ServerRequestError, match="critic_train .*failed: Conn") as caught:
            client.send("critic_train", **more)
    assert RESTART_REMEDY in str(caught.value)
    assert triton.handled == ["critic_train"] * tries


def test_a_long_request_is_not_taken_for_a_dead_connection(serve, triton):
    triton.works_s = 3 * exchange.SILENCE_S
    with serve(triton) as server, Client(server.address[1]) as client:
        assert client.send("critic_train", **UPDATE) == 1
    assert triton.handled == ["critic_train"]


@asgi_alone
def test_signs_of_life_do_not_stretch_the_time_limit(serve, triton):
    triton.works_s = patience(8)
    with serve(triton) as server, Client(server.address[1], 1.5) as client:
        start = time.monotonic()
        with pytest.raises(ServerRequestError, match="inference_timeout_s.*server is up"):
            client.send("critic_train", **UPDATE)
        assert time.monotonic() - start < patience(6)


@pytest.mark.parametrize("name", list(ENDPOINTS))
def test_a_server_that_was_started_anew_refuses_the_clients_of_before(serve, triton, name):
    with serve(triton) as before, Client(before.address[1]) as client:
        assert client.send(name, **UPDATE) == 1
        before.close()
        refused = pytest.raises(ServerRequestError, match="started anew")
        with serve(triton, before.address[1]), refused as caught:
            client.send(name, **UPDATE)
        assert RESTART_REMEDY in str(caught.value)
    assert triton.handled == [name]
