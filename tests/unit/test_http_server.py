# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a front: encryption, time limits, errors; and no Triton (test_front.py)."""

import contextlib
import http.client
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.config import server_rules
from nemo_aligner.config.access import client_tls, server_tls
from nemo_aligner.config.server_rules import read_frontend
from nemo_aligner.core.errors import ConfigError, ServerEndingError, ServerRequestError
from nemo_aligner.servers import http_server
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.exchange import Exchange, InferRequest, Peer, token_header
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import RequestError, critic_save_endpoint, reward_model_endpoint
from nemo_aligner.servers.served_model import ServerMismatchError
from tests.certificates import make_certificate
from tests.patience import patience
from tests.scripted_triton import ask, open_front

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

TOKEN = "0123456789abcdef"
REWARD = reward_model_endpoint()
SCORING = {"tokens": np.arange(6).reshape(2, 3), "sequence_lengths": np.full((2, 1), 3)}

INT = {"datatype": "INT64", "data": [1]}
TENSORS = [{"name": n, "shape": [1, 1], **INT} for n in ("tokens", "sequence_lengths")]


def score(tokens, sequence_lengths, **_others):
    return {"rewards": tokens.sum(1, dtype=np.float32, keepdims=True)}


def send(front, tls=None, token=None):
    """The rewards that a client gets."""
    with HTTPCommunicator(patience(20), patience(20), token=token, tls=tls) as communicator:
        communicator.add_server_by_name("reward_model", *front.address, REWARD)
        return communicator.send_data_to_server("reward_model", SCORING).result()["rewards"]


# ---- encryption ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(certificate, key) of a server, and of another one."""
    folder = tmp_path_factory.mktemp("tls")
    return make_certificate(folder), make_certificate(folder, "other")


@pytest.fixture
def encrypted(certificates):
    access = Access(TOKEN)
    front = open_front([(REWARD, score)], access, tls=server_tls(*certificates[0]))
    with contextlib.closing(front):
        yield front


def test_a_client_with_the_certificate_and_the_token_is_served(encrypted, certificates):
    trusting = client_tls(certificates[0][0], "remote_rm")
    assert send(encrypted, trusting, TOKEN).tolist() == [[3.0], [12.0]]


def test_what_is_wrong_with_a_server_is_said_at_once_in_one_line(encrypted, certificates):
    """Long before the time limit."""
    own, other = (client_tls(certificate, "remote_rm") for certificate, _ in certificates)
    with contextlib.closing(open_front([(REWARD, score)], Access())) as plain:
        for front, tls, token, words in (
            (encrypted, own, None, "asks for a token"),
            (encrypted, other, TOKEN, "not one of tls_ca_file: self"),
            (encrypted, None, None, "it encrypts, but tls_ca_file is not set"),
            (plain, own, None, "tls_ca_file is set, but it does not encrypt"),
        ):
            with HTTPCommunicator(600.0, token=token, tls=tls) as communicator:
                with pytest.raises(ServerMismatchError, match=words) as caught:
                    communicator.add_server_by_name("reward_model", *front.address, REWARD)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values, words",
    [
        (("trition", None, None), "'trition' must be one of triton, asgi"),
        (("triton", "/none", "/none"), "/none cannot be used: .*No such file"),
        (("asgi", "c", None), "tls_key=None belong together"),
        (("asgi", "/none", "/none"), "/none cannot be used: .*No such file"),
    ],
)
def test_values_that_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        read_frontend(*values)


