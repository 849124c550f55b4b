# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What each front of a server lets in, and what it refuses; Triton is a script here."""

import concurrent.futures
import contextlib
import http.client
import json
import threading
import time

import numpy as np
import pytest

from nemo_aligner.config.server_rules import FRONTENDS, RewardModelSpec
from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers import admission, exchange, http_server
from nemo_aligner.servers import connection as connection_module
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.connection import Lease, LeaseTakenError
from nemo_aligner.servers.exchange import Exchange, InferRequest, Peer
from nemo_aligner.servers.fleet import Fleet
from nemo_aligner.servers.front import Front
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import (
    critic_infer_endpoint,
    critic_save_endpoint,
    reward_model_endpoint,
)
from nemo_aligner.servers.served_model import ServerMismatchError
from tests import scripted_triton
from tests.patience import patience, wait_until
from tests.scripted_triton import ScriptedTriton, open_front

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

INFER = "/v2/models/critic_infer/infer"
SAVE = "/v2/models/critic_save/infer"
ENDPOINTS = [critic_infer_endpoint(True), critic_save_endpoint()]


TENSORS = [
    {"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [1]},
    {"name": "dummy_var", "shape": [1], "datatype": "INT64", "data": [1]},
]
TENSORS += [TENSORS[0] | {"shape": [2, 0], "data": []}]
INFER_BODY, SAVE_BODY, EMPTY_BODY = (json.dumps({"inputs": [t]}).encode() for t in TENSORS)


@pytest.fixture
def triton(tmp_path):
    with ScriptedTriton(tmp_path / "http") as server:
        yield server
        server.shutdown()


def handlers(triton):
    """The endpoints, with functions that reply with the tokens of the request."""

    def handler(endpoint):
        def handle(**arrays):
            triton.handled.append(endpoint.name)
            tokens = arrays.get("tokens", np.zeros((1, 1)))
            return {spec.name: tokens.astype(spec.dtype) for spec in endpoint.outputs}

        return endpoint, handle

    return list(map(handler, ENDPOINTS))


def make_triton_front(triton, token=None, lease_required=True):
    return triton.open_front(handlers(triton), Access(token, 3 * 2**20, lease_required))


def make_asgi_front(triton, token=None, lease_required=True):
    return open_front(handlers(triton), Access(token, 3 * 2**20, lease_required))


@pytest.fixture(params=[make_triton_front, make_asgi_front], ids=FRONTENDS)
def make_front(request, triton):
    """A front with `Access` as asked for, until the end of the test."""
    with contextlib.ExitStack() as stack:
        opened = lambda *access: contextlib.closing(request.param(triton, *access))
        yield lambda *access: stack.enter_context(opened(*access))


@pytest.fixture
def front(triton):
    with contextlib.closing(make_asgi_front(triton)) as server:
        yield server


@pytest.fixture
def triton_front(triton):
    with contextlib.closing(make_triton_front(triton)) as server:
        yield server


def ask(front, method, path, body=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return scripted_triton.ask(front.address, method, path, body, headers)


def test_triton_gets_a_request_without_its_tensors(triton_front, triton):
    for columns in (1, 150_000):
        tokens = np.arange(2 * columns).reshape(2, columns)
        given = {"tokens": tokens, "sequence_lengths": tokens[:, :1]}
        request = InferRequest("critic_infer", given)
        reply = Exchange(Peer(*triton_front.address)).run(request, patience(20))
        assert sorted(reply) == ["rewards", "values"]
        assert np.array_equal(reply["values"], tokens.astype(np.float32))
        method, path, body = triton.seen.pop()
        assert (method, path) == ("POST", INFER) and len(body) < 400
        assert b'"shape": [2, 1]' in body and body.endswith(bytes(2 * 8))  # for one tensor of two
    assert not triton.front.passing


def test_a_request_that_triton_does_not_run_is_an_error(triton_front, triton, monkeypatch):
    monkeypatch.setattr(triton, "hand_over", lambda name: None)
    status, _headers, reply = ask(triton_front, "POST", INFER, INFER_BODY)
    assert status == 500 and b"Triton has not handed over a request to critic_infer" in reply


def test_a_bad_request_is_an_error_of_its_own(make_front, triton):
    front = make_front()
    bad = json.dumps({"inputs": [TENSORS[0] | {"datatype": "FP32"}]}).encode()
    status, _headers, reply = ask(front, "POST", INFER, bad)
    assert status == 400 and "has dtype float32" in json.loads(reply)["error"]
    assert ask(front, "POST", INFER, INFER_BODY)[0] == 200


def test_requests_in_line_are_told_that_the_server_stops(triton, monkeypatch):
    """The one that is worked on gets its reply; those behind it, and later ones, get a 503."""
    begun, release = threading.Event(), threading.Event()

    def wait(**_arrays):
        begun.set()
        release.wait(patience(20))
        return {spec.name: np.zeros((1, 1), spec.dtype) for spec in ENDPOINTS[0].outputs}

    front = triton.open_front([(ENDPOINTS[0], wait)], Access())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, front, "POST", INFER, INFER_BODY)
        assert begun.wait(patience(20))
        second = pool.submit(ask, front, "POST", INFER, INFER_BODY)
        wait_until(lambda: len(triton.seen) == 2, 20, lambda: "the second request")
        handed = lambda: [each.reply for each in list(triton.front.passing.values())]
        wait_until(lambda: None not in handed(), 20, lambda: "both in line")
        front.close_port()
        status, _headers, reply = second.result(patience(20))
        assert status == 503 and "Server is stopping" in json.loads(reply)["error"]
        assert not first.done()
        release.set()
        assert first.result(patience(20))[0] == 200
    late = front.submit(ENDPOINTS[0], {}, b"", 0)
    assert late.result(0)[0] == 503
    front.close()
    assert not triton.front.passing


def test_a_request_whose_client_has_left_is_dropped(make_front, triton, monkeypatch):
    """Unless somebody has begun to work on it."""
    monkeypatch.setattr(http_server, "HEARTBEAT_S", 0.05)
    front = make_front()
    release, submit, futures = threading.Event(), front.submit, []
    monkeypatch.setattr(front, "submit", lambda *a: futures.append(submit(*a)) or futures[-1])
    front._lines["critic_infer", False].submit(release.wait, patience(20))
    gone = http.client.HTTPConnection(*front.address, timeout=patience(20))
    gone.request("POST", INFER, INFER_BODY)
    wait_until(lambda: futures, 20, lambda: "a request in line")
    gone.close()
    wait_until(futures[0].cancelled, 20, lambda: "it is dropped")
    release.set()
    assert ask(front, "POST", INFER, INFER_BODY)[0] == 200 and len(triton.handled) == 1


def test_outputs_come_as_they_are_asked_for(make_front, triton):
    """All or some, as numbers in the JSON or as bytes behind it, with the id of the request."""
    front = make_front()
    body = json.loads(INFER_BODY) | {"id": "7", "outputs": [{"name": "rewards"}]}
    status, headers, reply = ask(front, "POST", INFER, json.dumps(body).encode())
    assert status == 200 and headers["Content-Type"] == "application/json"
    content = json.loads(reply)
    assert content["id"] == "7"
    assert [output["name"] for output in content["outputs"]] == ["rewards"]
    assert len(content["outputs"][0]["data"]) == 1
    body["parameters"] = {"binary_data_output": True}
    status, headers, reply = ask(front, "POST", INFER, json.dumps(body).encode())
    size = int(headers["Inference-Header-Content-Length"])
    assert status == 200 and len(reply) - size == 4
    body["outputs"] = [{"name": "other"}]
    status, _headers, reply = ask(front, "POST", INFER, json.dumps(body).encode())
    assert status == 400 and "no output 'other'" in json.loads(reply)["error"]


def test_descriptions_are_those_of_triton(triton_front, triton):
    for path in ("", "/health/ready", "/models/critic_save/config", "/models/critic_save"):
        path = f"/v2{path}"
        assert ask(triton_front, "GET", path)[0] == 200
        assert triton.seen[-1] == ("GET", path, b"")


@pytest.mark.parametrize(
    "method, path, body, headers, status, word",
    [
        ("POST", "/v2/repository/models/evil/load", b"{}", {}, 404, "critic_infer, critic_save"),
        ("GET", "/v2/repository/index", None, {}, 404, "unknown model"),
        ("POST", "/v2/logging", b"{}", {}, 404, "unknown model"),
        ("POST", "/v2/systemsharedmemory/region/r/register", b"{}", {}, 404, "unknown model"),
        ("GET", "/v2/models/other/ready", None, {}, 404, "'/v2/models/other/ready'"),
        ("GET", "/v2/models/critic_infer/../x", None, {}, 404, "unknown model"),
        ("GET", "/v2/models/critic_infer/stats", None, {}, 404, "unknown model"),
        ("POST", "/v2/models/critic_infer/config", b"{}", {}, 405, "POST"),
        ("GET", INFER, None, {}, 405, "GET"),
        ("POST", INFER, b"[" * 500_000, {}, 400, "JSON"),
        ("POST", INFER, b"[1]", {}, 400, "no object"),
        ("POST", INFER, b'{"parameters": 1}', {}, 400, "parameters"),
        ("POST", INFER, EMPTY_BODY, {}, 400, "[2, 0]"),
        ("PUT", INFER, b"{}", {}, 501, "'PUT'"),
        ("POST", INFER, b"\xff", {}, 400, "JSON"),
        ("POST", INFER, iter([b"{}"] * 3), {}, 411, "Content-Length"),
        ("POST", INFER, b"{}", {"Content_Encoding": "gzip"}, 411, "as it is"),
        ("POST", INFER, b"{}", {"Content_Length": "-1"}, 400, "'-1'|Invalid HTTP"),
        ("POST", INFER, b"{}", {"Content_Length": "9" * 5000}, 400, "'9999|Invalid HTTP"),
        ("POST", INFER, b"{}", {"Inference_Header_Content_Length": "3"}, 413, "3 bytes"),
        ("POST", INFER, b"{}", {"Inference_Header_Content_Length": "9" * 5000}, 413, "at most"),
        ("POST", INFER, b" " * (2**20 + 1), {}, 413, "1048576"),
        ("POST", SAVE, b"{}" + b" " * 2**16, {}, 413, "this server takes at most 65536"),
        ("POST", INFER, bytes(2**23), {}, 413, "8388608"),
    ],
)  # fmt: skip
def test_what_must_not_enter_is_refused(front, triton, method, path, body, headers, status, word):
    got, _headers, reply = ask(front, method, path, body, **headers)
    error = json.loads(reply)["error"]
    assert got == status and any(form in error for form in word.split("|")), (got, error)
    assert "\n" not in error
    assert not triton.seen and not triton.handled


def test_an_incomplete_reply_of_triton_is_none(triton_front, triton):
    """Not even to a request that it has handed over: that one is replied to without it."""
    triton.cut_short = "/v2/health/live"
    assert ask(triton_front, "GET", "/v2/health/live")[0] == 503
    triton.cut_short = INFER
    assert ask(triton_front, "POST", INFER, INFER_BODY)[0] == 200


def test_without_triton_the_server_is_not_ready(triton_front, triton):
    triton.shutdown()
    triton.server_close()
    status, _headers, reply = ask(triton_front, "GET", "/v2/health/ready")
    assert status == 503 and "Server is not ready" in json.loads(reply)["error"]


def test_too_many_connections_are_closed(front, monkeypatch):
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 1)
    held = http.client.HTTPConnection(*front.address, timeout=patience(20))
    with contextlib.closing(held):
        held.connect()
        wait_until(lambda: ask(front, "GET", "/v2")[0] == 0, 10, lambda: "a refusal")
    wait_until(lambda: ask(front, "GET", "/v2")[0] == 200, 10, lambda: "a free place")


