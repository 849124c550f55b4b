# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO from end to end: the real actor script against the real critic server, in their own
processes, at several splits.
"""

import functools
import json
import shutil
import signal

import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests import killed_runs
from tests.certificates import make_certificate
from tests.functional.jobs import (
    CPU,
    ScriptJob,
    assert_ended_well,
    assert_same_metrics,
    must_end_well,
    reward_server,
    rollout_options,
    texts_of,
)
from tests.patience import patience, wait_until

pytestmark = pytest.mark.timeout(600)  # several processes; their own limits are shorter

TRITON = "server.frontend=triton"
CONSTANT_RATE = "model.optim.sched.name=constant"  # any other schedule depends on max_steps
IN_BACKGROUND = ("exp_manager.checkpoint_callback_params.async_save=True",)
FOUR = ["trainer.ppo.max_steps=4", "trainer.ppo.val_check_interval=2", CONSTANT_RATE]
SIDES = ("actor", "critic")


def critic(inputs, folder, port, *extra, ranks=1, launcher="python", script="serve_ppo_critic.py"):
    """Its server needs no Triton, which costs seconds, unless `extra` says so."""
    folder.mkdir(exist_ok=True)
    return ScriptJob(
        script,
        folder / "critic.log",
        [
            *CPU,
            "trainer.ppo.host=127.0.0.1",
            f"trainer.ppo.port={port}",
            "trainer.ppo.max_steps=100",
            "server.frontend=asgi",
            f"pretrained_checkpoint.restore_from_path={inputs}/rm.nemo",
            f"exp_manager.explicit_log_dir={folder}/critic",
            "model.encoder_seq_length=48",
            "model.micro_batch_size=2",
            "model.global_batch_size=4",
            "model.optim.lr=1e-3",
            "model.optim.sched.warmup_steps=1",
            *extra,
        ],
        ranks,
        launcher,
    )


def actor(
    inputs, folder, port, *extra, ranks=1, launcher="python", script="train_gpt_ppo_actor.py"
):
    return ScriptJob(
        script,
        folder / "actor.log",
        [
            *rollout_options(inputs, folder, "ppo"),
            "trainer.ppo.max_steps=3",
            "trainer.ppo.val_check_interval=3",
            "trainer.ppo.initial_policy_kl_penalty=0.05",
            f"remote_critic_rm.critic.port={port}",
            "remote_critic_rm.critic.ip=127.0.0.1",
            f"remote_critic_rm.init_timeout_s={patience(90):.0f}",
            "model.global_batch_size=4",
            "model.optim.sched.warmup_steps=1",
            "model.ppo.num_rollout_samples=8",
            "model.ppo.rollout_micro_batch_size=4",
            "model.ppo.val_rollout_micro_batch_size=2",
            *extra,
        ],
        ranks,
        launcher,
    )


def without_critic(inputs, folder, *extra, estimator="grpo", ranks=1) -> ScriptJob:
    """An actor with four responses to each of four prompts. At the critic's and the reward model's
    port nobody listens.
    """
    folder.mkdir(exist_ok=True)
    settings = [f"trainer.ppo.advantage_estimator={estimator}"]
    settings += [f"remote_critic_rm.reward_model.port={find_free_port()}"]
    settings += ["model.ppo.num_rollout_samples=4", "model.ppo.num_rollouts_per_prompt=4"]
    settings += ["model.ppo.rollout_micro_batch_size=2", *extra]
    return actor(inputs, folder, find_free_port(), *settings, ranks=ranks)


def run_pair(
    inputs, folder, of_critic=(), of_actor=(), ranks=1, launchers=("python", "python"), scripts=()
) -> tuple[ScriptJob, ScriptJob]:
    """Critic and actor in `folder` to their end; both resume from what is there. The critic is
    stopped as a scheduler would.
    """
    port = find_free_port()
    options = [{"ranks": ranks, "launcher": launcher} for launcher in launchers]
    for own, script in zip(options, scripts):
        own["script"] = script
    with (
        critic(inputs, folder, port, *of_critic, **options[0]) as server,
        actor(inputs, folder, port, *of_actor, **options[1]) as job,
    ):
        assert_ended_well(job, job.wait(240))
        assert_ended_well(server, server.stop())
    return server, job


def assert_same_run(folder, expected) -> None:
    """To the bit."""
    for side in SIDES:
        assert_same_metrics(folder / side, expected / side)


@pytest.fixture(scope="module")
def single(inputs):
    """Folder of three steps with one rank each."""
    run_pair(inputs, inputs / "single", [TRITON])
    return inputs / "single"


@pytest.mark.full
def test_encrypted_and_without_triton_it_is_the_same_run(inputs, single):
    folder = inputs / "asgi"
    folder.mkdir()
    certificate, key = make_certificate(folder)
    front = [f"server.tls_certificate={certificate}", f"server.tls_key={key}"]
    server, _ = run_pair(inputs, folder, front, [f"remote_critic_rm.tls_ca_file={certificate}"])
    assert "starting uvicorn on" in server.log
    assert_same_run(folder, single)


@pytest.mark.full
@pytest.mark.parametrize("tensor_parallel", SIDES)
def test_any_split_gives_the_same_numbers(inputs, single, tmp_path, tensor_parallel):
    """One side on TP2, under torchrun, the other on DP2."""
    two = ["++model.tensor_model_parallel_size=2"]
    split = {side: two * (side == tensor_parallel) for side in SIDES}
    launchers = ["torchrun" if side == tensor_parallel else "python" for side in SIDES[::-1]]
    run_pair(inputs, tmp_path, split["critic"], split["actor"], ranks=2, launchers=launchers)
    assert_same_metrics(tmp_path / "actor", single / "actor", rel=1e-4, abs=1e-5)
    assert texts_of(tmp_path / "actor") == texts_of(single / "actor")


@pytest.mark.full  # tests/functional/test_fleet.py has separate servers in `make test`
@pytest.mark.parametrize("ranks", [1, 2])
def test_separate_servers_give_the_numbers_of_one(inputs, single, tmp_path, ranks):
    """Of two ranks: data-parallel servers and actor."""
    port, launcher = find_free_port(), "torchrun" if ranks == 2 else "python"
    alone = ["trainer.ppo.combine_rm_and_critic_server=False"]
    apart = ["remote_critic_rm.combine_rm_and_critic_server=False"]
    address = {"ip": "127.0.0.1", "port": port}
    apart += [f"remote_critic_rm.reward_model.{key}={value}" for key, value in address.items()]
    with reward_server(inputs / "rm.nemo", tmp_path, port, ranks=ranks) as reward:
        run_pair(inputs, tmp_path, alone, apart, ranks, launchers=[launcher] * 2)
        assert_ended_well(reward, reward.stop())
    assert_same_metrics(tmp_path / "actor", single / "actor", rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def whole(inputs):
    """Folder of four steps without interruption, one rank each."""
    run_pair(inputs, inputs / "whole", [CONSTANT_RATE], FOUR)
    return inputs / "whole"


@pytest.mark.full
def test_a_pair_resumes_at_another_split(inputs, whole, tmp_path):
    """Two steps of one rank each, then the actor on TP2 and the critic on DP2: as four steps of
    one rank each.
    """
    run_pair(inputs, tmp_path, [CONSTANT_RATE], [*FOUR, "trainer.ppo.max_steps=2"])
    split = "++model.tensor_model_parallel_size=2"
    run_pair(inputs, tmp_path, [CONSTANT_RATE], [*FOUR, split], ranks=2)
    assert_same_metrics(tmp_path / "actor", whole / "actor", rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_mismatched_pairs_are_refused(inputs, whole, tmp_path):
    """An actor without its critic."""
    parts, port = shutil.copytree(whole, tmp_path / "parts"), find_free_port()
    with critic(inputs, tmp_path / "fresh", port) as server:
        with actor(inputs, parts, port, "trainer.ppo.max_steps=6") as job:
            assert job.wait() == ExitCode.USER_ERROR
        message = "actor and critic do not match: this actor is at step 4"
        assert message in job.log, job.log[-2000:] + server.log[-3000:]
        assert_ended_well(server, server.stop())


def run_killed_pair(inputs, folder, monkeypatch, side, save):
    """To step 4 with SIGKILL to one side in its save number `save`; the other ends by itself or is
    stopped.
    """
    monkeypatch.setenv("KILLED_SIDE", side)
    monkeypatch.setenv("KILL_IN_SAVE", str(save))
    killed, port = {"script": killed_runs.__file__}, find_free_port()
    of_critic, of_actor = (killed if side == each else {} for each in ("critic", "actor"))
    with (
        critic(inputs, folder, port, CONSTANT_RATE, *IN_BACKGROUND, **of_critic) as server,
        actor(inputs, folder, port, *FOUR, *IN_BACKGROUND, **of_actor) as job,
    ):
        code = job.wait(240)
        assert code == (-9 if side == "actor" else ExitCode.LOST_PEER), job.log[-3000:]
        if side == "actor":
            assert_ended_well(server, server.stop())
        else:
            assert server.wait(30) == -9, server.log[-3000:]


@pytest.mark.full
def test_a_pair_killed_in_its_saves_continues_as_it_was(inputs, whole, tmp_path, monkeypatch):
    """The actor dies in its first save in the background, then the critic in the one of step 4: no
    argument is changed, and every metric is the same to the bit. (Other saves: tests/chaos.)
    """
    run_killed_pair(inputs, tmp_path, monkeypatch, "actor", 1)
    assert not list((tmp_path / "actor/checkpoints").glob("*/COMPLETE"))
    # Of the critic's saves the first is that of its first weights.
    run_killed_pair(inputs, tmp_path, monkeypatch, "critic", 2)
    assert len(list((tmp_path / "actor/checkpoints").glob("*/COMPLETE"))) == 2
    run_pair(inputs, tmp_path, [CONSTANT_RATE, *IN_BACKGROUND], [*FOUR, *IN_BACKGROUND])
    assert_same_run(tmp_path, whole)


@pytest.mark.full
def test_a_pair_of_adapters_resumes_exactly(inputs, tmp_path):
    """Actor and critic train LoRA adapters; two steps and two more are the four, to the bit."""
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
    run = functools.partial(run_pair, inputs, of_critic=[CONSTANT_RATE, *lora])
    run(tmp_path / "whole", of_actor=[*FOUR, *lora])
    run(tmp_path / "parts", of_actor=[*FOUR, *lora, "trainer.ppo.max_steps=2"])
    run(tmp_path / "parts", of_actor=[*FOUR, *lora])
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.full
def test_an_actor_that_is_stopped_in_a_step_saves_and_continues(inputs, whole, tmp_path):
    """With the same command, beside the same critic, to the same bits."""
    port, metrics = find_free_port(), tmp_path / "actor/metrics.jsonl"
    with critic(inputs, tmp_path, port, CONSTANT_RATE) as server:
        with actor(inputs, tmp_path, port, *FOUR) as job:
            rolls_out = lambda: metrics.exists() and "train_rollouts/" in metrics.read_text()
            wait_until(rolls_out, patience(120), lambda: job.log[-3000:])
            job.process.send_signal(signal.SIGUSR1)
            assert job.wait(60) == ExitCode.PRE_EMPTED, job.log[-3000:]
            assert not job.leftovers()
        assert "SIGUSR1: the job saves and ends after the running step" in job.log
        ending = json.loads((tmp_path / "actor/ending.json").read_text())
        assert (ending["name"], ending["reason"]) == ("PRE_EMPTED", "SIGUSR1")
        assert 1 <= ending["step"] < 4
        for side in SIDES:
            assert len(list((tmp_path / side / "checkpoints").glob("*/COMPLETE"))) >= 1
        must_end_well(actor(inputs, tmp_path, port, *FOUR))
        assert_ended_well(server, server.stop())
    assert json.loads((tmp_path / "critic/ending.json").read_text())["code"] == 0
    assert_same_run(tmp_path, whole)
