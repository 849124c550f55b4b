# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics in one process; over ranks they are tested in tests/distributed/test_distributed_utils.py."""

import torch

from nemo_aligner.metrics import Max, Mean, Sum, reduce_metrics


def test_each_kind_reduces_by_its_own_rule():
    nan = float("nan")
    metrics = {
        "weighted": Mean(6.0, 4),
        "masked": Mean.of(torch.tensor([1.0, nan, 5.0]), torch.tensor([1, 0, 1])),
        "plain": Mean.of(torch.tensor([True, False, False, True])),
        "nothing": Mean.of(torch.tensor([nan]), torch.tensor([0])),
        "sum": Sum(torch.tensor(2**24 + 1)),
        "max": Max(torch.tensor(-3.0)),
    }
    reduced = reduce_metrics(metrics)
    assert reduced == {"weighted": 1.5, "masked": 3.0, "plain": 0.5, "nothing": 0.0, "sum": 2**24 + 1, "max": -3.0}
    assert list(reduced) == sorted(metrics)
    assert reduce_metrics({}) == {}


def test_steps_of_unequal_size_weigh_as_they_should():
    first, second = torch.tensor([1.0]), torch.tensor([2.0, 3.0, 6.0])
    total = Mean.of(first) + Mean.of(second)
    assert reduce_metrics({"m": total}) == {"m": 3.0}
    assert reduce_metrics({"s": Sum(1) + Sum(2), "x": Max(1) + Max(2)}) == {"s": 3.0, "x": 2.0}
