# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of several turns: the engine against conversations one at a time without a cache, and
what becomes of observations in masks, rewards, advantages and metrics.
"""

import pytest
import torch

from nemo_aligner.algorithms.rollouts import (
    compute_rollout_metrics,
    generated_tokens,
    response_mask,
)
from nemo_aligner.core.advantages import (
    calculate_advantages_and_returns,
    calculate_reinforce_returns,
)
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.types import Scores
from nemo_aligner.generation import GenerationParams, MegatronGenerator, engine
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from tests.cases import some_of
from tests.naive_generation import naive_conversation
from tests.scripted_environment import ScriptedEnvironment, reply_to
from tests.tiny_models import PPO, tiny_config

ROWS, LIMIT, TURNS = 12, 48, 3
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz .,:;")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def actor(request, tiny_tokenizer_dir):
    """A tiny policy with large weights, so that its responses vary."""
    config = tiny_config(tiny_tokenizer_dir, request.param, init_method_std=0.4, ppo=PPO)
    return MegatronGPTActorModel(config)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 1, 9, 4, 4, 7, 2, 9, 1, 5, 8, 6])
    tokens = torch.randint(0, tiny_tokenizer.vocab_size - 1, (ROWS, 9), generator=generator)
    return tokens, lengths, torch.arange(100, 100 + ROWS)


def converse(actor, prompts, params, environment, slots):
    """Samples by place: ids, columns of the responses, rewards, is_end, log-probs."""
    generator = MegatronGenerator(actor.model, actor.tokenizer, LIMIT)
    columns = *prompts, 3 * prompts[2]  # the records
    batches, found = list(zip(*(x.split(3) for x in columns), strict=True)), {}
    for places, output in generator.stream(batches, params, slots, environment):
        for i, place in enumerate(places):
            length, start = int(output.response_lengths[i]), int(prompts[1][place])
            observed = output.observed[i, : length - 1]
            policy = [t for t in range(start - 1, length - 1) if not observed[t]]
            assert not observed[: start - 1].any() and not output.observed[i, length - 1 :].any()
            rewards = output.token_rewards[i]
            assert rewards[length - 1 :].isnan().all()
            found[place] = (
                output.response_tokens[i, :length].tolist(),
                policy,
                {t: rewards[t].item() for t in range(length - 1) if not rewards[t].isnan()},
                bool(output.is_end[i]),
                output.logprobs[i, : length - 1],
            )
    assert not environment.open and not environment.waiting
    return [found[place] for place in range(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.3),
        dict(use_greedy=True, repetition_penalty=1.5),
        dict(temperature=0.9, top_k=40, min_length=2, repetition_penalty=1.2),
    ],
)
@some_of("slots", [1, 5, ROWS], keep=[5])
def test_conversations_are_those_of_a_naive_loop(actor, prompts, options, slots, monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 4)  # observations go in pieces, and together
    monkeypatch.setitem(engine.LOOK_EVERY, "cpu", slots)  # steps beyond the end, as on a GPU
    params = GenerationParams(max_length=7, end_strings=LETTERS, return_logprobs=True, **options)
    environment = ScriptedEnvironment(seed=slots)
    samples = converse(actor, prompts, params, environment, slots)
    turns = []
    for i, (ids, policy, rewards, is_end, logprobs) in enumerate(samples):
        prompt = prompts[0][i, : prompts[1][i]].tolist()
        expected, spans, given, ended = naive_conversation(
            actor, prompt, int(prompts[2][i]), params, reply_to, TURNS, LIMIT
        )
        assert ids == expected
        assert policy == [t - 1 for first, beyond in spans for t in range(first, beyond)]
        assert rewards == pytest.approx(
            {beyond - 2: reward for (_, beyond), reward in zip(spans, given, strict=True)}
        )
        assert is_end == ended
        silent = [t for t in range(len(ids) - 1) if t not in policy]
        assert (logprobs[silent] == 0).all() and (logprobs[policy] < 0).all()
        turns.append(len(spans))
    assert len(set(turns)) > 1 and max(turns) == TURNS
    assert slots == 1 or environment.most_waiting > 1


@pytest.mark.slow
def test_the_samplers_log_probs_are_those_of_the_whole_sample(actor, prompts):
    params = GenerationParams(max_length=7, end_strings=LETTERS, return_logprobs=True)
    environment = ScriptedEnvironment()
    samples = converse(actor, prompts, params, environment, 4)
    for place, (ids, policy, _, _, logprobs) in enumerate(samples):
        assert environment.logprobs[place] == logprobs[policy].tolist()
        whole = actor.get_inference_log_probs(torch.tensor([ids]))[0]
        assert torch.allclose(logprobs[policy], whole[policy], atol=1e-4)


@pytest.mark.slow
def test_a_conversation_ends_where_there_is_no_room(actor, prompts):
    def talkative(prompt, responses):
        return [7] * 20, 0.5, False

    params = GenerationParams(max_length=7, end_strings=LETTERS, return_logprobs=True)
    samples = converse(actor, prompts, params, ScriptedEnvironment(talkative, max_turns=9), 5)
    assert not any(is_end for *_, is_end, _ in samples)
    lengths = [len(ids) for ids, *_ in samples]
    assert max(lengths) <= LIMIT
    for ids, policy, rewards, _, _ in samples:
        earlier = [t for t in rewards if t != policy[-1]]
        last = policy[-1] - (max(earlier) + 20 if earlier else policy[0] - 1)
        assert last == params.max_length or len(ids) + 20 >= LIMIT
        assert set(rewards.values()) == {0.5}


@pytest.mark.slow
def test_a_failed_environment_fails_generation(actor, prompts):
    class Broken(ScriptedEnvironment):
        def replies(self, wait):
            raise UserError("the environment is broken")

    params = GenerationParams(max_length=4)
    with pytest.raises(UserError, match="the environment is broken"):
        converse(actor, prompts, params, Broken(), 4)


# ------------------------------------------------------------------------------- what is learned


def two_turns():
    """A rollout of two samples, S = 9: prompt 2, response 2, observation 2, response 2; and
    prompt 3, response 3.
    """
    nan = float("nan")
    return {
        "response_tokens": torch.arange(18).view(2, 9),
        "prompt_lengths": torch.tensor([2, 3]),
        "response_lengths": torch.tensor([8, 6]),
        "is_end": torch.tensor([True, True]),
        "observed": torch.tensor(
            [[False, False, False, True, True, False, False, False], [False] * 8]
        ),
        "token_rewards": torch.tensor(
            [[nan, nan, 0.25, nan, nan, nan, 1.0, nan], [nan, nan, nan, nan, -2.0, nan, nan, nan]]
        ),
    }


def test_observations_are_not_in_the_mask():
    rollout = two_turns()
    assert response_mask(rollout).tolist() == [[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0]]
    assert generated_tokens(rollout).tolist() == [4, 3]
    scores = Scores(torch.tensor([1.25, -2.0]), token_rewards=rollout["token_rewards"])
    metrics = compute_rollout_metrics(rollout, scores)
    assert metrics["turns"] == 1.5 and metrics["generation_length"] == 3.5


@pytest.mark.parametrize("gamma, lambda_", [(1.0, 0.95), (0.9, 0.7)])
def test_advantages_leave_observations_out(gamma, lambda_):
    """As if the observation's columns were cut out of the sample."""
    generator = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(2, 2, 8, generator=generator)
    values[0, 3:5] = rewards[0, 3:5] = float("nan")
    mask = response_mask(two_turns())
    found = calculate_advantages_and_returns(values, rewards, gamma, lambda_, mask, 0.5)
    returns = calculate_reinforce_returns(rewards, gamma, mask)
    for row, kept in enumerate(mask.bool()):
        v, r = values[row, kept].tolist(), rewards[row, kept].tolist()
        for name, lam, columns in (("advantages", lambda_, found[0]), ("returns", 0.5, found[1])):
            expected, advantage, later = [], 0.0, 0.0
            for value, reward in zip(reversed(v), reversed(r), strict=True):
                advantage = reward + gamma * later - value + gamma * lam * advantage
                later = value
                expected.insert(0, advantage + (value if name == "returns" else 0.0))
            assert columns[row, kept].tolist() == pytest.approx(expected, abs=1e-5), name
        to_come = [sum(gamma**k * later for k, later in enumerate(r[t:])) for t in range(len(r))]
        assert returns[row, kept].tolist() == pytest.approx(to_come, abs=1e-5)
