# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Our clients and jobs against servers that are not ours: a critic with exactly NeMo-Aligner's
endpoints, and a reward server as users write it.

Expected numbers come from torch on the same weights, and from loops.
"""

import contextlib
import json

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from tests.functional import test_ppo_job, test_rs_job
from tests.functional.critic_job import TinyTokenizer, build_model
from tests.functional.jobs import assert_ended_well, read_metrics, remote_rm
from tests.functional.nemo_aligner_server import RAISE, NeMoAlignerCritic, initial_weights
from tests.functional.test_critic_server import (
    client_config,
    expected_scores,
    expected_update,
    make_training_data,
)
from tests.functional.triton_process import TritonProcess

pytestmark = pytest.mark.timeout(600)
COUNTED = 42  # the token that the server counts


SERVER = """
import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def score(tokens, sequence_lengths):  # int64 [N, S], int64 [N, 1]
    real = np.arange(tokens.shape[1]) < sequence_lengths
    return {"rewards": ((tokens == 42) & real).sum(1, keepdims=True).astype(np.float32)}


with Triton(config=TritonConfig(http_port=PORT)) as triton:
    inputs = [Tensor(name=n, dtype=np.int64, shape=(-1,)) for n in ("tokens", "sequence_lengths")]
    outputs = [Tensor(name="rewards", dtype=np.float32, shape=(1,))]
    triton.bind(model_name="reward_model", infer_func=score, inputs=inputs, outputs=outputs)
    triton.serve()
"""


class UsersRewardServer(TritonProcess):
    """One as users write it, with what docs/rewards.md says that it needs."""

    def __init__(self):
        super().__init__("reward_model")
        script = self.directory / "server.py"
        script.write_text(SERVER.replace("PORT", str(self.port)))
        self.run_python(str(script))


@pytest.fixture(scope="module")
def critic():
    with NeMoAlignerCritic() as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def reward_server():
    with UsersRewardServer() as server:
        server.wait_until_ready()
        yield server


def torch_critic():
    """The critic of nemo_aligner_server.py in torch."""
    model = build_model()
    model.embedding.data, model.value.data, model.reward = map(torch.tensor, initial_weights())
    return model


def rollout(rows=3, width=7):
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(1, 28, (rows, width), generator=generator)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    prompts = torch.ones(rows).long()
    return {"response_tokens": tokens, "response_lengths": lengths, "prompt_lengths": prompts}


def test_a_critic_of_nemo_aligner_scores_trains_and_saves(critic, warnings):
    """Exactly its own inputs reach it, and the numbers are right before and after an update."""
    mirror, batch = torch_critic(), rollout()
    with contextlib.closing(
        RemoteGPTRMCriticClient(client_config(critic, pad_to_length=10), TinyTokenizer)
    ) as client:
        about_tokenizers = [line for line in warnings if "'critic_infer'" in line]
        assert len(about_tokenizers) == len(warnings) == 1
        assert "has no input 'tokenizer'" in warnings[0] and str(critic.port) in warnings[0]
        client.check_status(7, {7: "/actor/step=7"})
        assert len(warnings) == 2 and "'critic_status'" in warnings[1]
        assert "resume from the same step is not checked" in warnings[1]

        def assert_scores():
            scores = client.infer_rm_critic(batch).scores()
            rewards, values = expected_scores(mirror, *[*batch.values()][:2])
            assert torch.equal(scores.rewards.cpu(), rewards)
            assert scores.values.shape == (3, 6)
            expected = values[:, :-1]
            torch.testing.assert_close(scores.values.cpu(), expected, rtol=1e-5, atol=1e-5)

        assert_scores()
        data = make_training_data(rows=6, width=9)  # updates of 4 and 2 samples
        training = {"response_tokens": data["tokens"], "values": data["prev_values"], **data}
        halves = [{k: v[rows] for k, v in data.items()} for rows in (slice(0, 4), slice(4, 6))]
        losses = [expected_update(mirror, half, gbs=4) for half in halves]
        assert client.train(training).result() == pytest.approx(losses[-1], rel=1e-4)
        assert_scores()
        assert client.save(actor_step=3).result() == 0
        saved = np.load(critic.record.with_suffix(".npz"))
        learned = mirror.embedding.detach().numpy()
        np.testing.assert_allclose(saved["embedding"], learned, rtol=1e-4, atol=1e-5)

        training["response_tokens"] = torch.full_like(data["tokens"], RAISE)
        with pytest.raises(ServerRequestError, match="a token it cannot stand"):
            client.train(training).result()

    width = 1 + max(int(column) for column in data["mask"].nonzero()[:, 1]) + 1
    lengths = {"sequence_lengths": ["int64", [3, 1]]}
    scoring = ["critic_infer", {"tokens": ["int64", [3, 10]], **lengths}]
    transitions = ["float32", [6, width - 1]]
    training_form = ["critic_train", {"tokens": ["int64", [6, width]]}]
    training_form[1] |= dict.fromkeys(("returns", "prev_values", "mask"), transitions)
    assert critic.requests() == [
        scoring,
        training_form,
        scoring,
        ["critic_save", {"dummy_var": ["int64", [1]]}],
        training_form,  # failed, and not sent again
    ]


@pytest.mark.full
def test_the_reward_server_of_the_docs_scores_any_number_of_samples(reward_server, warnings):
    """It takes four samples at once, PyTriton's default: ten go in three requests."""
    batch = rollout(rows=10)
    batch["response_tokens"][::2, :4] = COUNTED
    client = RemoteGPTRMClient(remote_rm(reward_server.port), TinyTokenizer)
    with contextlib.closing(client) as client:
        rewards = client.infer_rm(batch).scores().rewards
    expected = [
        float(sum(int(token) == COUNTED for token in row[:length]))
        for row, length in zip(batch["response_tokens"], batch["response_lengths"])
    ]
    assert rewards.tolist() == expected and max(expected) > 0
    assert len(warnings) == 1 and "has no input 'tokenizer'" in warnings[0]


