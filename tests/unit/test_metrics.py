# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Correlations and explained variance from the moments of batches, against numpy on the whole
data.
"""

import numpy as np
import pytest
import torch

from nemo_aligner.core.losses import loss_weights
from nemo_aligner.core.metrics import (
    correlation_moments,
    correlations_from_moments,
    explained_variance_from_moments,
    explained_variance_moments,
)

NAN = float("nan")


def pooled(predictions, labels, mask, sizes):
    """Correlations from batches of `sizes` samples whose moments are averaged, as in
    validation.
    """
    total = torch.zeros(6, labels.size(1), dtype=torch.float64)
    for batch in torch.arange(len(labels)).split(sizes):
        own = {"labels": labels[batch], "weights": loss_weights(mask[batch])}
        moments = correlation_moments(predictions=predictions[batch], **own)
        total += int(mask[batch].sum()) * moments
    return correlations_from_moments(total / int(mask.sum()))


@pytest.mark.parametrize("sizes", [[23], [1, 4, 2, 16], [10, 10, 3]])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_uneven_batches_give_the_correlation_of_the_whole(sizes, offset):
    generator = torch.Generator().manual_seed(0)
    labels = offset + torch.randn(23, 3, generator=generator)
    predictions = 2.0 * labels + 3.0 * torch.randn(23, 3, generator=generator) - offset
    mask = torch.rand(23, 3, generator=generator) > 0.3
    predictions[~mask] = NAN  # what does not count may be anything
    labels[~mask] = NAN
    metrics = pooled(predictions, labels, mask, sizes)
    expected = []
    for a in range(3):
        keep = mask[:, a]
        x, y = predictions[keep, a].double().numpy(), labels[keep, a].double().numpy()
        expected.append(np.corrcoef(x, y)[0, 1])
        assert metrics[f"correlation_{a}"] == pytest.approx(expected[a], abs=1e-7)
    assert metrics["correlation"] == pytest.approx(sum(expected) / 3, abs=1e-7)
    assert set(metrics) == {"correlation", "correlation_0", "correlation_1", "correlation_2"}


@pytest.mark.parametrize("bad", [NAN, float("inf"), -1e200])
def test_predictions_that_are_no_numbers_have_no_good_correlation(bad):
    labels = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    predictions = labels.clone().double()
    predictions[1] = bad
    assert np.isnan(pooled(predictions, labels, torch.ones(4, 1), [2, 2])["correlation"])


def test_what_does_not_vary_has_no_correlation():
    generator = torch.Generator().manual_seed(1)
    vary, same = torch.randn(9, 1, generator=generator), torch.full((9, 1), 0.1234567)
    every = torch.ones(9, 1)
    for predictions, labels, mask in (
        (vary, same, every),
        (same, vary, every),
        (vary, vary, torch.eye(9)[:, :1]),  # one entry alone
    ):
        assert pooled(predictions, labels, mask, [4, 5]) == {}
    # Of several attributes the mean is over those that have one; the third has no label at all.
    predictions, labels = torch.cat([vary, same, vary], 1), torch.cat([vary, vary, vary], 1)
    mask = torch.ones(9, 3)
    mask[:, 2] = 0
    metrics = pooled(predictions, labels, mask, [4, 5])
    assert metrics == {"correlation_0": pytest.approx(1.0), "correlation": pytest.approx(1.0)}


def explained(values, returns, mask, sizes):
    """Explained variance from micro-batches of `sizes` samples whose moments are summed."""
    weights = loss_weights(mask)
    columns = {"values": values, "returns": returns, "weights": weights}
    batches = torch.arange(len(mask)).split(sizes)
    parts = [{name: column[batch] for name, column in columns.items()} for batch in batches]
    return explained_variance_from_moments(sum(explained_variance_moments(**x) for x in parts))


@pytest.mark.parametrize("sizes", [[6], [1, 3, 2]])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_explained_variance_of_any_split_is_that_of_the_whole(sizes, offset):
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(6, 8, generator=generator) > 0.4).float()
    mask[0] = 0
    returns = offset + torch.randn(6, 8, generator=generator)
    values = 0.7 * returns + 0.5 * torch.randn(6, 8, generator=generator) - 3.0
    keep = mask.bool()
    errors = (returns.double() - values.double())[keep].numpy()
    expected = 1 - np.var(errors) / np.var(returns.double()[keep].numpy())
    values[~keep] = returns[~keep] = NAN
    assert explained(values, returns, mask, sizes) == {
        "explained_variance": pytest.approx(expected, abs=1e-6)
    }


def test_explained_variance_by_hand():
    returns, every = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    # Up to a constant; a constant; errors 2, 4, 6.
    for values, expected in ((returns - 5, 1.0), (torch.zeros(1, 3), 0.0), (-returns, -3.0)):
        found = explained(values, returns, every, [1])
        assert found["explained_variance"] == pytest.approx(expected)
    # Nothing to explain; no slot at all; no number.
    assert explained(returns, torch.full((1, 3), 0.1), every, [1]) == {}
    assert explained(returns, returns, torch.zeros(1, 3), [1]) == {}
    assert np.isnan(explained(returns * NAN, returns, every, [1])["explained_variance"])
