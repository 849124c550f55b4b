# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Waiting for servers, and requests to a server that has a state, the critic: their order, and
failures.
"""

import concurrent.futures
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers import connection as connection_module
from nemo_aligner.servers.connection import RESTART_REMEDY, ServerConnection
from nemo_aligner.servers.exchange import ConnectionLostError, Exchange, InferRequest, Peer
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from tests.cases import says
from tests.patience import patience, wait_until
from tests.scripted_server import ScriptedServer, answer, failure

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]
HANG_S = 100.0  # longer than anything here takes


@pytest.fixture
def fast(monkeypatch):
    """Silent servers are noticed in tenths of seconds."""
    for name in ("PROBE_INTERVAL_S", "PROBE_TIMEOUT_S"):
        monkeypatch.setattr(connection_module, name, patience(0.2))
    monkeypatch.setattr(ServerConnection, "grace_s", patience(0.2))


class Client(HTTPCommunicator):
    """A client of a scripted server, with requests whose reward is their first token."""

    def __init__(self, server):
        super().__init__(patience(20), 2 * HANG_S)
        self.add_server_by_name("critic_infer", "127.0.0.1", server.port)

    def send(self, value, alone=False):
        tokens = np.full((1, 3), value, np.int64)
        pending = self.send_data_to_server("critic_infer", {"tokens": tokens}, batching=not alone)
        return pending._sent["critic_infer"].future


def rewards(futures):
    return [float(future.result(HANG_S)["rewards"][0, 0]) for future in futures]


# ---- the order of requests ----


def test_requests_overlap_except_those_that_keep_their_place():
    """Requests 100 and 101 are alone at the server, between those around them."""
    events, lock = [], threading.Lock()

    def record(index, rewards):
        value = int(rewards[0][0])
        with lock:
            events.append(("begins", value))
        time.sleep(patience(0.3 if value < 100 else 0.1))
        with lock:
            events.append(("ends", value))
        return answer(rewards)

    with ScriptedServer(record) as server, Client(server) as client:
        futures = [client.send(value) for value in range(3)]
        futures += [client.send(100, alone=True), client.send(101, alone=True)]
        futures += [client.send(value) for value in range(3, 6)]
        assert rewards(futures) == [0, 1, 2, 100, 101, 3, 4, 5]
    values = [value for _, value in events]
    assert {*values[:6]} == {0, 1, 2} and {*values[10:]} == {3, 4, 5}
    assert values[6:10] == [100, 100, 101, 101]
    for side_by_side in (events[:3], events[10:13]):
        assert [what for what, _ in side_by_side] == ["begins"] * 3


# ---- failures: each is one error, and nothing is sent again ----


UNHEALTHY = "Stub process 'critic_train_0' is not healthy"


@pytest.mark.parametrize(
    "script, words",
    [
        (lambda index, rewards: b"", ["RemoteDisconnected", RESTART_REMEDY]),
        (failure(f"{UNHEALTHY}."), [UNHEALTHY, RESTART_REMEDY]),
        (failure("ArithmeticError: no"), ["failed: ArithmeticError: no"]),
    ],
    ids=["closed", "process-lost", "model"],
)
def test_a_failed_request_is_one_error_with_its_cause(script, words):
    with ScriptedServer(script) as server, Client(server) as client:
        future = client.send(1, alone=True)
        failed = f"request to critic_infer at 127.0.0.1:{server.port} failed: "
        but = ["\n"] if RESTART_REMEDY in words else ["\n", RESTART_REMEDY]
        with says(ServerRequestError, failed, *words, but=but):
            future.result(HANG_S)
        assert server.requests == 1
        with pytest.raises(ServerRequestError):
            client.send(2).result(HANG_S)  # the next request is sent
        assert server.requests == 2


def test_a_server_that_is_gone_is_named():
    with ScriptedServer() as server, Client(server) as client:
        assert rewards([client.send(7)]) == [7]
        server.stop()
        gone = f"The server is gone. {RESTART_REMEDY}"
        with says(ServerRequestError, "ConnectionRefusedError", gone):
            client.send(8).result(HANG_S)


def test_a_server_that_falls_silent_is_given_up(fast):
    with ScriptedServer(lambda *_: None) as server, Client(server) as client:
        future = client.send(1, alone=True)
        waiting = client.send(2, alone=True)
        time.sleep(1.0)
        assert not future.done()  # it answers probes
        server.ready = None
        for each in (future, waiting):
            with pytest.raises(ServerRequestError, match="replies .[0-9] probes in a row"):
                each.result(HANG_S)


def test_closing_fails_what_is_open_and_ends_all_threads(fast):
    before = set(threading.enumerate())
    with ScriptedServer(lambda *_: None) as server:
        with Client(server) as client:
            sent, waiting = client.send(1, alone=True), client.send(2)
            wait_until(lambda: server.requests, 10, "the first request")
        with pytest.raises(ServerRequestError, match="has no reply: this client was closed"):
            sent.result(HANG_S)
        with pytest.raises(ServerRequestError, match="was not sent: this client was closed"):
            waiting.result(HANG_S)
        with pytest.raises(ServerRequestError, match="this client is closed"):
            client.send(3)
        mine = [t for t in set(threading.enumerate()) - before if str(server.port) in t.name]
        for thread in mine:
            thread.join(patience(5))
        assert not [thread for thread in mine if thread.is_alive()]


@pytest.mark.parametrize("before", [True, False])  # as between two pieces; while it connects
def test_a_request_that_was_given_up_is_never_sent(before):
    with ScriptedServer() as server:
        exchange = Exchange(Peer("127.0.0.1", server.port))
        connect = exchange._connection.connect
        if before:
            exchange.abort()
        exchange._connection.connect = lambda: (exchange.abort(), connect())
        with pytest.raises(ConnectionLostError, match="given up") as caught:
            exchange.run(InferRequest("critic_train", {"tokens": np.ones((1, 3))}), HANG_S)
        assert not caught.value.sent and not server.requests


# ---- several endpoints, and waiting ----


def test_without_a_thread_a_request_fails_and_the_next_one_is_sent(monkeypatch):
    with ScriptedServer() as server, Client(server) as client:
        no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr(connection_module, "in_thread", no_thread)
        with pytest.raises(ServerRequestError, match="was not sent: can't start new thread"):
            client.send(1).result(HANG_S)
        monkeypatch.undo()
        assert rewards([client.send(2)]) == [2]


def test_endpoints_at_one_address_share_a_connection_that_does_not_probe_while_idle(fast):
    with ScriptedServer() as server, HTTPCommunicator() as communicator:
        address = ("127.0.0.1", server.port)
        communicator.create_http_communicator_from_dict({"a": address, "b": address})
        assert set(communicator.connections) == {"a", "b"}
        assert len(set(communicator.connections.values())) == 1
        reply = communicator.send_data_to_server("b", {"tokens": np.full((1, 3), 4)}).result()
        assert reply["rewards"].tolist() == [[4.0]]
        probes = server.probes
        time.sleep(5 * connection_module.PROBE_INTERVAL_S)
        assert server.probes == probes


def test_a_wait_in_vain_is_logged_with_the_address(monkeypatch):
    lines = []
    monkeypatch.setattr("nemo_aligner.servers.futures.logging.info", lines.append)
    future = concurrent.futures.Future()
    pending = PendingReply({"critic_train": SentRequest(future, lambda: "critic_train at c:7")})
    assert not pending.done(0.05)
    assert lines == ["waiting for critic_train at c:7 (0 s)"]
    future.set_result({"loss_mean": np.ones(1)})
    assert pending.done(0) and pending.result() == {"loss_mean": np.ones(1)}
