# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics that are no means, from means that are: correlation of predictions and labels, explained
variance.

A correlation over a whole data set is not the mean of the correlations of its batches. Its moments
are means, and combine over micro-batches, ranks and batches like the loss does; the correlation is
made of them at the very end.

Notation: B rows, A attributes (numbers that are predicted for a row), S padded length.
"""

import math

import torch
from torch import Tensor

_MOMENTS = ("n", "x", "y", "xx", "yy", "xy")
# A variance below this share of the mean square is rounding error of float64 sums.
_NO_VARIANCE = 1e-12


def correlation_moments(
    *, predictions: Tensor, labels: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Weighted sums of 1, x, y, x^2, y^2 and x y for each attribute; x are the predictions, y the
    labels.

    Args:
        predictions: [B, A].
        labels: [B, A].
        weights: [B, A], from `losses.loss_weights`; where they are 0 the others may hold NaN.

    Returns:
        Partial sums, float64 scalars, `moment_<which>_<attribute>`: float32 would lose the small
        variance of large numbers.
    """
    keep = weights != 0
    x, y = (torch.where(keep, values.detach().double(), 0.0) for values in (predictions, labels))
    sums = [
        (weights.double() * moment).sum(0)
        for moment in (torch.ones_like(x), x, y, x * x, y * y, x * y)
    ]
    return {
        f"moment_{name}_{attribute}": value
        for name, values in zip(_MOMENTS, sums, strict=True)
        for attribute, value in enumerate(values)
    }


def correlations_from_moments(metrics: dict[str, float]) -> dict[str, float]:
    """`metrics` with their moments replaced by Pearson's correlation.

    Returns:
        The other metrics and `correlation`: of the one attribute, or the mean over several, which
        are then reported as `correlation_<attribute>` too. Where predictions or labels do not vary
        there is no correlation, and no such key; NaN where a prediction is not finite.
    """
    rest = {key: value for key, value in metrics.items() if not key.startswith("moment_")}
    num_attributes = sum(key.startswith("moment_n_") for key in metrics)
    found = {}
    for attribute in range(num_attributes):
        value = _pearson(*(metrics[f"moment_{name}_{attribute}"] for name in _MOMENTS))
        if value is not None:
            found[f"correlation_{attribute}"] = value
    if found:
        rest["correlation"] = sum(found.values()) / len(found)
    return rest if num_attributes == 1 else rest | found


def _pearson(n: float, x: float, y: float, xx: float, yy: float, xy: float) -> float | None:
    if n <= 0:
        return None
    x, y, xx, yy, xy = (moment / n for moment in (x, y, xx, yy, xy))
    if not all(map(math.isfinite, (x, y, xx, yy, xy))):
        return math.nan  # a prediction was NaN, or too large to square
    var_x, var_y = xx - x * x, yy - y * y
    if var_x <= _NO_VARIANCE * xx or var_y <= _NO_VARIANCE * yy:
        return None
    return max(-1.0, min(1.0, (xy - x * y) / math.sqrt(var_x * var_y)))


def explained_variance_moments(
    *, values: Tensor, returns: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Weighted sums of 1, r, r^2, e and e^2, where r are the returns and e = returns - values the
    critic's errors.

    Args:
        values: [B, S-1], of the critic.
        returns: [B, S-1].
        weights: [B, S-1], from `losses.loss_weights`; where they are 0 the others may hold NaN.

    Returns:
        Partial sums, float64 scalars, `ev_moment_<which>`.
    """
    keep, weights = weights != 0, weights.double()
    v, r = (torch.where(keep, x.detach().double(), 0.0) for x in (values, returns))
    e = r - v
    sums = {"n": torch.ones_like(r), "r": r, "rr": r * r, "e": e, "ee": e * e}
    return {f"ev_moment_{name}": (weights * moment).sum() for name, moment in sums.items()}


def explained_variance_from_moments(metrics: dict[str, float]) -> dict[str, float]:
    """`metrics` with the moments replaced by `explained_variance` = 1 - Var(returns - values) /
    Var(returns).

    1: the critic knows the returns up to a constant; 0: no better than a constant; below 0: worse
    than that. Where the returns do not vary there is nothing to explain, and no such key; NaN
    where a number is not finite.
    """
    rest = {key: value for key, value in metrics.items() if not key.startswith("ev_moment_")}
    n = metrics["ev_moment_n"]
    if n <= 0:
        return rest
    r, rr, e, ee = (metrics[f"ev_moment_{name}"] / n for name in ("r", "rr", "e", "ee"))
    if not all(map(math.isfinite, (r, rr, e, ee))):
        return rest | {"explained_variance": math.nan}
    var_returns = rr - r * r
    if var_returns <= _NO_VARIANCE * rr:
        return rest
    return rest | {"explained_variance": 1.0 - max(ee - e * e, 0.0) / var_returns}
