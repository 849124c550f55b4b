# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a fleet spreads requests, and failures at moments that a real server cannot be made to fail
at.

The servers here are sockets that follow a script: they close after half a reply, say nothing, or
end while they read. Real servers that are killed are in tests/functional/test_fleet.py.
"""

import contextlib
import dataclasses
import json
import re
import threading
import time

import numpy as np
import pytest

from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import ServerJobError, ServerRequestError, cause_in
from nemo_aligner.servers import exchange, fleet, futures, schema
from nemo_aligner.servers.fleet import ServerUnreachableError
from nemo_aligner.servers.scoring_clients import send_to_fleets
from nemo_aligner.servers.served_model import ServerMismatchError
from nemo_aligner.servers.server_loop import OperationFailedError, ServerStoppingError
from tests.cases import says, some_of
from tests.patience import patience, wait_until
from tests.scripted_server import (
    ScriptedServer,
    answer,
    closed_port,
    failure,
    http,
    slowly,
    triton_config,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]
HANG_S = 100.0  # longer than anything here takes


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Failures are noticed in tenths of seconds."""
    times = {"PROBE_INTERVAL_S": 0.2, "RETRY_INTERVAL_S": 0.1, "PROBE_TIMEOUT_S": patience(0.5)}
    times |= {"FIRST_PAUSE_S": 0.05, "LONGEST_PAUSE_S": 0.2, "PROGRESS_INTERVAL_S": 0.2}
    for name, value in times.items():
        monkeypatch.setattr(fleet, name, value)


def sample(value):
    lengths = np.full((1, 1), 3, np.int64)
    return {"tokens": np.full((1, 3), value, np.int64), "sequence_lengths": lengths}


