# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of losses by hand, and losses of any split. Naive loops: test_ppo_variants.py; other
libraries: test_oracle_losses.py; NaN in slots that do not count: test_masked_slots.py.
"""

import pytest
import torch

from nemo_aligner.core.losses import loss_weights, regression_loss


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    t, h, q = 1 / 6, 1 / 2, 1 / 3
    close(loss_weights(mask, "token"), [[t, t, 0, 0], [0, t, t, t], [0, 0, 0, 0], [t, 0, 0, 0]])
    rows = [[q * h, q * h, 0, 0], [0, q * q, q * q, q * q], [0] * 4, [q, 0, 0, 0]]
    close(loss_weights(mask, "sequence"), rows)
    a = 1 / 5 / 2  # two micro-batches of 5 and 1 counting slots
    close(loss_weights(mask, "microbatch", 2), [[a, a, 0, 0], [0, a, a, a], [0] * 4, [h, 0, 0, 0]])


def close(actual, expected):
    found, wanted = actual, torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-6)


def test_weights_refuse_what_cannot_be():
    said = "loss_reduction='mean' is unknown; choose one of token, sequence, microbatch"
    with pytest.raises(ValueError, match=said):
        loss_weights(torch.ones(2, 2), "mean")
    with pytest.raises(ValueError, match="micro_batch_size=2 does not divide the 3 samples"):
        loss_weights(torch.ones(3, 2), "microbatch", 2)


def test_counts_travel_in_a_type_that_holds_them():
    """2**24 + 1 tokens over all ranks: float32 would lose the last one."""

    def sum_over_dp(count):
        assert (count + 2**24).item() == 2**24 + 1
        return count

    for reduction in ("token", "sequence", "microbatch"):
        loss_weights(torch.ones(1, 1), reduction, 1, sum_over_dp=sum_over_dp)


def test_regression_loss_does_not_broadcast():
    weights = torch.full((2, 3), 1 / 6)
    for predictions, labels in (((2, 1), (2, 3)), ((2, 3), (2, 1)), ((2,), (2, 3))):
        with pytest.raises(ValueError, match="they must be equal"):
            regression_loss(
                predictions=torch.ones(predictions), labels=torch.ones(labels), weights=weights
            )
