# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a stranger can reach of a server that runs: its port, its processes, its files."""

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
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from nemo_aligner.servers.exchange import token_header
from tests.functional.critic_job import CriticJob
from tests.patience import patience

pytestmark = pytest.mark.timeout(300)

# What Triton runs when it loads the model of a stranger.
HOSTILE = """
open({marker!r}, "w").write("here")
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
DEEP = b"[" * 500_000
INFER = {
    "inputs": [
        {"name": "tokens", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]},
        {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [2]},
    ]
}


TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A server that asks for a token."""
    token_file = tmp_path_factory.mktemp("secret") / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    with CriticJob(token_file=str(token_file)) as job:
        yield job.wait_until_serving()
        job.signal_rank(0)
        job.must_exit_with(0)
        job.assert_nothing_left()


def ask(port, method, path, body=None, headers=None, limit_s=20, token=TOKEN):
    """HTTP status and body of the reply; (0, b"") without a reply that is HTTP."""
    headers = {**(headers or {}), **token_header(token)}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(limit_s))
    with contextlib.closing(connection):
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            return 0, b""


def assert_serving(job):
    status, body = ask(job.port, "POST", "/v2/models/critic_infer/infer", json.dumps(INFER))
    assert status == 200, body


def family(job):
    root = psutil.Process(job.rank_pids()[0])
    return [root, *root.children(recursive=True)]


def listening_ports(job):
    """Ports on which any process of the job takes connections, by address."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in family(job)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def http_ports(job):
    """The ports of `listening_ports` behind which is an HTTP server; others belong to gloo."""
    ports = [port for _address, port in listening_ports(job)]
    with ThreadPoolExecutor(len(ports)) as pool:
        live = pool.map(lambda port: ask(port, "GET", "/v2/health/live", limit_s=5)[0], ports)
        return [port for port, status in zip(ports, live) if status]


def test_another_user_cannot_have_triton_run_python(job, tmp_path):
    """Neither with what every user can read of the processes nor with the token, on every port of
    the job.
    """
    lines = [" ".join(process.cmdline()) for process in family(job)]
    assert any("tritonserver" in line for line in lines)
    assert not any(TOKEN in line for line in lines)
    secrets = set(re.findall(r"[\w-]+=([\w-]{16,})", " ".join(lines)))
    marker = tmp_path / "marker"
    config = {"backend": "python", "max_batch_size": 0, "input": [], "output": []}
    config["output"] = [{"name": "x", "data_type": "TYPE_INT64", "dims": [1]}]
    hostile = HOSTILE.format(marker=str(marker)).encode()
    files = {"file:1/model.py": base64.b64encode(hostile).decode()}
    load = json.dumps({"parameters": {"config": json.dumps(config), **files}})
    ports = http_ports(job)
    assert job.port in ports
    for port in ports:
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


def test_triton_has_no_port_and_its_files_belong_to_this_user_alone(job):
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
def test_another_user_cannot_open_the_socket(job):
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
    result = subprocess.run(
        [sys.executable, "-c", code, str(directory / "http")],
        capture_output=True,
        text=True,
        timeout=patience(30),
    )
    assert "PermissionError" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "method, path, body, headers, status",
    [
        ("GET", "/v2/models/stats", None, {}, 404),
        ("GET", "/metrics", None, {}, 404),
        ("GET", "/v2/models/critic_infer/../../repository/index", None, {}, 404),
        ("GET", "/v2/models/critic_infer/infer", None, {}, 405),
        ("POST", "/v2/models/critic_infer/config", "{}", {}, 405),
        ("POST", "/v2/models/critic_infer/generate", "{}", {}, 404),
        ("DELETE", "/v2/models/critic_infer", None, {}, 501),
        ("POST", "/v2/models/critic_infer/infer", DEEP, {}, 400),
        ("POST", "/v2/models/critic_infer/infer", b"[1]", {}, 400),
        ("POST", "/v2/models/critic_infer/infer", b"x", {"Content-Encoding": "gzip"}, 411),
        ("POST", "/v2/models/critic_infer/infer", b"x", {"Content-Length": "-1"}, 400),
        ("POST", "/v2/models/critic_infer/infer", iter([b"{}"] * 3), {}, 411),
        (
            "POST",
            "/v2/models/critic_infer/infer",
            b"{}",
            {"Inference-Header-Content-Length": "9"},
            413,
        ),
    ],
)
def test_requests_that_never_reach_triton(job, method, path, body, headers, status):
    assert ask(job.port, method, path, body, headers)[0] == status
    assert_serving(job)


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
