# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a stranger can reach of a server that runs, behind each front: its port, its processes, its
files.
"""

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.server_rules import FRONTENDS
from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers import connection
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.servers.exchange import Exchange, InferRequest, Peer, token_header
from tests import processes, scripted_triton
from tests.functional.critic_job import NAP, CriticJob
from tests.patience import patience

pytestmark = pytest.mark.timeout(300)

# What Triton runs when it loads the model of a stranger.
HOSTILE = """
open({marker!r}, "w").write("here")
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
TOKENS = {"name": "tokens", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
LENGTHS = {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [2]}
INFER = {"inputs": [TOKENS, LENGTHS]}


TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module", params=FRONTENDS)
def job(request, tmp_path_factory):
    """A server that asks for a token."""
    token_file = tmp_path_factory.mktemp("secret") / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    section = {"frontend": request.param}
    with CriticJob(token_file=str(token_file), require_lease=True, server=section) as job:
        job.token_file, job.frontend = str(token_file), request.param
        yield job.wait_until_serving()
        job.signal_rank(0)
        job.must_exit_with(0)


@pytest.fixture
def triton_job(job):
    """The server behind which is Triton."""
    if job.frontend != "triton":
        pytest.skip("there is no Triton")
    return job


def ask(port, method, path, body=None, headers=None, limit_s=20, token=TOKEN):
    """HTTP status and body of the reply; (0, b"") without a reply that is HTTP."""
    headers = {**(headers or {}), **token_header(token)}
    try:
        return scripted_triton.ask(("127.0.0.1", port), method, path, body, headers, limit_s)[::2]
    except TimeoutError:
        return 0, b""


def assert_serving(job):
    status, body = ask(job.port, "POST", "/v2/models/critic_infer/infer", json.dumps(INFER))
    assert status == 200, body


def family(job):
    return processes.family(job.rank_pids()[0])


def listening_ports(job):
    """Ports on which any process of the job takes connections, by address."""
    connections = [each for process in family(job) for each in process.net_connections("tcp")]
    listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
    return {(each.laddr.ip, each.laddr.port) for each in listening}


def http_ports(job):
    """The ports of `listening_ports` behind which is an HTTP server; others belong to gloo."""
    others = [port for _address, port in listening_ports(job) if port != job.port]
    replies = lambda port: ask(port, "GET", "/v2/health/live", limit_s=2, token=None)
    with ThreadPoolExecutor(len(others)) as pool:
        live = zip(others, pool.map(replies, others))
        return [job.port, *(port for port, (status, _) in live if status)]


def test_another_user_cannot_have_triton_run_python(job, tmp_path):
    """Neither with what every user can read of the processes nor with the token, on every port of
    the job.
    """
    lines = [" ".join(process.cmdline()) for process in family(job)]
    assert any("tritonserver" in line for line in lines) == (job.frontend == "triton")
    assert not any(TOKEN in line for line in lines)
    secrets = set(re.findall(r"[\w-]+=([\w-]{16,})", " ".join(lines)))
    marker = tmp_path / "marker"
    config = {"backend": "python", "max_batch_size": 0, "input": [], "output": []}
    config["output"] = [{"name": "x", "data_type": "TYPE_INT64", "dims": [1]}]
    hostile = HOSTILE.format(marker=str(marker)).encode()
    files = {"file:1/model.py": base64.b64encode(hostile).decode()}
    load = json.dumps({"parameters": {"config": json.dumps(config), **files}})
    for port in http_ports(job):
        for headers in [{}, *({"triton-access-token": secret} for secret in secrets)]:
            for path, body in (
                ("/v2/repository/models/evil/load", load),
                ("/v2/repository/models/critic_infer/unload", "{}"),
                ("/v2/repository/index", "{}"),
                ("/v2/logging", "{}"),
                ("/v2/trace/setting", "{}"),
                ("/v2/systemsharedmemory/region/r/register", '{"key": "/x", "byte_size": 1}'),
            ):
                status, reply = ask(port, "POST", path, body, headers)
                assert status != 200, (path, headers, reply)
    assert not marker.exists()
    assert_serving(job)


def test_the_job_listens_on_loopback_alone(job):
    assert {address for address, _port in listening_ports(job)} == {"127.0.0.1"}


def test_requests_without_the_token_are_refused(job):
    infer = ("POST", "/v2/models/critic_infer/infer", json.dumps(INFER))
    for token in (None, TOKEN[:-1], TOKEN + "0"):
        status, reply = ask(job.port, *infer, token=token)
        assert status == 401 and TOKEN.encode() not in reply
    assert_serving(job)


def test_triton_has_no_port_and_its_files_belong_to_this_user_alone(triton_job):
    job = triton_job
    assert ("127.0.0.1", job.port) in listening_ports(job)
    (triton,) = (p for p in family(job) if p.name() == "tritonserver")
    assert not [c for c in triton.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (directory,) = (job.directory / "t").glob("triton_*")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    job.look_around()
    assert job._shared_memory
    for path in job._shared_memory:
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0, path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_socket(triton_job):
    job = triton_job
    (directory,) = (job.directory / "t").glob("triton_*")
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(str(directory / "http"))
    # The interpreter may lie where the other user cannot go: it imports before the change.
    code = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""
    command = [sys.executable, "-c", code, str(directory / "http")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patience(30))
    assert "PermissionError" in result.stderr, result.stderr


def test_a_client_keeps_its_connection(job):
    """As NeMo-Aligner's clients do."""
    body, headers = json.dumps(INFER), token_header(TOKEN)
    connection = http.client.HTTPConnection("127.0.0.1", job.port, timeout=patience(20))
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("GET", "/v2/models/critic_infer/versions/1/ready", headers=headers)
            reply = connection.getresponse()
            assert (reply.status, reply.read()) == (200, b"")
            connection.request("POST", "/v2/models/critic_infer/infer", body, headers)
            reply = connection.getresponse()
            outputs = {out["name"]: out["data"] for out in json.loads(reply.read())["outputs"]}
            assert reply.status == 200 and np.isfinite(outputs["values"]).all()
        assert connection.sock is not None


# ---- limits ----


def held(job):
    """Bytes of shared memory of the job, and of memory of its processes."""
    job.look_around()
    shared = sum(os.stat(path).st_size for path in job._shared_memory if os.path.exists(path))
    return shared, sum(process.memory_info().rss for process in family(job))


def infer_request(rows, token=1):
    tokens = np.full((rows, 8), token)
    lengths = np.full((rows, 1), 8)
    return InferRequest("critic_infer", {"tokens": tokens, "sequence_lengths": lengths})


def send(job, request, limit_s=60):
    return Exchange(Peer("127.0.0.1", job.port, TOKEN)).run(request, patience(limit_s))


@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_refused_request_costs_no_memory(job, token):
    assert_serving(job)
    shared, memory = held(job)
    for path in ("critic_infer", "critic_train"):
        sent = {"Inference-Header-Content-Length": "2"}
        body = b"{}" + bytes(200 * 10**6)
        status, reply = ask(
            job.port, "POST", f"/v2/models/{path}/infer", body, sent, token=token, limit_s=60
        )
        assert status == (413 if token else 401) and (not token or b"67108864" in reply)
    now_shared, now_memory = held(job)
    assert now_shared == shared and now_memory - memory < 50e6
    assert_serving(job)


def test_a_request_of_too_many_samples_is_refused_at_once(job):
    before = time.monotonic()
    with pytest.raises(ServerRequestError, match="must be <= 512"):
        send(job, infer_request(20_000))
    assert time.monotonic() - before < patience(5)
    assert_serving(job)


def actor(job):
    """The client of an actor."""
    section = {"critic": {"ip": "127.0.0.1", "port": job.port}, "init_timeout_s": patience(20)}
    section |= {"token_file": job.token_file, "combine_rm_and_critic_server": True}
    return RemoteGPTRMCriticClient(OmegaConf.create(section))


def test_others_have_their_turn_while_many_samples_are_scored(job):
    """Six requests of which each takes a second, and the client makes one; a second client need
    not wait for all.
    """
    client = actor(job)
    tokens = torch.ones(6 * 512, 8, dtype=torch.int64)
    tokens[::512] = NAP
    lengths = torch.full((6 * 512,), 8)
    began = time.monotonic()
    many = client.infer_rm_critic({"response_tokens": tokens, "response_lengths": lengths})
    time.sleep(0.5)
    send(job, infer_request(1))
    waited = time.monotonic() - began
    rewards, values = many.result()
    assert len(rewards) == len(values) == 6 * 512
    assert time.monotonic() - began - waited > 1.0
    client.close()


# ---- the lease ----


def train_request(request_id=b"update", returns=1.0):
    numbers = {name: np.ones((2, 4), np.float32) for name in ("prev_values", "mask")}
    numbers["returns"] = np.full((2, 4), returns, np.float32)
    tokens = {"tokens": np.ones((2, 5), np.int64), "request_id": np.array([request_id])}
    return InferRequest("critic_train", {**tokens, **numbers})


STEP = {"dummy_var": np.zeros(1, np.int64), "actor_step": np.array([99])}
SAVE = InferRequest("critic_save", STEP)


def test_strangers_neither_train_nor_save(job, monkeypatch):
    """They have the token, and no lease; not before the actor comes, beside it, or after it."""
    # A second actor waits less for the first to end.
    monkeypatch.setattr(connection, "LEASE_S", 0.0)
    checkpoint = job.directory / "checkpoint.json"

    def refused():
        for request in (SAVE, train_request()):
            with pytest.raises(ServerRequestError, match="for the actor that holds the lease"):
                send(job, request)
        return True

    assert refused() and not checkpoint.exists()
    client = actor(job)
    assert refused()
    assert client.save(actor_step=7).result() == 0
    with pytest.raises(ServerRequestError, match="another actor holds the lease"):
        actor(job)
    assert refused()
    client.close()
    assert refused()
    assert json.loads(checkpoint.read_text())["actor_step"] == 7
    client = actor(job)  # the next one need not wait
    assert client.status()["actor_step"] == 7
    mine = {"NeMo-Aligner-Lease": client.communicator.connections["critic_train"]._lease.id}
    holder = Exchange(Peer("127.0.0.1", job.port, TOKEN), mine)
    for request, words in (
        (train_request(b"x" * 10**6), "65536|64 ASCII"),
        (train_request(returns=1e18), "'returns' is 9.99.*e\\+17"),
    ):
        with pytest.raises(ServerRequestError, match=words):
            holder.run(request, patience(30))
    assert client.status()["critic_step"] == 0
    client.close()
