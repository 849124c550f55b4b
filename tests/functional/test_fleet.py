# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward clients with fleets of real Triton servers that are killed, stopped and restarted while
requests stream in.

Rewards are compared with a sum in plain Python. Failures at moments that no real server can be
made to fail at are in tests/unit/test_fleet.py.
"""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers import fleet as fleet_module
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.servers.fleet import ServerUnreachableError
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from tests.distributed.launcher import run_ranks
from tests.functional.critic_job import CriticJob, build_model
from tests.functional.jobs import remote_rm
from tests.functional.toy_reward_server import NAN, RAISE, SLEEP, ToyRewardServer, expected_rewards
from tests.patience import Deadline, patience, wait_until
from tests.processes import is_alive

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two_servers():
    with ToyRewardServer(delay_s=0.1) as a, ToyRewardServer(delay_s=0.1) as b:
        yield a, b


@pytest.fixture
def pair(two_servers):
    """Two servers of the same model, both running; a test may end or damage them."""
    ended = [s for s in two_servers if s.rows() or s.process.poll() is not None]
    restarted = [server for server in ended if not server.is_ready()]
    for server in restarted:
        server.kill()
        server.start()
    for server in two_servers:
        server.wait_until_ready()
    return two_servers


def section(*servers, **changes):
    return remote_rm([server.port for server in servers], **{"pad_to_length": 6, **changes})


def member(*servers, **changes):
    return {"ip": "127.0.0.1", "port": [server.port for server in servers], **changes}


def rollout(seed, first=None):
    """A micro-batch of ragged rows; `first` replaces the first token of the first row."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 1 + seed % 3, 6
    tokens = torch.randint(1, 800, (rows, width), generator=generator)
    if first is not None:
        tokens[0, 0] = first
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    prompts = torch.randint(1, 3, (rows,), generator=generator)
    return {"response_tokens": tokens, "response_lengths": lengths, "prompt_lengths": prompts}


def assert_right(rewards, batch, scale=1.0):
    """Rewards float32 [b] of a micro-batch against those of the toy server's formula."""
    want = expected_rewards(
        batch["response_tokens"], batch["response_lengths"], batch["prompt_lengths"], scale
    ).flatten()
    assert rewards.dtype == torch.float32 and rewards.shape == want.shape
    np.testing.assert_allclose(rewards.numpy(), want, rtol=0, atol=1e-3)


class Stream:
    """Requests sent one after another, with up to MOST of them unanswered: more would only queue
    up in the client.
    """

    MOST = 24

    def __init__(self, client):
        self.client, self.sent = client, []
        self.fleet = client.reward_models.fleets["reward_model"]

    def send(self, count):
        for _ in range(count):
            wait_until(lambda: self.answered(len(self.sent) - self.MOST))
            batch = rollout(len(self.sent))
            self.sent.append((batch, self.client.infer_rm(batch)))
            time.sleep(0.01)

    def send_until(self, condition, limit_s=100.0):
        deadline = Deadline(limit_s)
        while not condition():
            assert not deadline.passed()
            self.send(1)

    def send_until_busy(self, index):
        """Send until server number `index` has requests in flight."""
        self.send_until(lambda: len(self.fleet.servers[index].in_flight) > 1)

    def answered(self, count):
        """Whether the first `count` requests have their answers."""
        sent = self.sent[: max(count, 0)]
        requests = [each for _, part in sent for each in part.rm_future._sent.values()]
        return all(request.future.done() for request in requests)

    def assert_all_right(self):
        for batch, future in self.sent:
            assert_right(future.scores().rewards, batch)


def test_servers_are_killed_and_come_back_in_the_middle_of_a_stream(pair, lines, record_property):
    """Each of the two is killed once (machine gone: connections are reset) and restarted on its
    port.
    """
    a, b = pair
    with contextlib.closing(RemoteGPTRMClient(section(a, b))) as client:
        stream = Stream(client)
        stream.send(100)
        wait_until(lambda: stream.answered(100))
        share = sum(a.rows()) / (sum(a.rows()) + sum(b.rows()))
        assert 0.3 < share < 0.7, (a.rows(), b.rows())

        for index, (victim, other) in enumerate(((a, b), (b, a))):
            stream.send_until_busy(index)
            before, killed = len(stream.sent), time.monotonic()
            victim.kill()
            stream.send_until(lambda before=before: stream.answered(before))
            failed_over = time.monotonic() - killed
            served, other_served = sum(victim.rows()), sum(other.rows())
            stream.send(50)
            wait_until(lambda: stream.answered(len(stream.sent)))
            assert sum(victim.rows()) == served and sum(other.rows()) > other_served

            victim.start()
            ready: list = []
            watcher = threading.Thread(
                target=lambda v=victim, r=ready: (v.wait_until_ready(), r.append(time.monotonic()))
            )
            watcher.start()
            stream.send_until(lambda i=index: stream.fleet.servers[i].available)
            taken_back = time.monotonic()
            watcher.join(patience(60))
            stream.send_until(lambda v=victim, s=served: sum(v.rows()) > s)
            record_property(f"fail_over_s_{index}", round(failed_over, 2))
            record_property(f"take_back_s_{index}", round(taken_back - ready[0], 2))
            after = taken_back - ready[0]
            print(
                f"failed over in {failed_over:.2f} s, taken back {after:.2f} s after it was ready"
            )
            assert failed_over < patience(20) and taken_back - ready[0] < patience(10)
        stream.assert_all_right()
        for server in (a, b):
            about = [line for line in lines if server.address in line]
            assert len([line for line in about if "is left out" in line]) == 1, about
            assert len([line for line in about if "back: " in line]) == 1, about


