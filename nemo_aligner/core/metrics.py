# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics that are not means, computed from moments, which are: correlation of predictions and
labels, explained variance. The moments (weighted sums of x, y, x^2, ...) are summed over
micro-batches and ranks and averaged over batches as the loss is; the metric comes last.

Notation: B samples, A attributes (numbers predicted for a sample), S padded length.
"""

import math

import torch
from torch import Tensor

# A variance below this share of the mean square is rounding error of float64 sums.
_NO_VARIANCE = 1e-12


def correlation_moments(*, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """float64 [6, A] for `correlations_from_moments`: sums over the samples, weighted [B, A], of
    1, x, x^2, x y, y and y^2, with x the predictions and y the labels [B, A]. float32 would lose
    the small variance of large numbers. Where weights are 0 both may be NaN.
    """
    keep = weights != 0
    x, y = (torch.where(keep, values.detach().double(), 0.0) for values in (predictions, labels))
    terms = (torch.ones_like(x), x, x * x, x * y, y, y * y)
    return torch.stack([(weights.double() * term).sum(0) for term in terms])


def correlations_from_moments(moments: Tensor) -> dict[str, float]:
    """Pearson's correlation, from sums or means of `correlation_moments`: `correlation` of the
    only attribute, or the mean over several, which then have `correlation_<attribute>` too. No key
    for an attribute whose predictions or labels do not vary; NaN where a prediction is not finite.
    """
    by_attribute = {
        attribute: value
        for attribute, sums in enumerate(moments.T.tolist())
        if (value := _pearson(*sums)) is not None
    }
    if not by_attribute:
        return {}
    found = {"correlation": sum(by_attribute.values()) / len(by_attribute)}
    if moments.size(1) > 1:
        found |= {f"correlation_{attribute}": value for attribute, value in by_attribute.items()}
    return found


def _pearson(n: float, x: float, xx: float, xy: float, y: float, yy: float) -> float | None:
    if n <= 0:
        return None
    x, xx, xy, y, yy = (moment / n for moment in (x, xx, xy, y, yy))
    if not all(map(math.isfinite, (x, xx, xy, y, yy))):
        return math.nan  # a prediction was NaN, or too large to square
    var_x, var_y = xx - x * x, yy - y * y
    if var_x <= _NO_VARIANCE * xx or var_y <= _NO_VARIANCE * yy:
        return None
    return max(-1.0, min(1.0, (xy - x * y) / math.sqrt(var_x * var_y)))


def explained_variance_moments(*, values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
    """float64 [5] for `explained_variance_from_moments`: weighted sums of e, e^2, 1, r and r^2,
    with r the `returns` [B, S-1] and e = returns - values. Where weights are 0 both may be NaN.
    """
    keep = weights != 0
    v, r = (torch.where(keep, x.detach().double(), 0.0) for x in (values, returns))
    e = r - v
    return torch.stack(
        [(weights.double() * term).sum() for term in (e, e * e, torch.ones_like(r), r, r * r)]
    )


def explained_variance_from_moments(moments: Tensor) -> dict[str, float]:
    """`explained_variance` = 1 - Var(returns - values) / Var(returns), from sums of
    `explained_variance_moments`; no key where the returns do not vary, NaN where a number is not
    finite. 1: the critic knows the returns up to a constant; 0: it is as good as a constant.
    """
    e, ee, n, r, rr = moments.tolist()
    if n <= 0:
        return {}
    e, ee, r, rr = (moment / n for moment in (e, ee, r, rr))
    if not all(map(math.isfinite, (e, ee, r, rr))):
        return {"explained_variance": math.nan}
    var_returns = rr - r * r
    if var_returns <= _NO_VARIANCE * rr:
        return {}
    return {"explained_variance": 1.0 - max(ee - e * e, 0.0) / var_returns}