def test_a_connection_without_a_request_is_closed(front, monkeypatch):
    monkeypatch.setattr(http_server, "FIRST_REQUEST_S", 0.2)
    silent = http.client.HTTPConnection(*front.address, timeout=patience(20))
    with contextlib.closing(silent):
        silent.connect()
        assert silent.sock.recv(1) == b""


def test_a_taken_port_is_named(front):
    host, port = front.address
    with pytest.raises(UserError, match=f"{host}:{port}.*trainer.ppo.port"):
        Front(host, port, [], Access()).open()


TOKEN = "0123456789abcdef"


def test_requests_bring_the_token(make_front, triton):
    front = make_front(TOKEN)
    for path in ("/v2/health/live", "/v2/models/critic_save/ready", "/v2/nothing"):
        for credentials in ("", TOKEN, f"Bearer {TOKEN}0"):
            given = {"Authorization": credentials} if credentials else {}
            status, _headers, reply = ask(front, "GET", path, **given)
            assert status == 401 and "token" in json.loads(reply)["error"]
            assert TOKEN.encode() not in reply
    for body in (b"{}", bytes(2**21), "ä".encode()):
        assert ask(front, "POST", INFER, body, Authorization="Bearer \xff")[0] == 401
    assert not triton.seen and not triton.handled
    assert ask(front, "POST", INFER, INFER_BODY, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_clients_send_the_token_and_say_which_one_is_asked_for(make_front, triton):
    """A request, a communicator and a fleet, with the right token and with others."""
    front = make_front(TOKEN)
    address = front.address
    assert Peer(*address, TOKEN).status("/v2", patience(20)) == 200
    assert Peer(*address).status("/v2", patience(20)) == 401
    request = InferRequest("critic_infer", {"x": np.zeros(1)})
    with pytest.raises(ServerRequestError, match="asks for a token"):
        Exchange(Peer(*address)).run(request, patience(20))
    for token, words in ((None, "this job has none"), ("x" * 16, "another one")):
        expected = f"{words}.*NEMO_ALIGNER_TOKEN, or remote_critic_rm.token_file"
        with HTTPCommunicator(token=token) as communicator:
            with pytest.raises(ServerMismatchError, match=expected):
                communicator.add_server_by_name("critic_infer", *address)
        spec = RewardModelSpec(None, "critic_infer", (address,), 1.0, "remote_rm.reward_model")
        fleet = Fleet(spec, reward_model_endpoint(), 60.0, 60.0, token=token)
        with contextlib.closing(fleet):
            with pytest.raises(ServerMismatchError, match=f"{words}.*remote_rm.token_file"):
                while not fleet.wait_until_ready(1.0):
                    pass
    with HTTPCommunicator(token=TOKEN) as communicator:
        communicator.add_server_by_name("critic_infer", *address)


def test_a_client_warns_of_a_server_without_a_token(front, warnings):
    with HTTPCommunicator(token=TOKEN) as communicator:
        communicator.add_server_by_name("critic_infer", *front.address)
    assert len(warnings) == 1 and "without the token" in warnings[0], warnings


# ---- the lease ----

A, B = "a" * 32, "b" * 32


def lease(front, method, holder):
    return ask(front, method, exchange.LEASE_PATH, NeMo_Aligner_Lease=holder)[0]


def save(front, holder=None):
    headers = {} if holder is None else {"NeMo_Aligner_Lease": holder}
    status, _headers, reply = ask(front, "POST", SAVE, SAVE_BODY, **headers)
    return status, json.loads(reply).get("error", "")


def test_only_the_holder_of_the_lease_changes_the_server(front, triton):
    for holder in (None, A):  # nobody holds it yet
        status, error = save(front, holder)
        assert status == 403 and "critic_save is for the actor that holds the lease" in error
    assert "trainer.ppo.require_lease=False" in save(front)[1]
    assert lease(front, "POST", A) == 200
    assert lease(front, "POST", B) == 409
    assert save(front, B)[0] == save(front)[0] == 403
    assert not triton.seen and not triton.handled
    assert save(front, A) == (200, "")
    assert ask(front, "POST", INFER, INFER_BODY)[0] == 200  # scoring changes nothing
    assert lease(front, "DELETE", B) == 200 and save(front, A)[0] == 200  # not B's to give
    assert lease(front, "DELETE", A) == 200 and save(front, A)[0] == 403
    assert lease(front, "POST", B) == 200 and save(front, B)[0] == 200


def test_a_silent_holder_loses_the_lease_to_the_next_one_only(front, monkeypatch):
    assert lease(front, "POST", A) == 200
    monkeypatch.setattr(connection_module, "LEASE_S", 0.0)
    monkeypatch.setattr(admission, "LEASE_S", 0.0)
    assert save(front, A)[0] == 200  # nobody else has asked
    # The reply is there a moment before the request is no longer worked on.
    wait_until(lambda: lease(front, "POST", B) == 200, 5)
    assert save(front, A)[0] == 403 and "Restart this actor" in save(front, A)[1]


def test_a_holder_whose_request_is_worked_on_keeps_the_lease(front, monkeypatch):
    monkeypatch.setattr(connection_module, "LEASE_S", 0.0)
    monkeypatch.setattr(admission, "LEASE_S", 0.0)
    assert lease(front, "POST", A) == 200
    with front.admission.leases.working_for(A):
        assert lease(front, "POST", B) == 409
    assert lease(front, "POST", B) == 200


def test_clients_without_a_lease_where_they_are_welcome(make_front, triton):
    front = make_front(None, False)
    assert save(front)[0] == 200
    assert lease(front, "POST", A) == 200
    assert save(front)[0] == save(front, B)[0] == 403
    assert save(front, A)[0] == 200


def test_a_lease_whose_first_request_is_lost_is_asked_for_again(front, monkeypatch):
    lost, ask_for_it = [], Peer.ask

    def flaky(peer, *rest):
        if lost:
            return ask_for_it(peer, *rest)
        lost.append(peer)
        raise ConnectionRefusedError

    monkeypatch.setattr(Peer, "ask", flaky)
    with contextlib.closing(Lease(Peer(*front.address))) as held:
        assert lost and save(front, held.id)[0] == 200


def test_a_client_takes_renews_and_gives_back_its_lease(front, monkeypatch):
    monkeypatch.setattr(connection_module, "RENEWAL_S", 0.05)
    monkeypatch.setattr(connection_module, "LEASE_S", 3.0)
    monkeypatch.setattr(admission, "LEASE_S", 3.0)
    with contextlib.closing(Lease(Peer(*front.address))) as first:
        time.sleep(3.5)
        assert save(front, first.id)[0] == 200
        with pytest.raises(LeaseTakenError, match="another actor holds the lease"):
            Lease(Peer(*front.address))
    with contextlib.closing(Lease(Peer(*front.address))) as second:
        assert save(front, second.id)[0] == 200
    assert lease(front, "POST", A) == 200
