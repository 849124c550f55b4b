# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A job whose policy talks to agents in processes of their own: the numbers are those of the same
game as a Python class.
"""

import contextlib
import json
import subprocess
import sys

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests import talking_agent
from tests.functional.jobs import assert_ended_well, must_fail_with, read_metrics
from tests.functional.test_environment_job import COMPARED
from tests.functional.test_ppo_job import actor
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_tokenizer_dir):
    """A policy whose tokenizer has a chat template, and conversations."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    folder = tmp_path_factory.mktemp("agents")
    tokenizer = talking_agent.write_tokenizer(tiny_tokenizer_dir, folder / "tokenizer")
    sizes = {"encoder_seq_length": 96, "max_position_embeddings": 96}
    MegatronGPTModel(tiny_config(tokenizer, seed=3, **sizes)).save_to(str(folder / "policy.nemo"))
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(48):
            messages = [{"role": "user", "content": f"Say {number}"}]
            file.write(json.dumps({"messages": messages, "answer": number}) + "\n")
    return folder


def job(inputs, folder, environment, ranks=1, *extra):
    folder.mkdir(exist_ok=True)
    return actor(
        inputs,
        folder,
        find_free_port(),
        ranks,
        "python",
        "trainer.ppo.advantage_estimator=grpo",
        "trainer.ppo.val_check_interval=2",
        "trainer.ppo.process_rewards=steps",
        "model.encoder_seq_length=96",
        "model.ppo.train_on_truncated=True",
        "model.ppo.num_rollout_samples=4",
        "model.ppo.num_rollouts_per_prompt=4",
        "model.ppo.rollout_micro_batch_size=2",
        "model.ppo.length_params.max_length=10",
        "model.ppo.environment.max_turns=3",
        *(f"model.ppo.environment.{key}={value}" for key, value in environment.items()),
        *extra,
    )


@contextlib.contextmanager
def players(*ports):
    """Two agents at each port, for as long as a job is there."""
    with contextlib.ExitStack() as stack:
        for port in ports * 2:
            program = [sys.executable, talking_agent.__file__, str(port)]
            stack.callback(stack.enter_context(subprocess.Popen(program)).kill)
        yield


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_agents_train_as_the_same_game_does_as_a_class(inputs, tmp_path, ranks):
    game, port = f"{talking_agent.__file__}:Talk", find_free_port()
    with job(inputs, tmp_path / "class", {"path": game}, ranks) as run:
        assert_ended_well(run, run.wait())
    with job(inputs, tmp_path / "agents", {"port": port}, ranks) as run, players(port, port + 1):
        assert_ended_well(run, run.wait())
    for key in COMPARED:
        expected = read_metrics(tmp_path / "class/actor", key)
        assert expected and read_metrics(tmp_path / "agents/actor", key) == expected, key
    assert max(read_metrics(tmp_path / "agents/actor", "train_rollouts/turns")) > 1
    assert all(read_metrics(tmp_path / "agents/actor", "train_optim/grad_norm"))


@pytest.mark.full
@pytest.mark.parametrize(
    "override, words",
    [
        ("remote_critic_rm.init_timeout_s=1", ["2 session(s) wait", "ppo.environment.port"]),
        ("model.data.chat_template=null", ["needs prompts that are conversations", "['text']"]),
    ],
)
def test_a_job_that_cannot_talk_ends_with_one_line(inputs, tmp_path, override, words):
    if "template" in override:
        (tmp_path / "prompts.jsonl").write_text('{"text": "Say"}\n' * 48)
        (tmp_path / "policy.nemo").symlink_to(inputs / "policy.nemo")
        inputs = tmp_path
    environment = {"port": find_free_port()}
    must_fail_with(job(inputs, tmp_path / "job", environment, 2, override), *words)
