# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How often one policy beats another, also at equal length, and how sure that is; N pairs, K
weightings.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Weight of the square of the length effect in its fit: without it, pairs that one length separates
# would make it infinite (arXiv 2404.04475, section 4, regularizes it too).
LENGTH_EFFECT_PENALTY = 0.1
_STEPS = 200  # Newton steps at most; a dozen is usual
_CHUNK = 2**21  # elements of a `[K, N]` tensor that are computed at once


def wins(rewards: Tensor, other_rewards: Tensor) -> Tensor:
    """float64 `[N]`: 1 where the first response has the higher reward, 0.5 if equal, else 0."""
    return (1.0 + torch.sign(rewards.double() - other_rewards.double())) / 2


def length_controlled_win_rate(
    won: Tensor, length_difference: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The win rate, float64 `[K]`, that remains if both responses to each prompt are equally long,
    by AlpacaEval 2 (Dubois et al., arXiv 2404.04475, equation 2) for two policies. Modelled is

        p = sigmoid(theta + phi * tanh(d / std(d))),    d = difference in length,

    theta and phi maximize the likelihood of the pairs, and the win rate at d = 0 is
    sigmoid(theta). Deviations: there is no term for how hard a prompt is, which needs the results
    of many policies; phi has a small quadratic penalty in place of the paper's penalty towards
    artificial baselines. Where all differences are equal, the result is the plain win rate.

    Args:
        won: `[N]`, 1 where the first policy won, 0 where the second did, 0.5 for a tie.
        length_difference: `[N]`, length of the first policy's response less the second's.
        weights: `[K, N]`, how often each pair counts; None: once, and K = 1.
    """
    won, difference = won.double(), length_difference.double()
    if weights is None:
        weights = torch.ones_like(won).unsqueeze(0)
    rows = max(_CHUNK // max(won.numel(), 1), 1)
    parts = torch.split(weights.double(), rows)
    return torch.cat([_at_equal_length(won, difference, part) for part in parts])


def _at_equal_length(won: Tensor, difference: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum(1)
    plain = (weights * won).sum(1) / total
    mean = ((weights * difference).sum(1) / total).unsqueeze(1)
    std = ((weights * (difference - mean) ** 2).sum(1) / total).sqrt()
    # Newton's method has nothing to find where one side won every pair, or d is constant.
    scale = difference.abs().max().clamp(min=1.0)
    fits = (plain > 0) & (plain < 1) & (std > 1e-9 * scale)
    result = plain.clone()
    if fits.any():
        effect = torch.tanh(difference / std[fits].unsqueeze(1))
        result[fits] = _fit(won, effect, weights[fits])
    return result


def _fit(won: Tensor, effect: Tensor, weights: Tensor) -> Tensor:
    """sigmoid(theta) `[K]` at the maximum of the penalized likelihood; `effect` is `[K, N]`.
    Damped Newton steps: the function is strictly concave, so halving a step leads there.
    """
    theta = torch.zeros(len(weights), dtype=torch.float64, device=won.device)
    phi = torch.zeros_like(theta)

    def objective(theta: Tensor, phi: Tensor) -> Tensor:
        logits = theta.unsqueeze(1) + phi.unsqueeze(1) * effect
        likelihood = won * logits - torch.nn.functional.softplus(logits)
        return (weights * likelihood).sum(1) - LENGTH_EFFECT_PENALTY / 2 * phi**2

    value = objective(theta, phi)
    for _ in range(_STEPS):
        chance = torch.sigmoid(theta.unsqueeze(1) + phi.unsqueeze(1) * effect)
        error, spread = weights * (won - chance), weights * chance * (1 - chance)
        gradient = error.sum(1), (error * effect).sum(1) - LENGTH_EFFECT_PENALTY * phi
        a, b = spread.sum(1), (spread * effect).sum(1)
        c = (spread * effect**2).sum(1) + LENGTH_EFFECT_PENALTY
        determinant = a * c - b * b
        step_theta = (c * gradient[0] - b * gradient[1]) / determinant
        step_phi = (a * gradient[1] - b * gradient[0]) / determinant
        if max(step_theta.abs().max(), step_phi.abs().max()) < 1e-10:
            break
        size = torch.ones_like(theta)
        for _halving in range(60):
            new = objective(theta + size * step_theta, phi + size * step_phi)
            worse = new < value - 1e-12 * value.abs()
            if not worse.any():
                break
            size = torch.where(worse, size / 2, size)
        theta, phi = theta + size * step_theta, phi + size * step_phi
        value = objective(theta, phi)
    return torch.sigmoid(theta)


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """float64 `[K]`: mean of `values` `[N]` under `weights` `[K, N]`; None: the plain one."""
    values = values.double()
    if weights is None:
        return values.mean().unsqueeze(0)
    return weights.double() @ values / weights.double().sum(1)


def resample(groups: Tensor, resamples: int, seed: int) -> Tensor:
    """Weights float64 `[K, N]`, how often each pair was drawn, of a bootstrap of K `resamples`
    that draws prompts with replacement, as many as there are, each with all its responses.
    `groups` int64 `[N]`: the number of the prompt of each pair, from 0. The same draws serve every
    measure, so that differences between two policies are compared prompt by prompt.
    """
    count = int(groups.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(count, (resamples, count), generator=generator)
    drawn = torch.zeros(resamples, count, dtype=torch.float64)
    drawn.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    return drawn[:, groups]


def bootstrap_interval(
    statistic: Callable[[Tensor], Tensor], weights: Tensor, confidence: float
) -> tuple[float, float]:
    """The percentile interval (lower, upper end; Efron and Tibshirani 1993, chapter 13) of a
    statistic, a map of weights of `resample` to its K values; `confidence`: share inside.
    """
    values = statistic(weights)
    tail = (1 - confidence) / 2
    ends = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype))
    return float(ends[0]), float(ends[1])
