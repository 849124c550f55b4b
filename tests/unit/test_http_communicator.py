# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Waiting for servers, and requests to a server that has a state, the critic: their order, and
failures.
"""

import concurrent.futures
import socket
import threading
import time

import numpy as np
import pytest

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers import fleet, schema
from nemo_aligner.servers.fleet import RESTART_REMEDY, ServerUnreachableError
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import validate_reply
from tests.patience import patience, wait_until
from tests.scripted_server import ScriptedServer, answer, failure, http

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]
HANG_S = 100.0  # longer than anything here takes


@pytest.fixture
def fast(monkeypatch):
    """Silent servers are noticed in tenths of seconds."""
    for name in ("PROBE_INTERVAL_S", "PROBE_TIMEOUT_S"):
        monkeypatch.setattr(fleet, name, patience(0.1))


class Client:
    """A connection to a scripted server, with requests whose reward is their first token."""

    def __init__(self, server, inference_timeout_s=2 * HANG_S):
        self.communicator = HTTPCommunicator(HANG_S, inference_timeout_s)
        self.communicator.add_server_by_name("critic_infer", "127.0.0.1", server.port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.communicator.close()

    def send(self, value, alone=False, check=None):
        tokens = np.full((1, 3), value, np.int64)
        return self.communicator.send_data_to_server(
            "critic_infer", {"tokens": tokens}, not alone, check
        )


def rewards(pending):
    return [float(each.result()["rewards"][0, 0]) for each in pending]


def test_wrong_port_is_one_clear_error_in_time(monkeypatch):
    lines = []
    monkeypatch.setattr(fleet.logging, "info", lines.append)
    monkeypatch.setattr(fleet, "PROGRESS_INTERVAL_S", 0.05)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    communicator = HTTPCommunicator(init_timeout_s=2.0)
    start = time.monotonic()
    with pytest.raises(ServerUnreachableError) as caught:
        communicator.create_http_communicator_from_dict({"critic_infer": ("127.0.0.1", port)})
    assert time.monotonic() - start < 30  # the default is much longer
    assert isinstance(caught.value, UserError)
    words = "critic_infer", f"127.0.0.1:{port}"
    for word in (*words, "2 s", "remote_critic_rm.init_timeout_s"):
        assert word in str(caught.value)
    assert len(lines) >= 2 and all(word in line for word in words for line in lines)


# ---- the order of requests ----


def test_those_that_keep_their_place_are_sent_one_after_another():
    """Also requests to several endpoints; others overlap with them."""
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
        futures += [client.send(value, alone=True) for value in (100, 101, 102)]
        assert rewards(futures) == [0, 1, 2, 100, 101, 102]
    in_order = [value for _, value in events if value >= 100]
    assert in_order == [100, 100, 101, 101, 102, 102]
    assert [what for what, _ in events[:4]] == ["begins"] * 4


# ---- failures: each is one error, and nothing is sent again ----


UNHEALTHY = "Stub process 'critic_train_0' is not healthy"


@pytest.mark.parametrize(
    "script, words",
    [
        (lambda index, rewards: b"", ["RemoteDisconnected", RESTART_REMEDY]),
        (lambda index, rewards: http({"what": 1}, 500), ['failed: HTTP 500: {"what": 1}']),
        (failure(f"{UNHEALTHY}."), [UNHEALTHY, RESTART_REMEDY]),
        (
            failure(
                "Failed to process the request(s), message: Traceback (most recent call last):\n"
                '  File "/a/model.py", line 7, in score\n    ...\nArithmeticError: no\n\nAt:\n  x'
            ),
            ["failed: ArithmeticError: no (model.py:7 in score)"],
        ),
    ],
    ids=["closed", "other-json", "process-lost", "model"],
)
def test_a_failed_request_is_one_error_with_its_cause(script, words):
    with ScriptedServer(script) as server, Client(server) as client:
        future = client.send(1, alone=True)
        with pytest.raises(ServerRequestError) as caught:
            future.result()
        message = str(caught.value)
        assert message.startswith(f"request to critic_infer at 127.0.0.1:{server.port} failed: ")
        assert "\n" not in message
        for word in words:
            assert word in message
        assert (RESTART_REMEDY in message) == (RESTART_REMEDY in words)
        assert server.requests == 1
        with pytest.raises(ServerRequestError):
            client.send(2).result()  # the next request is sent
        assert server.requests == 2


def test_a_server_that_is_gone_is_named():
    with ScriptedServer() as server, Client(server) as client:
        assert rewards([client.send(7)]) == [7]
        server.stop()
        with pytest.raises(ServerRequestError) as caught:
            client.send(8).result()
    assert "ConnectionRefusedError" in str(caught.value)
    assert f"The server is gone. {RESTART_REMEDY}" in str(caught.value)


def test_a_server_that_falls_silent_is_given_up(fast):
    with ScriptedServer(lambda *_: None) as server, Client(server) as client:
        future = client.send(1, alone=True)
        waiting = client.send(2, alone=True)
        time.sleep(1.0)
        assert not future.done(0)  # it answers probes
        server.ready = None
        for each in (future, waiting):
            with pytest.raises(ServerRequestError, match="replies .[0-9] probes in a row"):
                each.result()


def test_the_time_limit_ends_a_request_that_hangs():
    with ScriptedServer(lambda *_: None) as server, Client(server, 1.0) as client:
        words = r"got no reply within 1 s \(remote_critic_rm.inference_timeout_s\)"
        with pytest.raises(ServerRequestError, match=words):
            client.send(1).result()


def test_values_of_nan_are_refused_with_the_address():
    def check(reply):
        validate_reply(schema.reward_model_endpoint(), reply, 1)

    with ScriptedServer() as server, Client(server) as client:
        assert rewards([client.send(1, check=check)]) == [1]
        server.script = lambda index, rewards: answer([[float("nan")]])
        words = f"critic_infer at 127.0.0.1:{server.port} failed: 'rewards' is nan in sample 0"
        with pytest.raises(ServerRequestError, match=words):
            client.send(1, check=check).result()


def test_closing_fails_what_is_open(fast):
    with ScriptedServer(lambda *_: None) as server:
        with Client(server) as client:
            pending = client.send(1, alone=True), client.send(2, alone=True)
            wait_until(lambda: server.requests, 10, "the first request")
        for each in pending:
            with pytest.raises(ServerRequestError, match="closed"):
                each.result()


def test_a_wait_in_vain_is_logged_with_the_address(monkeypatch):
    lines = []
    monkeypatch.setattr("nemo_aligner.servers.futures.logging.info", lines.append)
    future = concurrent.futures.Future()
    pending = PendingReply({"critic_train": SentRequest(future, lambda: "critic_train at c:7")})
    assert not pending.done(0.05)
    assert lines == ["waiting for critic_train at c:7 (0 s)"]
    future.set_result({"loss_mean": np.ones(1)})
    assert pending.done(0) and pending.result() == {"loss_mean": np.ones(1)}
