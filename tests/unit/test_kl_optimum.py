# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Does the KL penalty regularise? Problems with a known optimum (`tests/kl_optimum.py`), and the
expected gradients against that of the objective itself.

The gradients by hand, with S(y) = r(y) - beta f(y), k1(y) = log pi(y) - log ref(y), D the
derivative by a logit, and E the mean over y drawn from pi. As E[D log pi] = 0:

    D J              = E[(r - beta k1) D log pi] - beta E[D k1],    E[D k1] = E[D log pi] = 0
    KL in the reward:  E[S D log pi], as updates see S as a number. Equal to D J for f = k1 alone.
                       A baseline changes nothing: E[b D log pi] = 0.
    KL in the loss:  - beta E[D f(k1)] = - beta E[f'(k1) D log pi]
                       k1: 0.    k2 = k1^2 / 2: - beta E[k1 D log pi] = - beta D KL(pi, ref).
                       k3 = exp(-k1) - 1 + k1: beta sum over y of ref(y) D log pi(y)
                                             = - beta D KL(ref, pi).
                       abs: - beta sum of sign(pi - ref) D pi = - beta D sum of |pi - ref|.

In the reward, abs, k2 and k3 grow on *both* sides of pi = ref: a token that is rarer than in the
reference is punished for it and becomes rarer still. Compare J. Schulman, "Approximating KL
divergence", 2020 (estimates of the value), with Tang and Munos, arXiv:2506.09477, Liu et al.,
arXiv:2510.01555, and Shah et al., arXiv:2512.21852 (their gradients).
"""

import functools
import math

import pytest
import torch

from nemo_aligner.algorithms.ppo_data import make_ppo_data
from tests.cases import some_of
from tests.kl_optimum import (
    ESTIMATORS,
    Problem,
    one_token,
    policy_loss,
    rollout,
    settings,
    train,
    two_tokens,
)

PROBLEMS = {"one token": one_token(), "two tokens": two_tokens()}
COMPARING = ("grpo", "rloo")
ENOUGH = 0.95


# ------------------------------------------------------------------------- gradients by autograd


def scores(problem: Problem, logits: torch.Tensor) -> torch.Tensor:
    """r(y) - beta k1(y), the last summed over the tokens of y."""
    gap = problem.logprobs(logits) - problem.logprobs(problem.reference)
    return problem.rewards - problem.beta * gap.sum(-1)


def slope(problem: Problem, logits: torch.Tensor, values=None) -> torch.Tensor:
    """Derivative by the logits of the sum of pi(y) times `values` of y, or of J without them."""
    leaf = logits.clone().requires_grad_()
    values = scores(problem, leaf) if values is None else values
    mean = (problem.logprobs(leaf).sum(-1).exp() * values).sum()
    return torch.autograd.grad(mean, leaf)[0]


# -------------------------------------------------------------------------- gradients of the code


def expected_gradient(
    problem: Problem, logits: torch.Tensor, estimator: str, coef: float = 0.0, **changes
) -> torch.Tensor:
    """Minus the gradient of the project's actor loss, in expectation: every response (every pair,
    for estimators that compare responses) occurs once and weighs as much as it is likely.

    Args:
        coef: of the KL in the loss; above 0 there is none in the reward.
    """
    logits = logits.clone().requires_grad_()
    with torch.no_grad():
        likely, n = problem.logprobs(logits).sum(-1).exp(), len(problem.responses)
        drawn, weights = torch.arange(n), likely
        if estimator in COMPARING:
            drawn = torch.cartesian_prod(drawn, drawn).flatten()
            weights = torch.outer(likely, likely).flatten().repeat_interleave(2) / 2
        scored = rollout(problem, logits, drawn, 2, exact_values(problem, logits))
        changes = {"advantage_estimator": estimator, "normalize_advantages": False, **changes}
        data, _ = make_ppo_data(scored, settings(**changes), 0.0 if coef else problem.beta)
    given = problem.logprobs(logits)[drawn], data, data["mask"] * weights[:, None]
    loss = policy_loss(*given, coef, changes.get("kl_estimator", "k1"))
    return -torch.autograd.grad(loss, logits)[0]


def exact_values(problem: Problem, logits: torch.Tensor) -> torch.Tensor:
    """Of each state, what is still to come on average: a perfect critic's values."""
    policy, reference = problem.logprobs(logits), problem.logprobs(problem.reference)
    to_come = (problem.beta * (reference - policy)).flip(1).cumsum(1).flip(1)
    to_come = to_come + problem.rewards[:, None]
    after_first = policy[:, 1:].sum(-1).exp() * to_come[:, -1]
    start = (policy.sum(-1).exp() * to_come[:, 0]).sum(0, keepdim=True)
    return start if len(logits) == 1 else torch.cat([start, after_first.view(-1, 4).sum(1)])


