# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO from end to end: the real actor script against the real critic server, in their own
processes, at several splits.
"""

import json
import shutil
import signal
import string
from pathlib import Path

import pytest

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.certificates import make_certificate
from tests.faulty_network import FAULTS, FaultyNetwork
from tests.functional.jobs import ScriptJob, assert_ended_well, metric_names, read_metrics
from tests.patience import patience, wait_until
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.timeout(600)  # several processes; their own limits are shorter

PROMPTS = [
    "the film",
    "a dull plot and",
    "I loved the music",
    "Review: the story is",
    "the first scene",
    "a long evening",
]
# What must not depend on how the work is split. Log-probs, values and rewards go through sums of
# another order, so the numbers agree to rounding, which three updates make a little larger.
COMPARED = [
    "train_rollouts/rewards",
    "train_rollouts/init_policy_kl",
    "train_rollouts/values_mean",
    "train_rollouts/returns_std",
    "train_rollouts/advantages_std",
    "train_rollouts/response_lengths",
    "train_optim/loss",
    "train_optim/critic_loss",
    "train_optim/grad_norm",
]


TRITON = "server.frontend=triton"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_tokenizer_dir):
    """A policy and a reward model (random weights) as .nemo files, and prompts."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

    folder = tmp_path_factory.mktemp("ppo")
    policy = tiny_config(tiny_tokenizer_dir, seed=3)
    MegatronGPTModel(policy).save_to(str(folder / "policy.nemo"))
    reward = tiny_config(
        tiny_tokenizer_dir, seed=4, output_sequence=False, force_head_dtype="float32"
    )
    MegatronGPTRewardModel(reward).save_to(str(folder / "rm.nemo"))
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(48):
            file.write(json.dumps({"text": f"{PROMPTS[i % len(PROMPTS)]} {i}"}) + "\n")
    return folder


