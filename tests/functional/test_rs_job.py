# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling and REINFORCE from end to end: the real actor scripts against real
reward-model servers, in their own processes; resumed; and with servers that are killed and come
back.
"""

import contextlib

import psutil
import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import (
    ScriptJob,
    assert_ended_well,
    assert_same_metrics,
    count_of,
    must_end_well,
    read_metrics,
    reward_server,
    rollout_options,
    samples_of,
    texts_of,
    wait_for,
    wait_for_log,
    wait_until_serving,
)
from tests.patience import patience

pytestmark = pytest.mark.timeout(600)  # several processes; their own limits are shorter

# What must not depend on which server scored what.
COMPARED = ["train_rollouts/global_rewards", "train_rollouts/selected_rewards"]
COMPARED += ["train_rollouts/global_response_lengths_mean", "train_rollouts/global_prompt_lengths"]
COMPARED += ["train_rollouts/consumed_samples", "train_optim/loss", "train_optim/grad_norm"]
COMPARED += ["train_optim/lr", "val_rollouts/global_rewards"]


SCRIPTS = {"rs": "train_gpt_rs_actor.py", "reinforce": "train_gpt_reinforce_actor.py"}
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
OPTIONS = {
    "rs": [
        "trainer.rs.max_steps=3",
        "trainer.rs.val_check_interval=3",
        "model.global_batch_size=4",
        "model.optim.sched.warmup_steps=1",
        "model.rs.num_rollouts_per_prompt=3",
        "model.rs.top_n_rollouts=2",
    ],
    "reinforce": [
        "trainer.reinforce.val_check_interval=2",
        "trainer.reinforce.num_rollouts_per_prompt=3",
        "trainer.reinforce.initial_policy_kl_penalty=0.1",
        "model.global_batch_size=12",
        "model.optim.sched.name=constant",
    ],
}


def actor(inputs, folder, port, *extra, kind="rs", ranks=1, script=None):
    folder.mkdir(exist_ok=True)
    script = script or SCRIPTS[kind]
    options = [*rollout_options(inputs, folder, kind), *OPTIONS[kind], "remote_rm.host=127.0.0.1"]
    options += [f"remote_rm.port={port}", f"remote_rm.init_timeout_s={patience(90):.0f}", *extra]
    return ScriptJob(script, folder / "actor.log", options, ranks)


@pytest.fixture(scope="module")
def server_port(inputs):
    """Port of a reward-model server of one rank, which serves all jobs of this module, one after
    the other.
    """
    port = find_free_port()
    with reward_server(inputs / "rm.nemo", inputs / "server", port) as server:
        wait_until_serving(server)
        yield port
        assert_ended_well(server, server.stop())


@pytest.fixture(scope="module")
def single(inputs, server_port):
    """Folder of three steps with one rank each."""
    folder = inputs / "rs-single"
    must_end_well(actor(inputs, folder, server_port))
    return folder


def test_a_run_trains_saves_and_counts_prompts(single):
    metrics = single / "actor"
    # 4 prompts x 2 selected samples in global batches of 4
    assert len(read_metrics(metrics, "train_optim/loss")) == 6
    assert read_metrics(metrics, "train_rollouts/consumed_samples") == [4, 8, 12]
    assert read_metrics(metrics, "train_rollouts/rollout_size") == [12, 12, 12]
    means, kept = (
        read_metrics(metrics, f"train_rollouts/{name}_rewards") for name in ("global", "selected")
    )
    assert all(best > mean for best, mean in zip(kept, means, strict=True))
    assert all(seconds > 0 for seconds in read_metrics(metrics, "speed/generate_tokens_per_s"))
    names = sorted(path.name for path in (metrics / "checkpoints").iterdir())
    first = "megatron_gpt-step=3-consumed_samples=12-rs_optimization_step=6-epoch=0-val_global_re"
    assert any(name.startswith(first) for name in names), names
    assert "megatron_gpt_rs_actor.nemo" in names
    samples = samples_of(metrics)
    assert len(samples) == 4
    assert set(samples[0]) >= {"step", "prompt", "response", "reward", "is_end"}


@pytest.mark.full
@pytest.mark.parametrize("kind, lora", [("rs", []), ("reinforce", []), ("reinforce", LORA)])
def test_the_same_command_resumes(inputs, server_port, tmp_path, kind, lora):
    """Two steps, then the same command with four: as four uninterrupted ones, to the bit; the rate
    is constant.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    own = [*lora, f"trainer.{kind}.val_check_interval=2", "model.optim.sched.name=constant"]
    for folder, limits in ((whole, [4]), (parts, [2, 4])):
        for limit in limits:
            extra = [*own, f"trainer.{kind}.max_steps={limit}"]
            must_end_well(actor(inputs, folder, server_port, *extra, kind=kind))
    assert_same_metrics(parts / "actor", whole / "actor")
    assert texts_of(parts / "actor")[-4:] == texts_of(whole / "actor")[-4:]
    if kind == "reinforce":
        kl = read_metrics(whole / "actor", "train_rollouts/init_policy_kl")
        assert len(kl) == 4 and kl[0] == 0 and all(kl[1:])
        sizes = read_metrics(whole / "actor", "train_rollouts/rollout_size")
        assert sizes == [12] * 4
        assert (whole / "actor/checkpoints/megatron_gpt_reinforce_actor.nemo").exists()