def some_policy(problem: Problem) -> torch.Tensor:
    noise = torch.randn(problem.reference.shape, generator=torch.Generator().manual_seed(1))
    return problem.reference + 0.7 * noise.double()


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("estimator", ["gae", "rloo", "reinforce_plus_plus"])
def test_expected_update_is_the_gradient_of_the_objective(estimator, problem):
    logits = some_policy(problem)
    exact = slope(problem, logits)
    assert exact.abs().max() > 0.1
    close(expected_gradient(problem, logits, estimator), exact)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_expected_update_of_pairs_divided_by_their_deviation(problem):
    """GRPO with two responses a, b: with d = S_a - S_b the mean is S_a - d / 2 and the deviation
    |d| / sqrt 2, so the advantage of a is (d / 2) / (|d| / sqrt 2 + 1e-6).
    """
    logits = some_policy(problem)
    own = scores(problem, logits)
    apart = own[:, None] - own
    advantages = apart / 2 / (apart.abs() / math.sqrt(2) + 1e-6)
    likely = problem.logprobs(logits).sum(-1).exp()
    exact = slope(problem, logits, advantages @ likely)
    assert exact.abs().max() > 0.05
    close(expected_gradient(problem, logits, "grpo"), exact)


def test_without_a_reward_only_k1_leads_back_to_the_reference():
    """By hand: ref = .5 .5 and pi = .4 .6 have k1 = log .8 = -.22314 and log 1.2 = .18232. The
    derivative of E[S] by the first logit is .4 * .6 * (S_1 - S_2).
    """
    base = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    nothing = Problem(base, torch.zeros(2, dtype=torch.float64), beta=1.0)
    logits = torch.tensor([[0.4, 0.6]], dtype=torch.float64).log()
    in_reward = {"k1": 0.24 * (0.22314 + 0.18232), "abs": 0.24 * (0.18232 - 0.22314)}
    in_reward |= {"k2": 0.24 * (0.18232**2 - 0.22314**2) / 2}
    in_reward |= {"k3": 0.24 * ((1 / 1.2 - 1 + 0.18232) - (1 / 0.8 - 1 - 0.22314))}
    for name, value in in_reward.items():
        assert (value > 0) == (name == "k1")  # the first token is too rare: up is back
        seen = expected_gradient(nothing, logits, "reinforce_plus_plus", kl_estimator=name)
        assert seen[0].tolist() == pytest.approx([value, -value], abs=1e-5), name
    # k2: as k1 in the reward. k3: ref - pi. abs: 2 * .4 * .6.
    in_loss = {"k1": 0.0, "k2": in_reward["k1"], "k3": 0.1, "abs": 0.48}
    for name, value in in_loss.items():
        seen = expected_gradient(nothing, logits, "rloo", coef=1.0, kl_estimator=name)
        assert seen[0].tolist() == pytest.approx([value, -value], abs=1e-5), name


def test_k2_in_the_loss_leaves_out_what_a_token_does_to_later_ones():
    """Of one token it is exact; of two, the first token's gradient lacks the KL of the second."""
    for problem, exact in zip(PROBLEMS.values(), (True, False), strict=True):
        logits = some_policy(problem)
        seen = expected_gradient(problem, logits, "rloo", coef=problem.beta, kl_estimator="k2")
        expected = slope(problem, logits)
        assert torch.allclose(seen, expected, rtol=1e-4, atol=1e-6) == exact
        close(seen[1:], expected[1:])


# ------------------------------------------------------------------------------------ whole runs


