# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of KTO: plain arithmetic and invariances. test_oracle_losses.py has the
other libraries, test_kto_model.py data set and training.
"""

import math

import pytest
import torch

from nemo_aligner.core.losses import loss_weights
from nemo_aligner.core.preference import kto_loss, kto_statistics

SAMPLES, WIDTH, BETA = 7, 9, 0.4
LENGTHS = torch.tensor([9, 2, 4, 7, 1, 3, 8])  # of the masks; each begins at a column
STARTS = torch.tensor([0, 3, 1, 2, 8, 4, 1])
DESIRABLE = torch.tensor([1.0, 0, 0, 1, 1, 0, 0])
EMPTY = 3  # a sample that does not count


def batch(seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    columns = torch.arange(WIDTH)
    mask = ((columns >= STARTS[:, None]) & (columns < (STARTS + LENGTHS)[:, None])).float()
    logprobs, ref_logprobs = -3 * torch.rand(2, SAMPLES, WIDTH, generator=random).double()
    valid = torch.ones(SAMPLES)
    valid[EMPTY] = 0
    return logprobs, ref_logprobs, mask, valid


def totals(values, mask, average):
    """[SAMPLES], one token after the other."""
    rows = [values[row][mask[row] > 0] for row in range(SAMPLES)]
    return torch.stack([sum(row) / (len(row) if average else 1) for row in rows])


def naive(logprobs, ref_logprobs, mask, valid, point, average, sft_average):
    """The mean over the samples that count."""
    ratios = totals(logprobs, mask, average) - totals(ref_logprobs, mask, average)
    x = BETA * (ratios - point) * (2 * DESIRABLE - 1)
    losses = torch.where(DESIRABLE > 0, 1.3, 0.7) * (1 - 1 / (1 + torch.exp(-x)))
    likelihood = DESIRABLE * totals(logprobs, mask, sft_average)
    return (0.8 * losses - 0.3 * likelihood)[valid > 0].mean()


SETTINGS = dict(beta=BETA, desirable_loss_weight=1.3, undesirable_loss_weight=0.7)
SETTINGS |= dict(preference_loss_weight=0.8, sft_loss_weight=0.3)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("point", [0.0, 1.7])
def test_loss_and_gradient_are_those_of_plain_arithmetic(average, point):
    logprobs, ref_logprobs, mask, valid = batch()
    theirs = logprobs.clone().requires_grad_()
    expected = naive(theirs, ref_logprobs, mask, valid, point, average, not average)
    expected.backward()

    unused = (mask == 0) | (valid == 0)[:, None]
    ours, reference = (torch.where(unused, torch.nan, x).float() for x in (logprobs, ref_logprobs))
    ours.requires_grad_()
    options = {"desirable": DESIRABLE, "average_log_probs": average, **SETTINGS}
    options |= {"sft_average_log_probs": not average, "reference_point": torch.tensor(point)}
    weights = loss_weights(valid)
    loss, metrics = kto_loss(
        logprobs=ours, ref_logprobs=reference, mask=mask, weights=weights, **options
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-4)
    assert all(math.isfinite(value) for value in metrics.values())


def test_parts_of_a_batch_sum_to_the_batch_and_statistics_are_means_of_each_kind():
    logprobs, ref_logprobs, mask, valid = batch()
    weights = loss_weights(valid)

    def numbers(rows):
        columns = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask}
        columns |= {"weights": weights, "desirable": DESIRABLE}
        columns = {name: column[rows] for name, column in columns.items()}
        return kto_loss(**columns, reference_point=torch.tensor(0.5), **SETTINGS)[1]

    whole = numbers(list(range(SAMPLES)))
    parts = [numbers(rows) for rows in ([6], [2, 0], [1, 3], [5, 4])]
    for name, value in whole.items():
        assert sum(part[name] for part in parts).item() == pytest.approx(value.item(), rel=1e-5)

    found = kto_statistics({name: value.item() for name, value in whole.items()})
    totals = {"logprobs": (logprobs * mask).sum(1)}
    totals["rewards"] = ratios = totals["logprobs"] - (ref_logprobs * mask).sum(1)
    rest = [0, 1, 2, 4, 5, 6]
    expected = {"rewards_all_mean": ratios[rest].mean(), "desirable_fraction": 2 / 6}
    for kind, rows in {"chosen": [0, 4], "rejected": [1, 2, 5, 6]}.items():
        expected |= {f"{name}_{kind}_mean": each[rows].mean() for name, each in totals.items()}
    expected["rewards_all_std"] = ratios[rest].std(correction=0)
    expected["acc"] = ((ratios > 0.5) == (DESIRABLE > 0))[rest].double().mean()
    margin = expected["rewards_chosen_mean"] - expected["rewards_rejected_mean"]
    for name, value in (expected | {"rewards_margin": margin}).items():
        assert found[name] == pytest.approx(float(value), rel=1e-5), name


def test_a_sample_far_from_the_point_keeps_a_gradient():
    """1 - s(x) is 0 in float32 from x = 17 on; s(-x) is not."""
    leaf = torch.full((1, 1), 30.0, requires_grad=True)
    shape = torch.ones(1, 1)
    one = {"weights": torch.ones(1), "desirable": torch.ones(1), "beta": 1.0}
    one |= {"ref_logprobs": torch.zeros(1, 1), "reference_point": torch.tensor(0.0)}
    loss, _ = kto_loss(logprobs=leaf, mask=shape, **one)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(-30), rel=1e-5)
    assert leaf.grad.item() == pytest.approx(-math.exp(-30), rel=1e-5)
