# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, against loops in plain Python and against the distribution that is asked
for.
"""

import pytest
import torch

from nemo_aligner.generation.batch import (
    choose_tokens,
    invert_cdf,
    sample_uniforms,
    seen_tokens,
)
from nemo_aligner.generation.interface import GenerationParams
from tests.naive_generation import naive_draw, naive_probabilities, naive_uniform, splitmix64

INF = float("inf")


def random_logits(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_splitmix64_gives_its_published_numbers():
    # First outputs for the seed 1234567, as printed with the reference implementation
    # (rosettacode.org).
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_the_streams_of_their_seeds():
    seeds = torch.tensor([0, 1, 7, 2**40, 2**63 - 1, -5])
    uniforms = sample_uniforms(seeds, 50)
    assert uniforms.dtype == torch.float64
    assert uniforms.tolist() == [
        [naive_uniform(seed, step) for step in range(50)] for seed in seeds.tolist()
    ]


def test_invert_cdf_by_hand_and_at_its_edges():
    logits = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log()
    uniforms = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53]
    drawn = invert_cdf(logits.expand(6, 6), torch.tensor(uniforms, dtype=torch.float64))
    # Ids of probability zero (0, 2, 5) are never drawn, not even by the first and last numbers.
    assert drawn.tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("forbidden", "options"),
    [
        ([], {}),
        ([], {"temperature": 0.5}),
        ([], {"temperature": 2.0, "top_k": 5}),
        ([], {"top_p": 0.7}),
        ([2, 5], {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "penalty": 1.4}),
    ],
)
def test_choose_tokens_agrees_with_loops(forbidden, options):
    rows, vocab = 200, 40
    logits = random_logits(rows, vocab)
    prompts = torch.randint(0, vocab, (rows, 6), generator=torch.Generator().manual_seed(1))
    uniforms = sample_uniforms(torch.arange(rows), 1).squeeze(1)
    too_short = torch.arange(rows) % 2 == 0
    own = {name.replace("penalty", "repetition_penalty"): x for name, x in options.items()}
    chosen = choose_tokens(
        logits,
        GenerationParams(1, **own),
        uniforms,
        seen=seen_tokens(prompts, torch.full((rows,), 6), vocab),
        end_token_ids=torch.tensor(forbidden, dtype=torch.int64),
        too_short=too_short,
    )
    for row in range(rows):
        here = {**options, "forbidden": forbidden if too_short[row] else []}
        probabilities = naive_probabilities(logits[row].tolist(), prompts[row].tolist(), **here)
        assert chosen[row] == naive_draw(probabilities, uniforms[row].item()), row


def test_greedy_takes_the_likeliest_and_ignores_sampling():
    logits = random_logits(50, 30)
    chosen = choose_tokens(logits, GenerationParams(1, temperature=9.0, top_k=3, top_p=0.1), None)
    assert chosen.tolist() == [max(range(30), key=row.__getitem__) for row in logits.tolist()]


@pytest.mark.parametrize("uniforms", [None, torch.full((3,), 0.5, dtype=torch.float64)])
def test_logits_that_are_not_finite_are_reported(uniforms):
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    logits[1] = -INF
    assert choose_tokens(logits, GenerationParams(1), uniforms).tolist()[:2] == [-1, -1]
    assert choose_tokens(logits, GenerationParams(1), uniforms)[2] >= 0