def test_the_oracle_by_hand():
    problem = one_token()
    wanted = pytest.approx(0.4 * 0.1 + 0.24 * 0.2 - 0.2 * 0.4 + 0.16 * 2)
    assert problem.objective(problem.reference) == wanted
    weights = [0.4 * math.exp(0.1), 0.24 * math.exp(0.2), 0.2 * math.exp(-0.4), 0.16 * math.exp(2)]
    assert problem.best() == pytest.approx(math.log(sum(weights)))
    assert problem.optimum().tolist() == pytest.approx([w / sum(weights) for w in weights])
    for problem in PROBLEMS.values():
        optimum = problem.optimum()
        logits = optimum.log()[None]
        if len(problem.reference) > 1:
            joint = optimum.view(4, 4)
            logits = torch.cat([joint.sum(1).log()[None], joint.log()])
        assert problem.objective(logits) == pytest.approx(problem.best(), abs=1e-12)
        assert problem.gap_closed(logits) == pytest.approx(1.0)
        assert problem.gap_closed(problem.reference) == 0.0
        for seed in range(5):
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
            assert problem.objective(logits + 0.1 * noise.double()) < problem.best()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@some_of("estimator", ESTIMATORS, keep=["gae", "grpo"])
def test_the_default_reaches_the_optimum(estimator, problem):
    assert problem.gap_closed(train(problem, estimator)) > ENOUGH


@some_of("estimator", ESTIMATORS, keep=["gae", "grpo"])
def test_an_old_file_keeps_its_meaning_and_ends_below_the_start(estimator):
    """`use_absolute_kl: True`: all but the best token are driven to probability 0. That policy has
    J = 2 + log .16 = .167 and KL 1.833; the start has .328, and the optimum's KL is .458.
    """
    problem = one_token()
    logits = train(problem, estimator, use_absolute_kl=True)
    assert problem.gap_closed(logits) < -0.25
    assert problem.objective(logits) == pytest.approx(2 + math.log(0.16), abs=0.05)
    assert problem.kl(logits) == pytest.approx(-math.log(0.16), abs=0.08)
    assert logits.equal(train(problem, estimator, kl_estimator="abs"))


def test_kl_in_the_loss_reaches_the_optimum_of_what_it_penalises():
    """With beta = 1, advantages of their own scale (rloo), and no KL in the reward.

    k1: no penalty at all. k2: pi*. k3, of KL(ref, pi): r + ref / pi is the same for all tokens, so
    pi = ref / (c - r), and c > 2 makes the sum 1. abs, of the sum of |pi - ref|: moving
    probability from a token to another costs 2 and gains the difference of their rewards, which is
    above 2 only for the third (-.4) to the fourth (2).
    """
    problem = one_token()
    reference, rewards = problem.reference.exp()[0].tolist(), problem.rewards.tolist()

    def share(c: float) -> list[float]:
        return [p / (c - r) for p, r in zip(reference, rewards)]

    low, high = 2.0 + 1e-9, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(share(middle)) > 1 else (low, middle)
    expected = {"k1": [0.0, 0.0, 0.0, 1.0], "k2": problem.optimum().tolist()}
    expected |= {"k3": share(low), "abs": [0.40, 0.24, 0.0, 0.36]}
    assert abs(expected["k3"][3] - expected["k2"][3]) > 0.04  # the test can tell them apart
    for name, policy in expected.items():
        logits = train(problem, "rloo", kl_penalty=0.0, kl_loss_coef=1.0, kl_loss_estimator=name)
        assert logits.softmax(-1)[0].tolist() == pytest.approx(policy, abs=0.02), name


@pytest.mark.parametrize("normalized", [True, False])
@some_of("estimator", ESTIMATORS, keep=["gae", "grpo"])
def test_the_coefficient_in_the_loss_is_beta_where_nothing_rescales(estimator, normalized):
    """Rewards and beta ten times smaller have the same optimum."""
    problem = Problem(one_token().reference, one_token().rewards / 10, beta=0.1)
    changes = {"normalize_advantages": normalized}
    options = {"kl_penalty": 0.0, "kl_loss_coef": problem.beta, "kl_loss_estimator": "k2"}
    gap = problem.gap_closed(train(problem, estimator, **options, **changes))
    rescaled_by = settings(advantage_estimator=estimator, **changes).rescaled_by()
    assert gap > ENOUGH if rescaled_by is None else gap < -0.25
