# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, against loops in plain Python and against the distribution that is asked
for.
"""

import math

import pytest
import torch

from nemo_aligner.generation.sampling import (
    apply_repetition_penalty,
    choose_tokens,
    forbid_tokens,
    invert_cdf,
    keep_top_k,
    keep_top_p,
    sample_uniforms,
    seen_tokens,
)
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


def test_uniforms_do_not_depend_on_neighbours_or_length():
    seeds = torch.arange(20)
    uniforms = sample_uniforms(seeds, 30)
    assert sample_uniforms(seeds.flip(0), 30).flip(0).equal(uniforms)
    assert sample_uniforms(seeds[3:4], 12).equal(uniforms[3:4, :12])


def test_uniforms_are_uniform_within_and_across_streams():
    # Neighbouring seeds, and seeds that are equal in their low 32 bits: all numbers differ and
    # fill [0, 1) evenly.
    for seeds in (torch.arange(500), torch.arange(500) << 32):
        uniforms = sample_uniforms(seeds, 200)
        assert uniforms.min() >= 0 and uniforms.max() < 1
        assert uniforms.unique().numel() == uniforms.numel()
        counts = torch.histc(uniforms.float(), bins=20, min=0, max=1)
        assert ((counts - 5000).abs() < 5 * math.sqrt(5000)).all()
        rows = uniforms - 0.5
        for a, b in ((rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:])):
            assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.numel())


def test_seen_tokens_reads_only_the_prompt():
    tokens = torch.tensor([[1, 1, 4, 2], [0, 3, 3, 3]])
    seen = seen_tokens(tokens, torch.tensor([3, 1]), 5)
    assert seen.int().tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, -INF]])
    seen = torch.tensor([[True, True, False, True]])
    assert apply_repetition_penalty(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, -INF]]


def test_forbid_tokens_only_in_the_given_rows():
    forbidden = forbid_tokens(torch.zeros(2, 4), torch.tensor([1, 3]), torch.tensor([True, False]))
    assert forbidden.tolist() == [[0, -INF, 0, -INF], [0, 0, 0, 0]]


def test_top_k_by_hand():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [5.0, 5.0, 5.0, 1.0]])
    assert keep_top_k(logits, 2).tolist() == [[-INF, 3.0, 2.0, -INF], [5.0, 5.0, 5.0, -INF]]
    assert keep_top_k(logits, 9).equal(logits)


def test_top_p_by_hand():
    # Probabilities 0.5, 0.3, 0.2 in another order.
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    kept = {
        p: keep_top_p(logits, p).isfinite().tolist()[0] for p in (1e-9, 0.4, 0.6, 0.79, 0.81, 1.0)
    }
    assert kept[1e-9] == kept[0.4] == [False, True, False]
    assert kept[0.6] == kept[0.79] == [False, True, True]
    assert kept[0.81] == kept[1.0] == [True, True, True]
    # Equal logits: the smaller ids stay.
    assert keep_top_p(torch.zeros(1, 4), 0.5).isfinite().tolist() == [[True, True, False, False]]


def test_invert_cdf_by_hand_and_at_its_edges():
    logits = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log()
    uniforms = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53]
    drawn = invert_cdf(logits.expand(6, 6), torch.tensor(uniforms, dtype=torch.float64))
    # Ids of probability zero (0, 2, 5) are never drawn, not even by the first and last numbers.
    assert drawn.tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "penalty": 1.4, "forbidden": [2, 5]},
    ],
)
def test_choose_tokens_agrees_with_loops(options):
    rows, vocab = 200, 40
    logits = random_logits(rows, vocab)
    prompts = torch.randint(0, vocab, (rows, 6), generator=torch.Generator().manual_seed(1))
    uniforms = sample_uniforms(torch.arange(rows), 1).squeeze(1)
    too_short = torch.arange(rows) % 2 == 0
    chosen = choose_tokens(
        logits,
        uniforms=uniforms,
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        repetition_penalty=options.get("penalty", 1.0),
        seen=seen_tokens(prompts, torch.full((rows,), 6), vocab),
        end_token_ids=torch.tensor(options.get("forbidden", []), dtype=torch.int64),
        too_short=too_short,
    )
    for row in range(rows):
        here = dict(options, forbidden=options.get("forbidden", []) if too_short[row] else [])
        probabilities = naive_probabilities(logits[row].tolist(), prompts[row].tolist(), **here)
        assert chosen[row] == naive_draw(probabilities, uniforms[row].item()), row


@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}])
def test_draws_follow_the_distribution(options):
    draws = 40_000
    logits = random_logits(1, 12, seed=3) / 2
    expected = torch.tensor(
        naive_probabilities(logits[0].tolist(), [], **options), dtype=torch.float64
    )
    uniforms = sample_uniforms(torch.arange(draws), 1).squeeze(1)
    counts = choose_tokens(logits.expand(draws, 12), uniforms=uniforms, **options).bincount(
        minlength=12
    )
    spread = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() <= 5 * spread).all()
    assert (counts[expected == 0] == 0).all()


def test_greedy_takes_the_likeliest_and_ignores_sampling():
    logits = random_logits(50, 30)
    chosen = choose_tokens(logits, uniforms=None, temperature=9.0, top_k=3, top_p=0.1)
    assert chosen.tolist() == [max(range(30), key=row.__getitem__) for row in logits.tolist()]


@pytest.mark.parametrize("uniforms", [None, torch.full((3,), 0.5, dtype=torch.float64)])
def test_logits_that_are_not_finite_are_reported(uniforms):
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    logits[1] = -INF
    assert choose_tokens(logits, uniforms=uniforms).tolist()[:2] == [-1, -1]
    assert choose_tokens(logits, uniforms=uniforms)[2] >= 0


def test_a_row_is_drawn_alike_alone_and_in_a_batch():
    logits, uniforms = random_logits(64, 500), sample_uniforms(torch.arange(64), 1).squeeze(1)
    options = dict(temperature=0.9, top_k=50, top_p=0.9)
    together = choose_tokens(logits, uniforms=uniforms, **options)
    alone = [
        choose_tokens(logits[i : i + 1], uniforms=uniforms[i : i + 1], **options).item()
        for i in range(64)
    ]
    assert together.tolist() == alone