# ------------------------------------------------------------------------------ a fleet of servers


@pytest.mark.full
def test_servers_that_are_killed_and_come_back_change_nothing(inputs, server_port, tmp_path):
    """A fleet of two. One is killed with requests in flight, and comes back; then the other one is
    killed for good.
    """
    steps = "trainer.rs.max_steps=12", "trainer.rs.val_check_interval=12"
    undisturbed, fleet = tmp_path / "undisturbed", tmp_path / "fleet"
    must_end_well(actor(inputs, undisturbed, server_port, *steps))

    ports = find_free_port(), find_free_port()
    addresses = ["remote_rm.host=null", "remote_rm.port=null"]
    addresses += ["remote_rm.reward_model.ip=127.0.0.1"]
    addresses.append(f"remote_rm.reward_model.port=[{ports[0]},{ports[1]}]")

    def start(port, name):
        # A request waits a second for company in the server, so there is always one in flight when
        # a server is killed.
        slow = ["inference.max_queue_delay_microseconds=1000000"]
        slow.append("inference.inference_micro_batch_size=64")
        return reward_server(inputs / "rm.nemo", tmp_path / name, port, *slow)

    steps_done = lambda: count_of(fleet / "actor", "train_rollouts/global_rewards")
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        stacks = zip((first, second), ports, ("first", "second"))
        servers = [stack.enter_context(start(port, name)) for stack, port, name in stacks]
        for server in servers:
            wait_until_serving(server)
        with actor(inputs, fleet, ports[0], *steps, *addresses) as job:
            wait_for(job, lambda: steps_done() >= 2, "two steps")
            first.close()  # SIGKILL to all of its processes
            wait_for_log(job, f":{ports[0]} is left out")
            alone = steps_done()
            wait_for(job, lambda: steps_done() >= alone + 2, "two steps with one server")
            # However long a server takes to start on this machine, the run is not over by then.
            process = psutil.Process(job.process.pid)
            process.suspend()
            wait_until_serving(first.enter_context(start(ports[0], "again")))
            process.resume()
            wait_for_log(job, f"back: reward_model at 127.0.0.1:{ports[0]}")
            second.close()
            assert steps_done() <= 10, "nearly over when the first server came back"
            assert_ended_well(job, job.wait(300))
            assert f":{ports[1]} is left out" in job.log, job.log[-4000:]
    # Rewards go through sums of another order.
    assert_same_metrics(fleet / "actor", undisturbed / "actor", COMPARED, rel=1e-4, abs=1e-5)
    assert texts_of(fleet / "actor") == texts_of(undisturbed / "actor")