def test_files_that_are_refused(certificates, tmp_path):
    (certificate, key), (_, other) = certificates
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        server_tls(certificate, other)
    with pytest.raises(ConfigError, match="remote_rm.tls_ca_file=.*cannot be used"):
        client_tls(str(tmp_path / "none"), "remote_rm")
    readable = tmp_path / "readable.key"
    readable.write_bytes(Path(key).read_bytes())
    readable.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        server_tls(certificate, str(readable))
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out"]
    subprocess.run([*command, str(locked)], check=True)
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match="without a password"):
        server_tls(certificate, str(locked))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(server_rules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pytriton, which is not installed: pip install"):
        read_frontend("triton", None, None)


# ---- without Triton ----

PAIR = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pytriton", "tritonclient"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import nemo_aligner.algorithms.critic_server_trainer
import nemo_aligner.algorithms.reward_server
import nemo_aligner.servers.critic_client
from tests.unit.test_http_server import *

with contextlib.closing(open_front([(REWARD, score)], Access())) as front:
    print(send(front).tolist())
found = {name.split(".")[0] for name in sys.modules}
print(sorted(found & {"pytriton", "tritonclient", "uvicorn"}))
"""


@pytest.mark.full
def test_a_pair_runs_where_nothing_of_triton_is_installed():
    command, folder = [sys.executable, "-W", "ignore", "-c", PAIR], Path(__file__).parents[2]
    options = {"capture_output": True, "text": True, "timeout": patience(100)}
    result = subprocess.run(command, cwd=folder, **options)
    lines = result.stdout.splitlines()
    assert lines[-1:] == ["['uvicorn']"] and "[[3.0], [12.0]]" in lines, result.stderr[-2000:]


# ---- the life of the host ----


@pytest.mark.parametrize(
    "error, status, line, logged",
    [
        (RequestError("send\nless"), 400, "send less", "refuses a request: send less"),
        (ServerEndingError("the job\nends"), 503, "ServerEndingError: the job ends (", None),
        (ServerRequestError("rank 1: why"), 500, "rank 1: why", None),
        (KeyError("x"), 500, "KeyError: 'x' (test_http_server.py:", "Traceback (most recent"),
    ],
)
def test_a_request_gets_its_own_error_in_one_line(error, status, line, logged, monkeypatch):
    """The log has the traceback, where nobody has logged it before."""

    def fail(**_arrays):
        raise error

    notes = []
    for level in ("warning", "error"):
        monkeypatch.setattr(http_server.logging, level, notes.append)
    with contextlib.closing(open_front([(REWARD, fail)], Access())) as front:
        body = json.dumps({"inputs": TENSORS}).encode()
        got, _, reply = ask(front.address, "POST", "/v2/models/reward_model/infer", body)
    reply = json.loads(reply)["error"]
    assert got == status and reply.startswith(line) and "\n" not in reply
    assert [logged in note for note in notes] == ([True] if logged else [])


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_S", 0.3)
    save = critic_save_endpoint()
    with contextlib.closing(open_front([(save, score)], Access(lease_required=False))) as front:
        connection = http.client.HTTPConnection(*front.address, timeout=patience(20))
        with contextlib.closing(connection):
            connection.putrequest("POST", "/v2/models/critic_save/infer")
            connection.putheader("Content-Length", "100")
            connection.endheaders(b"{}")
            reply = connection.getresponse()
            assert reply.status == 408 and b"nothing came" in reply.read()
            assert connection.sock.recv(1) == b""  # closed, as the rest may still come


@pytest.mark.parametrize("token, is_kept", [(TOKEN, True), ("another", False)])
def test_who_has_no_token_keeps_no_connection(token, is_kept, monkeypatch):
    """Also with half a request after the refused one."""
    monkeypatch.setattr(http_server, "FIRST_REQUEST_S", 0.5)
    with contextlib.closing(open_front([(REWARD, score)], Access(TOKEN))) as front:
        connection = http.client.HTTPConnection(*front.address, timeout=2.0)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/health/live", headers=token_header(token))
            connection.getresponse().read()
            connection.sock.sendall(b"GET /v2")
            if is_kept:
                with pytest.raises(TimeoutError):
                    connection.sock.recv(1)
            else:
                assert connection.sock.recv(1) == b""


def test_a_front_that_has_ended_is_a_failure():
    front = open_front([(REWARD, score)], Access(TOKEN))
    assert front.failure() is None
    request = InferRequest("reward_model", SCORING)
    assert Exchange(Peer(*front.address, TOKEN)).run(request, patience(20))
    for _ in range(2):
        front.close()
    assert front.failure() == "uvicorn ended by itself"