def critic(inputs, folder, port, ranks=1, launcher="python", *extra, script="serve_ppo_critic.py"):
    """Its server needs no Triton, which costs seconds, unless `extra` says so."""
    folder.mkdir(exist_ok=True)
    return ScriptJob(
        script,
        folder / "critic.log",
        [
            "trainer.accelerator=cpu",
            "trainer.precision=32",
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
    inputs, folder, port, ranks=1, launcher="python", *extra, script="train_gpt_ppo_actor.py"
):
    prompts = f"[{inputs}/prompts.jsonl]"
    return ScriptJob(
        script,
        folder / "actor.log",
        [
            "trainer.accelerator=cpu",
            "trainer.precision=32",
            "trainer.ppo.max_steps=3",
            "trainer.ppo.val_check_interval=3",
            "trainer.ppo.initial_policy_kl_penalty=0.05",
            f"remote_critic_rm.critic.port={port}",
            "remote_critic_rm.critic.ip=127.0.0.1",
            f"remote_critic_rm.init_timeout_s={patience(90):.0f}",
            f"pretrained_checkpoint.restore_from_path={inputs}/policy.nemo",
            f"exp_manager.explicit_log_dir={folder}/actor",
            "model.encoder_seq_length=48",
            "model.micro_batch_size=2",
            "model.global_batch_size=4",
            "model.optim.lr=1e-3",
            "model.optim.sched.warmup_steps=1",
            "model.ppo.num_rollout_samples=8",
            "model.ppo.rollout_micro_batch_size=4",
            "model.ppo.num_val_samples=4",
            "model.ppo.val_rollout_micro_batch_size=2",
            "model.ppo.length_params.max_length=12",
            # Random weights rarely end a response; letters end one often enough to have both
            # kinds of samples.
            f"model.ppo.sampling_params.end_strings={list(string.ascii_lowercase)}",
            f"model.data.data_prefix={{train: {prompts}, validation: {prompts}, test: {prompts}}}",
            *extra,
        ],
        ranks,
        launcher,
    )


@pytest.fixture(scope="module")
def single(inputs):
    """Metrics folder of three steps with one rank each; the critic is stopped as a scheduler
    would.
    """
    folder, port = inputs / "single", find_free_port()
    with (
        critic(inputs, folder, port, 1, "python", TRITON) as server,
        actor(inputs, folder, port) as job,
    ):
        assert_ended_well(job, job.wait())
        assert_ended_well(server, server.stop())
    return folder


@pytest.mark.full
def test_a_run_learns_saves_and_starts_at_kl_zero(single):
    kl = read_metrics(single / "actor", "train_rollouts/init_policy_kl")
    assert kl[0] == 0.0 and kl[1] != 0.0  # k1 of few samples may be negative
    assert read_metrics(single / "actor", "train_optim/ppo_ratio")[0] == pytest.approx(
        1.0, abs=1e-5
    )
    assert len(read_metrics(single / "actor", "train_optim/loss")) == 6  # two updates per rollout
    assert len(read_metrics(single / "critic", "train/loss")) == 6
    ended = read_metrics(single / "actor", "train_rollouts/fraction_of_samples_properly_ended")
    assert any(0 < fraction < 1 for fraction in ended)  # both kinds of samples occurred
    names = sorted(path.name for path in (single / "actor" / "checkpoints").iterdir())
    assert (
        any(name.startswith("megatron_gpt-step=3") for name in names)
        and "megatron_gpt_ppo_actor.nemo" in names
    )
    samples = [
        json.loads(line)
        for line in (single / "actor" / "val_samples.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 4 and set(samples[0]) >= {
        "step",
        "prompt",
        "response",
        "reward",
        "is_end",
    }


@pytest.mark.full
def test_encrypted_and_without_triton_it_is_the_same_run(inputs, single):
    """To the bit."""
    folder, port = inputs / "asgi", find_free_port()
    folder.mkdir()
    certificate, key = make_certificate(folder)
    front = [
        f"server.tls_certificate={certificate}",
        f"server.tls_key={key}",
    ]
    trust = f"remote_critic_rm.tls_ca_file={certificate}"
    with (
        critic(inputs, folder, port, 1, "python", *front) as server,
        actor(inputs, folder, port, 1, "python", trust) as job,
    ):
        assert_ended_well(job, job.wait())
        assert_ended_well(server, server.stop())
    assert "starting uvicorn on" in server.log
    for side in ("actor", "critic"):
        names = [name for name in metric_names(single / side) if not name.endswith("_time")]
        assert names
        for name in names:
            assert read_metrics(folder / side, name) == read_metrics(single / side, name), name


@pytest.mark.full
@pytest.mark.parametrize(
    "critic_split, actor_split",
    [
        (("python", 2, 1), ("torchrun", 2, 2)),
        (("torchrun", 2, 2), ("python", 2, 1)),  # critic TP2, actor DP2
    ],
    ids=["critic-dp2-actor-tp2", "critic-tp2-actor-dp2"],
)
def test_any_split_gives_the_same_numbers(inputs, single, critic_split, actor_split):
    folder, port = inputs / f"split-{critic_split[0]}", find_free_port()
    (critic_launcher, critic_ranks, critic_tp), (actor_launcher, actor_ranks, actor_tp) = (
        critic_split,
        actor_split,
    )
    with (
        critic(
            inputs,
            folder,
            port,
            critic_ranks,
            critic_launcher,
            f"++model.tensor_model_parallel_size={critic_tp}",
        ) as server,
        actor(
            inputs,
            folder,
            port,
            actor_ranks,
            actor_launcher,
            f"++model.tensor_model_parallel_size={actor_tp}",
        ) as job,
    ):
        assert_ended_well(job, job.wait(240))
        assert_ended_well(server, server.stop())
    names = metric_names(single / "actor")
    assert {*COMPARED, "train_optim/entropy", "val_rollouts/rewards"} <= {*names}
    for key in names:
        expected, values = read_metrics(single / "actor", key), read_metrics(folder / "actor", key)
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-5), key
    samples = [
        [
            (sample["prompt"], sample["response"])
            for sample in map(json.loads, (run / "actor/val_samples.jsonl").open())
        ]
        for run in (single, folder)
    ]
    assert samples[0] == samples[1]


@pytest.mark.full  # tests/unit/test_broken_network.py has each fault alone
def test_a_network_that_loses_things_changes_no_number(inputs, single):
    """Every second sending of a request meets a fault, of each kind that does not take minutes."""
    folder, port = inputs / "network", find_free_port()
    faults = [fault for fault in FAULTS if not fault.startswith("silent")]

    def fault(number: int, path: str) -> str | None:
        return None if number % 2 else faults[number // 2 % len(faults)]

    with (
        FaultyNetwork(("127.0.0.1", port), fault) as network,
        critic(inputs, folder, port) as server,
        actor(inputs, folder, network.port) as job,
    ):
        assert_ended_well(job, job.wait())
        assert_ended_well(server, server.stop())
    assert {fault for _, fault in network.happened} == {*faults}
    assert {path.split("/")[3] for path, _ in network.happened} >= {"critic_infer", "critic_train"}
    for side in ("actor", "critic"):
        names = [name for name in metric_names(single / side) if not name.endswith("_time")]
        assert "train_optim/loss" in names or "train/loss" in names
        for key in names:
            assert read_metrics(folder / side, key) == read_metrics(single / side, key), key


CONSTANT_RATE = "model.optim.sched.name=constant"  # any other schedule depends on max_steps


IN_BACKGROUND = ("exp_manager.checkpoint_callback_params.async_save=True",)


def run_pair(inputs, folder, max_steps, critic_ranks=1, actor_ranks=1, actor_extra=(), extra=()):
    """Critic and actor in `folder` up to `max_steps`; both resume from what is there. `extra` goes
    to both.
    """
    limits = [f"trainer.ppo.max_steps={max_steps}", "trainer.ppo.val_check_interval=2"]
    port = find_free_port()
    with (
        critic(inputs, folder, port, critic_ranks, "python", CONSTANT_RATE, *extra) as server,
        actor(
            inputs,
            folder,
            port,
            actor_ranks,
            "python",
            CONSTANT_RATE,
            *limits,
            *actor_extra,
            *extra,
        ) as job,
    ):
        assert_ended_well(job, job.wait(240))
        assert_ended_well(server, server.stop())


@pytest.fixture(scope="module")
def whole(inputs):
    """Folder of four steps without interruption, one rank each."""
    run_pair(inputs, inputs / "whole", 4)
    return inputs / "whole"


@pytest.fixture(scope="module")
def half(inputs):
    """Folder of the first two steps, one rank each; tests continue in a copy."""
    run_pair(inputs, inputs / "half", 2)
    return inputs / "half"


@pytest.mark.full  # below, a pair that is killed continues
def test_the_same_command_resumes(inputs, whole, half, tmp_path):
    """Two steps, then the same commands with four: as four uninterrupted ones, to the bit."""
    parts = shutil.copytree(half, tmp_path / "parts")
    run_pair(inputs, parts, 4)
    for key in metric_names(whole / "actor"):
        assert read_metrics(parts / "actor", key) == read_metrics(whole / "actor", key), key


@pytest.mark.full
def test_mismatched_pairs_are_refused(inputs, whole, tmp_path):
    """An actor without its critic."""
    parts, port = shutil.copytree(whole, tmp_path / "parts"), find_free_port()
    with critic(inputs, tmp_path / "fresh", port) as server:
        with actor(inputs, parts, port, 1, "python", "trainer.ppo.max_steps=6") as job:
            assert job.wait() == ExitCode.USER_ERROR
            assert "actor and critic do not match: this actor is at step 4" in job.log, (
                job.log[-2000:] + server.log[-3000:]
            )
        assert_ended_well(server, server.stop())


KILLED_JOBS = Path(__file__).parent / "killed_jobs"


def run_killed_pair(inputs, folder, monkeypatch, side, save, extra):
    """`run_pair` to step 4 with SIGKILL to one side in its save number `save`; the other ends by
    itself or is stopped.
    """
    limits = ["trainer.ppo.max_steps=4", "trainer.ppo.val_check_interval=2", CONSTANT_RATE]
    scripts = {"critic": "serve_ppo_critic.py", "actor": "train_gpt_ppo_actor.py"}
    monkeypatch.setenv("KILL_IN_SAVE", str(save))
    scripts[side] = str(KILLED_JOBS / scripts[side])
    port = find_free_port()
    with (
        critic(
            inputs, folder, port, 1, "python", CONSTANT_RATE, *extra, script=scripts["critic"]
        ) as server,
        actor(inputs, folder, port, 1, "python", *limits, *extra, script=scripts["actor"]) as job,
    ):
        code = job.wait(240)
        assert code == (-9 if side == "actor" else ExitCode.LOST_PEER), job.log[-3000:]
        if side == "actor":
            assert_ended_well(server, server.stop())
        else:
            assert server.wait(30) == -9, server.log[-3000:]


@pytest.mark.full
def test_a_pair_killed_in_its_saves_continues_with_the_same_commands(
    inputs, whole, tmp_path, monkeypatch
):
    """The actor dies in its first save in the background, then the critic in the one of step 4: no
    argument is changed, and every metric is the same to the bit. (Other saves: tests/chaos.)
    """
    folder, extra = tmp_path / "killed", IN_BACKGROUND
    run_killed_pair(inputs, folder, monkeypatch, "actor", 1, extra)
    assert not list((folder / "actor/checkpoints").glob("*/COMPLETE"))
    # Of the critic's saves the first is that of its first weights.
    run_killed_pair(inputs, folder, monkeypatch, "critic", 2, extra)
    assert len(list((folder / "actor/checkpoints").glob("*/COMPLETE"))) == 2
    run_pair(inputs, folder, 4, extra=extra)
    for side in ("actor", "critic"):
        names = [name for name in metric_names(whole / side) if name != "train/step_time"]
        assert names
        for name in names:
            assert read_metrics(folder / side, name) == read_metrics(whole / side, name), name


@pytest.mark.full
def test_an_actor_that_is_stopped_in_a_step_saves_and_continues(inputs, whole, tmp_path):
    """With the same command, beside the same critic, to the same bits."""
    limits = ["trainer.ppo.max_steps=4", "trainer.ppo.val_check_interval=2", CONSTANT_RATE]
    port, metrics = find_free_port(), tmp_path / "actor/metrics.jsonl"
    with critic(inputs, tmp_path, port, 1, "python", CONSTANT_RATE) as server:
        with actor(inputs, tmp_path, port, 1, "python", *limits) as job:
            wait_until(
                lambda: metrics.exists() and "train_rollouts/" in metrics.read_text(),
                patience(120),
                lambda: job.log[-3000:],
            )
            job.process.send_signal(signal.SIGUSR1)
            assert job.wait(60) == ExitCode.PRE_EMPTED, job.log[-3000:]
            assert not job.leftovers()
        assert "SIGUSR1: the job saves and ends after the running step" in job.log
        ending = json.loads((tmp_path / "actor/ending.json").read_text())
        assert (ending["name"], ending["reason"]) == ("PRE_EMPTED", "SIGUSR1")
        assert 1 <= ending["step"] < 4
        for side in ("actor", "critic"):
            assert len(list((tmp_path / side / "checkpoints").glob("*/COMPLETE"))) >= 1
        with actor(inputs, tmp_path, port, 1, "python", *limits) as job:
            assert_ended_well(job, job.wait(240))
        assert_ended_well(server, server.stop())
    assert json.loads((tmp_path / "critic/ending.json").read_text())["code"] == 0
    for side in ("actor", "critic"):
        for name in metric_names(whole / side):
            if name != "train/step_time":
                expected = read_metrics(whole / side, name)
                assert read_metrics(tmp_path / side, name) == expected, name


@pytest.mark.full  # test_critic_server.py and tests/unit/test_full_disk.py have each side alone
@pytest.mark.parametrize("extra", [(), IN_BACKGROUND], ids=["sync", "async"])
def test_a_critic_without_space_lives_and_goes_back(inputs, whole, tmp_path, monkeypatch, extra):
    """The disk is full when the critic saves step 2: the actor ends with one message, the critic
    goes on serving. The actor's command again: both start at step 0, to the same bits.
    """
    limits = ["trainer.ppo.max_steps=4", "trainer.ppo.val_check_interval=2", CONSTANT_RATE]
    port, script = find_free_port(), str(KILLED_JOBS / "serve_ppo_critic.py")
    monkeypatch.setenv("NO_SPACE_IN_SAVE", "2")
    with critic(
        inputs, tmp_path, port, 1, "python", CONSTANT_RATE, *extra, script=script
    ) as server:
        with actor(inputs, tmp_path, port, 1, "python", *limits, *extra) as job:
            assert job.wait(240) == 1
        message = job.log.split("ERROR: ")[-1]
        assert "no space left (No space left on device) for " in message, job.log[-3000:]
        assert f"{tmp_path}/critic/checkpoints" in message and " MB are needed, " in message
        assert "unexpected pos" not in message
        assert server.process.poll() is None and [
            path.name for path in (tmp_path / "critic/checkpoints").iterdir()
        ] == ["megatron_gpt-step=0"]
        with actor(inputs, tmp_path, port, 1, "python", *limits, *extra) as job:
            assert_ended_well(job, job.wait(240))
        assert "went back to the checkpoint of actor step 0" in server.log
        assert_ended_well(server, server.stop())
    for side in ("actor", "critic"):
        for name in metric_names(whole / side):
            if name != "train/step_time":
                expected = read_metrics(whole / side, name)
                assert read_metrics(tmp_path / side, name) == expected, name


@pytest.mark.full
def test_a_pair_resumes_at_another_split(inputs, whole, half, tmp_path):
    """Two steps of one rank each, then the actor on TP2 and the critic on DP2: as four steps of
    one rank each.
    """
    parts = shutil.copytree(half, tmp_path / "parts")
    run_pair(inputs, parts, 4, 2, 2, ["++model.tensor_model_parallel_size=2"])
    names = metric_names(whole / "actor")
    assert {*COMPARED, "val_rollouts/rewards"} <= {*names}
    for key in names:
        expected, values = read_metrics(whole / "actor", key), read_metrics(parts / "actor", key)
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-5), key


@pytest.mark.full
def test_under_torchrun_its_number_of_processes_counts(inputs, tmp_path):
    """`trainer.devices` stays 1, as in the YAML file."""
    with actor(
        inputs,
        tmp_path,
        find_free_port(),
        2,
        "torchrun",
        "trainer.devices=1",
        "model.global_batch_size=2",
    ) as job:
        assert job.wait(90) == 1
        assert (
            "data parallel size=2" in job.log
            and "trainer.devices" not in job.log.split("ERROR")[-1]
        )