@pytest.mark.full  # tests/unit/test_fleet.py has the client alone
def test_triton_that_outlives_its_process_does_not_hold_requests_back(pair, lines, monkeypatch):
    """Only the Python process is killed: Triton then keeps the connections open, silently, for ten
    seconds.
    """
    a, b = pair
    monkeypatch.setattr(fleet_module, "PROBE_INTERVAL_S", 1.0)
    with contextlib.closing(RemoteGPTRMClient(section(a, b))) as client:
        stream = Stream(client)
        stream.send_until_busy(0)
        before = len(stream.sent)
        orphans = a.kill_python()
        wait_until(lambda: stream.answered(before))
        assert any(map(is_alive, orphans))
        stream.assert_all_right()
        for orphan in orphans:  # the port is free again when they have ended
            orphan.wait(patience(30))


@pytest.mark.full  # tests/unit/test_fleet.py has the client alone
def test_a_model_that_hangs_behind_a_living_triton(pair, lines):
    """Only the Python process is stopped: probes are answered, the request's time limit passes."""
    a, b = pair
    client = RemoteGPTRMClient(section(a, b, inference_timeout_s=min(patience(3), 20)))
    try:
        stream = Stream(client)
        stream.send(1)
        wait_until(lambda: stream.answered(1))
        a.process.send_signal(signal.SIGSTOP)
        stream.send(10)
        wait_until(lambda: stream.answered(len(stream.sent)))
        stream.assert_all_right()
        assert any("although it replies to probes; it hangs, or was stopped" in x for x in lines)
        time.sleep(3 * fleet_module.RETRY_INTERVAL_S)
        assert not stream.fleet.servers[0].available
        rows = len(a.rows())
        a.process.send_signal(signal.SIGCONT)
        wait_until(lambda: stream.fleet.servers[0].available)
        stream.send_until(lambda: len(a.rows()) > rows + 10)  # what it had, and more
        stream.assert_all_right()

        with pytest.raises(ServerRequestError, match="remote_rm.inference_timeout_s"):
            client.infer_rm(rollout(0, first=SLEEP)).result()
    finally:
        client.close()
        for server in pair:  # they sleep for a minute
            server.kill()


def two_rank_client(port, dead_port, log_file):
    """On each rank: what the client's calls return or raise."""
    from nemo_aligner.parallel import parallel_state

    parallel_state.initialize(tensor_model_parallel_size=2)
    section = {"ip": "127.0.0.1", "port": [dead_port, port]}
    config = OmegaConf.create({"init_timeout_s": patience(60), "reward_model": section})
    fleet_module.START_GRACE_S = 1.0
    client = RemoteGPTRMClient(config)
    # As users of NeMo-Aligner take it: a tensor [b, 1].
    rewards = client.infer_rm(rollout(2)).result().squeeze(1)
    # Of the last one the other rank sends nothing.
    unsuitable = {**rollout(1), "prompt_lengths": torch.ones(5, dtype=torch.int64)}
    errors = []
    for bad in (rollout(1, first=RAISE), rollout(1, first=NAN), unsuitable):
        with pytest.raises(ServerRequestError) as caught:
            client.infer_rm(bad).result()
        errors.append(str(caught.value))
    again = client.infer_rm(rollout(2)).scores().rewards
    connections = len(client.reward_models.fleets)
    client.close()
    config = OmegaConf.create(
        {"init_timeout_s": 1, "reward_model": {"ip": "127.0.0.1", "port": dead_port}}
    )
    with pytest.raises(ServerUnreachableError) as unreachable:
        RemoteGPTRMClient(config)
    errors.append(str(unreachable.value))
    return rewards, again, errors, connections


def test_one_rank_sends_and_all_ranks_hear(pair, tmp_path):
    a, _b = pair
    with ToyRewardServer(start=False) as dead:
        results = run_ranks(two_rank_client, 2, 200, a.port, dead.port, str(tmp_path / "log"))
    assert [connections for *_, connections in results] == [1, 0]
    for rewards, again, errors, _connections in results:
        assert_right(rewards, rollout(2))
        assert_right(again, rollout(2))
        assert len(errors) == 4
        for error, words in zip(
            errors, ("cannot stand", "is nan", "different numbers of rows", "not reachable")
        ):
            assert words in error


def test_separate_mode_takes_values_from_the_critic_and_rewards_from_the_fleet(pair):
    a, b = pair
    model = build_model()
    with CriticJob(combined=False) as job, ToyRewardServer(3.0, endpoint="triple") as c:
        job.wait_until_serving()
        config = section(
            combine_rm_and_critic_server=False,
            critic={"ip": "127.0.0.1", "port": job.port},
            reward_models={
                "sum": member(a, b, weight=2.0),
                "terse": member(c, name="triple", weight=-1.0),
            },
        )
        with contextlib.closing(RemoteGPTRMCriticClient(config)) as client:
            tokens = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0]])
            batch = {"response_tokens": tokens, "response_lengths": torch.tensor([3, 4])}
            batch["prompt_lengths"] = torch.tensor([1, 2])
            for attempt in range(2):
                scores = client.infer_rm_critic(batch).scores()
                torch.testing.assert_close(scores.values, model(tokens)[:, :-1].detach())
                assert_right(scores.parts["sum"], batch)
                assert_right(scores.parts["terse"], batch, scale=3.0)
                found, wanted = scores.rewards, 2.0 * scores.parts["sum"] - scores.parts["terse"]
                torch.testing.assert_close(found, wanted)
                if attempt == 0:
                    a.kill()
            bad = {**batch, "response_tokens": tokens.clone()}
            bad["response_tokens"][0, 0] = NAN  # the critic's vocabulary does not have it either
            with pytest.raises(ServerRequestError, match="is nan in sample"):
                client.infer_rm_critic(bad).result()
            client.check_status(0, {})