class Running:
    """A fleet over scripted servers, with requests whose reward is their first token."""

    def __init__(self, *servers, init_timeout_s=HANG_S, inference_timeout_s=2 * HANG_S, first=0):
        ports = [server if isinstance(server, int) else server.port for server in servers]
        addresses = tuple(("127.0.0.1", port) for port in ports)
        spec = RewardModelSpec(None, "reward_model", addresses, 1.0, "remote_rm.reward_model")
        self.fleet = fleet.Fleet(
            spec, schema.reward_model_endpoint(), init_timeout_s, inference_timeout_s, first
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.fleet.close()

    def rewards(self, futures):
        return [float(future.result(HANG_S)["rewards"][0, 0]) for future in futures]

    def ready(self):
        assert self.fleet.wait_until_ready(HANG_S)
        return self

    def send(self, value):
        return self.fleet.submit(sample(value))

    def ask(self, *values):
        """The rewards of requests that are sent one after another."""
        return [self.rewards([self.send(value)])[0] for value in values]

    def wait_for(self, condition):
        wait_until(condition, 30)


@contextlib.contextmanager
def fleet_of(*scripts, **options):
    """A fleet that runs, and its servers, each with its script; None replies to all."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(script)) for script in scripts]
        yield stack.enter_context(Running(*servers, **options)), *servers


def silent(*_):
    return None


def test_requests_are_spread_and_answers_are_in_their_places():
    all_are_sent = threading.Event()

    def wait_for_all(index, rewards):
        all_are_sent.wait(HANG_S)
        return answer(rewards)

    with fleet_of(*[wait_for_all] * 3) as (running, *servers):
        futures = [running.ready().send(value) for value in range(30)]
        all_are_sent.set()
        assert running.rewards(futures) == list(range(30))
    assert [server.requests for server in servers] == [10, 10, 10]


def test_the_server_with_fewer_requests_in_flight_is_preferred():
    others_are_answered = threading.Event()

    def very_slowly(index, rewards):
        others_are_answered.wait(HANG_S)
        return answer(rewards)

    with fleet_of(very_slowly, None) as (running, slow, quick):
        running.ready()
        futures = [running.send(0)]
        for value in range(1, 9):
            futures.append(running.send(value))
            futures[-1].result(HANG_S)
        others_are_answered.set()
        assert futures[0].result(HANG_S)["rewards"] == [[0.0]]
        assert slow.requests == 1 and quick.requests == 8


def test_one_client_after_another_begins_at_another_server():
    with fleet_of(None, None, first=1) as (running, a, b):
        running.ready().ask(1)
        assert (a.requests, b.requests) == (0, 1)


def test_a_server_gets_no_more_than_its_share_at_once(monkeypatch):
    monkeypatch.setattr(fleet, "MAX_IN_FLIGHT", 4)
    with fleet_of(slowly) as (running, server):
        futures = [running.ready().send(value) for value in range(12)]
        assert running.rewards(futures) == list(range(12))
        assert server.at_once <= 4


HALF = answer([[7.0]])[:-9]


@pytest.mark.parametrize(
    "script, words",
    [
        (lambda index, rewards: b"", "RemoteDisconnected"),
        (lambda index, rewards: HALF, "IncompleteRead"),
        (lambda index, rewards: HALF[:20], "cut short within its headers"),
        (failure("ServerStoppingError: toy is shutting down"), "shutting down"),
        (failure("... ServerJobError: toy failed: a rank is lost"), "a rank is lost"),
        (failure("Request for unknown model: 'reward_model' is not found", 400), "unknown model"),
        (failure("unavailable", 503), "unavailable"),
    ],
)
def test_a_request_goes_elsewhere_when_a_server_ends(script, words, lines):
    def first_time(index, rewards):
        return script(index, rewards) if index == 0 else answer(rewards)

    with fleet_of(first_time, None) as (running, bad, good):
        assert running.ready().ask(5) == [5.0]
        assert (bad.requests, good.requests) == (1, 1)
        assert re.search(f"127.0.0.1:{bad.port} is left out .*({words})", "\n".join(lines))
        # It answers probes: it gets another chance.
        running.wait_for(lambda: running.fleet.servers[0].available)
        assert running.ask(*range(6)) == list(range(6))
        assert bad.requests > 1


@pytest.mark.parametrize(
    "script, words",
    [
        (failure("Traceback ...\nArithmeticError: no, no"), "ArithmeticError: no, no"),
        (failure("unexpected inference input 'tokns'", 400), "unexpected inference input"),
        (lambda index, rewards: answer([[1.0], [2.0]]), r"'rewards' .* \[2, 1\] for 1 sample"),
        (lambda index, rewards: answer([[float("nan")]]), "'rewards' is nan in sample 0"),
        (lambda index, rewards: http({"outputs": []}, 200), "no tensor 'rewards'"),
        (lambda index, rewards: http({"outputs": [{"name": "rewards"}]}, 200), "cannot be read"),
        (lambda *_: b"HTTP/1.1 500 X\r\nContent-Length: 3\r\n\r\n<b>", "HTTP 500: <b>"),
        (lambda *_: b"HTTP/1.1 502 X\r\nContent-Length: 0\r\n\r\n", "empty body"),
    ],
)
def test_an_error_of_the_model_is_raised_at_once_and_not_sent_again(script, words):
    with fleet_of(script, script) as (running, a, b):
        with pytest.raises(ServerRequestError, match=words) as caught:
            running.ready().ask(1)
        assert f"127.0.0.1:{a.port}" in str(caught.value)
        assert (a.requests, b.requests) == (1, 0)
        assert running.fleet.servers[0].available


def test_a_request_that_ends_every_server_is_given_up():
    with fleet_of(lambda *_: b"", lambda *_: b"") as (running, a, b):
        with pytest.raises(ServerRequestError, match="5 times a server ended .* 1 sample.*memory"):
            running.ready().ask(1)
        assert a.requests + b.requests == 5


@some_of("how", ["restarted", "continued"])
def test_a_hanging_model_is_given_up_until_it_gives_a_score_or_is_restarted(lines, how):
    hang, limit_s = threading.Event(), patience(0.5)
    hang.set()

    def script(index, rewards):
        return None if hang.is_set() else answer(rewards)

    with fleet_of(script, None, inference_timeout_s=limit_s) as (running, a, b):
        server = running.ready().fleet.servers[0]
        assert running.ask(3) == [3.0]
        running.wait_for(lambda: a.requests > 3)  # it is asked again and again, one at a time
        assert not server.available and b.requests == 1
        said = f"no reply within {limit_s:.0f} s, although it replies to probes"
        assert said in "\n".join(lines)
        if how == "continued":
            hang.clear()
        else:
            a.ready, probes = 503, a.probes  # it is down for a moment
            running.wait_for(lambda: a.probes > probes + 1)
            a.ready = 200
        running.wait_for(lambda: server.available)
        hang.clear()
        taken, had = a.requests, b.requests
        assert running.ask(*range(6)) == list(range(6))
        assert a.requests > taken and b.requests > had
        assert len([line for line in lines if line.startswith("back: ")]) == 1


@pytest.mark.parametrize("count, words", [(1, "remote_rm.inf"), (2, "inf.* 1 sample.*hangs")])
def test_a_hanging_model_is_not_asked_with_the_request_that_it_may_hang_on(count, words):
    with fleet_of(*[silent] * count, inference_timeout_s=patience(0.4)) as (running, *servers):
        with pytest.raises(ServerRequestError, match=words.replace("inf", "inference_timeout_s")):
            running.ready().ask(3)
        probes = servers[0].probes
        running.wait_for(lambda: servers[0].probes > probes + 3)
        assert [server.requests for server in servers] == [1] * count


def test_requests_in_flight_leave_a_server_that_has_fallen_silent():
    with fleet_of(silent, None) as (running, a, _):
        future = running.ready().send(4)
        running.wait_for(lambda: a.requests == 1)
        assert not future.done()
        a.ready = None
        assert running.rewards([future]) == [4.0]  # long before inference_timeout_s
        thread = f"request to 127.0.0.1:{a.port}"
        running.wait_for(lambda: thread not in [each.name for each in threading.enumerate()])


def test_a_server_that_says_not_ready_finishes_what_it_has():
    go_on = threading.Event()

    def script(index, rewards):
        go_on.wait(HANG_S)
        return answer(rewards)

    with fleet_of(script, None) as (running, a, b):
        future = running.ready().send(4)
        running.wait_for(lambda: a.requests == 1)
        a.ready = 400
        running.wait_for(lambda: not running.fleet.servers[0].available)
        assert running.ask(*range(5)) == list(range(5))  # nothing is sent to it
        go_on.set()
        assert running.rewards([future]) == [4.0]
        assert (a.requests, b.requests) == (1, 5)
        a.ready = 200
        running.wait_for(lambda: running.fleet.servers[0].available)
        assert running.ask(0, 1) == [0.0, 1.0]
        assert a.requests == 2


def test_while_no_server_answers_requests_wait_visibly_then_fail(lines):
    server = ScriptedServer()
    with Running(server, init_timeout_s=1.0) as running:
        running.ready().ask(1)
        server.stop()
        start = time.monotonic()
        said = f"no server has replied for 1 s.*127.0.0.1:{server.port}"
        for future in [running.send(value) for value in range(3)]:
            with pytest.raises(ServerRequestError, match=said):
                future.result(HANG_S)
        assert time.monotonic() - start > 0.9
    assert any("waiting for server reward_model" in line and "of 1 s" in line for line in lines)


def test_start_without_any_server_is_one_error_that_names_all(lines):
    ports = closed_port(), closed_port()
    words = *map(str, ports), "no reply", "remote_rm.reward_model ", "remote_rm.init_timeout_s"
    with Running(*ports, init_timeout_s=patience(0.6)) as running:
        with says(ServerUnreachableError, *words):
            running.fleet.wait_until_ready(HANG_S)
    assert any("waiting for server reward_model" in line and "0 of" in line for line in lines)


def test_start_waits_for_the_others_but_not_for_ever(monkeypatch, lines):
    monkeypatch.setattr(fleet, "START_GRACE_S", patience(0.5))
    with ScriptedServer() as a, ScriptedServer(ready=400) as late, Running(a, late) as running:
        assert not running.fleet.wait_until_ready(0.2)
        assert running.fleet.wait_until_ready(HANG_S)
        (warning,) = [line for line in lines if "continuing with 1 of 2" in line]
        assert f"127.0.0.1:{late.port}" in warning and f"127.0.0.1:{a.port}" not in warning
        late.ready = 200
        running.wait_for(lambda: running.fleet.servers[1].available)
        assert running.fleet.wait_until_ready(0) and running.ask(*range(4)) == list(range(4))
        assert late.requests == 2


def test_closing_fails_what_is_open_and_ends_all_threads():
    before = set(threading.enumerate())
    with ScriptedServer(lambda *_: None) as server:
        running = Running(server, closed_port())
        future = running.send(1)  # before the fleet is ready: it waits
        running.wait_for(lambda: server.requests == 1)
        running.fleet.close()
        with pytest.raises(ServerRequestError, match="has no reply: this client was closed"):
            future.result(HANG_S)
        with pytest.raises(ServerRequestError, match="closed"):
            running.send(2)
        mine = [t for t in set(threading.enumerate()) - before if "monitor" in t.name]
        assert not mine


def test_the_first_error_of_an_ensemble_does_not_wait_for_the_others():
    with fleet_of(silent) as (a, _), fleet_of(failure("ArithmeticError: no")) as (b, _):
        fleets = {"a": a.ready().fleet, "b": b.ready().fleet}
        pending = send_to_fleets(fleets, dict.fromkeys(fleets, sample(1)))
        assert pending.done(5)
        with pytest.raises(ServerRequestError, match="ArithmeticError: no"):
            pending.result()


REWARD = schema.reward_model_endpoint()


def config_of(*names):
    """The description of a server that lists the inputs `names`."""
    inputs = tuple(spec for spec in REWARD.inputs if spec.name in names)
    return triton_config(dataclasses.replace(REWARD, inputs=inputs))


def whole_sample(value):
    more = {"tokenizer": np.array([[b"300 tokens"]]), "prompt_lengths": np.ones((1, 1), np.int64)}
    return {**sample(value), **more}


def test_a_fleet_sends_each_server_what_it_lists_and_warns_once(lines):
    with ScriptedServer() as plain, ScriptedServer() as ours:
        plain.config = config_of("tokens", "sequence_lengths")
        with Running(plain, ours) as running:
            submit = running.ready().fleet.submit
            found = [running.rewards([submit(whole_sample(v))]) for v in range(4)]
            assert found == [[0.0], [1.0], [2.0], [3.0]]
        assert plain.inputs == [["tokens", "sequence_lengths"]] * 2
        assert ours.inputs == [list(whole_sample(0))] * 2
        about = [line for line in lines if "tokenizer" in line]
        assert len(about) == 1 and f"127.0.0.1:{plain.port}" in about[0]


def test_a_server_whose_model_cannot_be_used_is_left_out_with_one_warning_but_at_the_start(lines):
    save = triton_config(schema.critic_save_endpoint())
    with ScriptedServer() as good, ScriptedServer() as changed:
        changed.config = save
        refused = says(ServerMismatchError, f":{changed.port} cannot be used")
        with Running(good, changed) as running, refused:
            running.ready()
        changed.config = config_of(*whole_sample(0))
        with Running(good, changed) as running:
            server = running.ready().fleet.servers[1]
            changed.ready = 503
            running.wait_for(lambda: not server.available)
            changed.config, changed.ready, probes = save, 200, changed.probes
            running.wait_for(lambda: changed.probes > probes + 4)
            assert not server.available
            assert len([line for line in lines if "cannot be used" in line]) == 1
            changed.config = config_of("tokens", "sequence_lengths", "prompt_lengths")
            running.wait_for(lambda: server.available)
            running.rewards([running.fleet.submit(whole_sample(v)) for v in range(4)])
            for names in changed.inputs:
                assert names == ["tokens", "sequence_lengths", "prompt_lengths"]
        assert changed.inputs


def test_the_kernel_noticing_a_lost_peer_is_no_time_out(monkeypatch):
    """ETIMEDOUT of a keep-alive is a TimeoutError in Python, as is our own time limit."""
    with ScriptedServer() as server:
        sending = exchange.Exchange(exchange.Peer("127.0.0.1", server.port))
        request = exchange.InferRequest("reward_model", {"tokens": np.ones((1, 3), np.int64)})

        def lost(*_):
            raise TimeoutError(110, "Connection timed out")

        monkeypatch.setattr(sending._connection, "getresponse", lost)
        with pytest.raises(exchange.ConnectionLostError):
            sending.run(request, 5.0)


def test_errors_of_an_ending_server_job_are_known_by_their_names():
    """The texts that Triton passes on contain the classes of server_loop.py."""

    def read(text):
        return exchange._server_error(500, json.dumps({"error": text}).encode())

    for error in (ServerStoppingError("toy ends"), ServerJobError("toy failed: closed by peer")):
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        result = read(f"TritonModelException: ... {name}: {error}\n\nAt:\n  x")
        assert isinstance(result, exchange.NotServingError) and str(error) in str(result)
    # The process of its tensors is dead: as Triton says it, and as a front of this package does.
    trace = """Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 384, in _send
    n = write(self._handle, buf)
BrokenPipeError: [Errno 32] Broken pipe
"""
    for text in (f"Failed to process: {trace}", cause_in(trace)):
        assert isinstance(read(text), exchange.NotServingError) and "Broken" in str(read(text))
    failed = f"nemo_aligner.servers.server_loop.{OperationFailedError.__qualname__}: FORWARD"
    for text in (failed, f"the reward function failed: {cause_in(trace)}"):
        assert isinstance(read(text), ServerRequestError)


def test_a_lost_probe_does_not_take_back_a_server_that_hangs():
    with fleet_of(None, None) as (running, *_):
        servers = running.ready().fleet
        server = servers.servers[0]
        with servers._lock:
            server.hung, server.missed = True, 0
            for probe in range(1, fleet.MAX_MISSED_PROBES + 1):
                servers._note_probe(server, None)
                assert server.hung == (probe < fleet.MAX_MISSED_PROBES)
            server.hung = True
            servers._note_probe(server, 503)
            assert not server.hung


def test_a_failure_does_not_wait_for_a_fleet_before_it(monkeypatch):
    monkeypatch.setattr(futures, "JOINT_HEARTBEAT_S", 0.3)
    with ScriptedServer(ready=400) as other:
        with Running(closed_port(), init_timeout_s=HANG_S) as first:
            with Running(other, init_timeout_s=0.5) as second, says(ServerRequestError, "replies"):
                futures.wait_for_all([first.fleet, second.fleet])
