# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Least squares for measured costs: power laws, and sums of terms with costs of zero or more."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls


@dataclass
class PowerLaw:
    """y = factor * x ** exponent.

    Attributes:
        residuals: measured over fitted less 1, of each point.
    """

    factor: float
    exponent: float
    residuals: NDArray[np.float64]

    @property
    def worst(self) -> float:
        """The residual farthest from 0."""
        return float(self.residuals[np.abs(self.residuals).argmax()])


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law nearest to the points in the square of the logarithm.

    Args:
        x, y: positive; at least two different x.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    columns = np.stack([np.log(xs), np.ones_like(xs)], axis=1)
    (exponent, constant), *_ = np.linalg.lstsq(columns, np.log(ys), rcond=None)
    fitted = np.exp(columns @ [exponent, constant])
    return PowerLaw(float(np.exp(constant)), float(exponent), ys / fitted - 1)


def costs_of_terms(
    terms: Sequence[Sequence[float]], y: Sequence[float]
) -> tuple[list[float], NDArray[np.float64]]:
    """The cost of each term, none below 0, for which the sums are nearest to y in the square of
    the relative error.

    Args:
        terms: of each measurement, how often each term occurs.
        y: what each measurement cost.

    Returns:
        (costs, measured over fitted less 1 of each measurement).
    """
    counts, ys = np.asarray(terms, float), np.asarray(y, float)
    weighted = counts / ys[:, None]
    scale = weighted.max(axis=0)
    costs, _ = nnls(weighted / scale, np.ones_like(ys))
    costs = costs / scale
    return costs.tolist(), ys / (counts @ costs) - 1