def lines_of(job, text):
    return [line for line in job.log.splitlines() if text in line]


def separate(reward_server):
    own = "ip=127.0.0.1", f"port={reward_server.port}"
    own = [f"remote_critic_rm.reward_model.{setting}" for setting in own]
    return ["remote_critic_rm.combine_rm_and_critic_server=False", *own]


@pytest.mark.full
@pytest.mark.parametrize("combined, ranks", [(True, 1), (False, 2)])
def test_ppo_runs_with_a_critic_of_nemo_aligner(inputs, tmp_path, reward_server, combined, ranks):
    """Rewards from the critic, or from the server of the docs with two data-parallel ranks."""
    with NeMoAlignerCritic(combined) as server:
        server.wait_until_ready()
        extra = [] if combined else separate(reward_server)
        with test_ppo_job.actor(inputs, tmp_path, server.port, *extra, ranks=ranks) as job:
            assert_ended_well(job, job.wait(240))
            assert len(lines_of(job, "has no endpoint 'critic_status'")) == 1
        sent = [endpoint for endpoint, _ in server.requests()]
        assert sent.count("critic_train") == 3 and "critic_save" in sent
    losses = read_metrics(tmp_path / "actor", "train_optim/critic_loss")
    assert len(losses) == 3 and all(np.isfinite(losses)) and len(set(losses)) == 3
    rewards = read_metrics(tmp_path / "actor", "train_rollouts/rewards")
    assert len(rewards) == 3 and (combined or all(reward >= 0 for reward in rewards))


@pytest.mark.full
def test_rejection_sampling_runs_with_the_server_of_the_docs(inputs, tmp_path, reward_server):
    with test_rs_job.actor(inputs, tmp_path, reward_server.port) as job:
        assert_ended_well(job, job.wait(240))
        assert len(lines_of(job, "has no input 'tokenizer'")) == 1
    assert len(read_metrics(tmp_path / "actor", "train_optim/loss")) == 6
    samples = [json.loads(line) for line in (tmp_path / "actor/val_samples.jsonl").open()]
    assert samples and all(sample["reward"] == int(sample["reward"]) for sample in samples)
