# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A job whose policy talks to agents in processes of their own: the numbers are those of the same
game as a Python class.
"""

import contextlib
import subprocess
import sys

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests import talking_agent
from tests.functional.jobs import (
    assert_ended_well,
    assert_same_metrics,
    must_end_well,
    read_metrics,
    write_lines,
)
from tests.functional.test_environment_job import COMPARED
from tests.functional.test_ppo_job import without_critic
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
    asked = [[{"role": "user", "content": f"Say {number}"}] for number in range(48)]
    prompts = [{"messages": each, "answer": number} for number, each in enumerate(asked)]
    write_lines(folder / "prompts.jsonl", prompts)
    return folder


def job(inputs, folder, environment, ranks=1, *extra):
    settings = ["trainer.ppo.val_check_interval=2", "trainer.ppo.process_rewards=steps"]
    settings += ["model.encoder_seq_length=96", "model.ppo.train_on_truncated=True"]
    settings += ["model.ppo.length_params.max_length=10", "model.ppo.environment.max_turns=3"]
    settings += (f"model.ppo.environment.{key}={value}" for key, value in environment.items())
    settings += extra
    return without_critic(inputs, folder, *settings, ranks=ranks)


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
    must_end_well(job(inputs, tmp_path / "class", {"path": game}, ranks))
    with job(inputs, tmp_path / "agents", {"port": port}, ranks) as run, players(port, port + 1):
        assert_ended_well(run, run.wait())
    assert_same_metrics(tmp_path / "agents/actor", tmp_path / "class/actor", COMPARED)
    assert max(read_metrics(tmp_path / "agents/actor", "train_rollouts/turns")) > 1
    assert all(read_metrics(tmp_path / "agents/actor", "train_optim/grad_norm"))
