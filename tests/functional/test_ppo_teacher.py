# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO with served teachers of the policy as users start it: alone and beside rewards, several
teachers, at two splits, killed and resumed; and a teacher that dies.
"""

import contextlib
import functools
import json

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import (
    assert_same_metrics,
    kill_after_checkpoint,
    kill_and_resume,
    must_end_well,
    read_metrics,
    wait_until_serving,
)
from tests.functional.test_distillation_scripts import served
from tests.functional.test_ppo_job import actor
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.timeout(400)

STEPS = 5
COMPARED = ["train_rollouts/teacher_kl", "train_rollouts/response_lengths", "train_optim/loss"]
COMPARED += ["train_rollouts/teacher_kl_per_sample", "train_optim/grad_norm"]


@pytest.fixture(scope="module")
def other(inputs, tiny_tokenizer_dir):
    """A teacher that is not the policy, and prompts of which every third is for it."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, seed=5)).save_to(f"{inputs}/other.nemo")
    records = [json.loads(line) for line in (inputs / "prompts.jsonl").open()]
    with (inputs / "taught.jsonl").open("w") as file:
        for number, record in enumerate(records):
            name = "same" if number % 3 else "other"
            file.write(json.dumps({**record, "teacher": name}) + "\n")
    return inputs / "other.nemo"


def job(inputs, folder, ports, *extra, ranks=1):
    """Taught alone by as many teachers as there are `ports`."""
    folder.mkdir(exist_ok=True)
    members = [f"{name}: {{port: {port}}}" for name, port in zip(("same", "other"), ports)]
    several = [
        f"remote_teacher.teachers={{{', '.join(members)}}}",
        "remote_teacher.column=teacher",
        f"model.data.data_prefix={{train: [{inputs}/taught.jsonl], validation: "
        f"[{inputs}/prompts.jsonl], test: [{inputs}/prompts.jsonl]}}",
    ]
    settings = ["trainer.ppo.advantage_estimator=teacher"]
    settings += ["trainer.ppo.initial_policy_kl_penalty=0", "trainer.ppo.teacher_kl_coef=1"]
    settings += [f"trainer.ppo.max_steps={STEPS}", "trainer.ppo.val_check_interval=1"]
    settings += ["model.ppo.train_on_truncated=True"]
    settings += several if len(ports) > 1 else [f"remote_teacher.port={ports[0]}"]
    settings += ["remote_teacher.init_timeout_s=60", *extra]
    return actor(inputs, folder, find_free_port(), *settings, ranks=ranks)


def numbers(folder, key):
    return read_metrics(folder / "actor", key)


@pytest.mark.full
def test_teachers_alone_at_two_splits_and_resumed(inputs, other, tmp_path):
    ports = [find_free_port(), find_free_port()]
    with contextlib.ExitStack() as stack:
        for name, model, port in zip(
            ("same", "other"), (inputs / "policy.nemo", other), ports, strict=True
        ):
            server = served(model, tmp_path / f"{name}.log", port, "inference.top_k=1")
            wait_until_serving(stack.enter_context(server))
        whole, two, parts = (tmp_path / name for name in ("whole", "two", "parts"))
        for folder, ranks in ((whole, 1), (two, 2)):
            must_end_well(job(inputs, folder, ports, ranks=ranks))
        kill_and_resume(functools.partial(job, inputs, parts, ports), parts, step=2)
        assert_same_metrics(parts / "actor", whole / "actor", COMPARED)
        for key in COMPARED:
            # Later Adam divides gradients that are rounding errors: where a policy is its teacher.
            first = pytest.approx(numbers(whole, key)[0], rel=1e-4, abs=1e-5)
            assert len(numbers(whole, key)) >= STEPS and numbers(two, key)[0] == first
        assert numbers(whole, "train_rollouts/rewards") == [0.0] * STEPS
        kl = numbers(whole, "train_rollouts/teacher_kl")
        assert kl[0] > 0.01  # by the prompts of the other one

        folder = tmp_path / "wrong"
        with job(inputs, folder, ports, "remote_teacher.column=text") as run:
            assert run.wait(240) and "'text' is 'the film 0', but" in run.log, run.log[-3000:]


@pytest.mark.full
def test_a_teacher_that_dies_while_the_policy_learns(inputs, tmp_path):
    port = find_free_port()
    dies = ["remote_teacher.init_timeout_s=2", "trainer.ppo.max_steps=6"]
    with served(inputs / "policy.nemo", tmp_path / "served.log", port) as server:
        wait_until_serving(server)
        with job(inputs, tmp_path / "dies", [port], *dies) as run:
            kill_after_checkpoint(server, tmp_path / "dies", step=1)
            assert run.wait(120) and "teacher_logits" in run.log.splitlines()[-1], run.log[-3000:]
