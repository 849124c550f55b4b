# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps per epoch, limits, and when to validate, save and stop."""

from types import SimpleNamespace

import pytest

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.training.schedule import (
    check_progress,
    compute_limit_batches,
    compute_num_steps_per_epoch,
)


@pytest.mark.parametrize(
    "number,limit,expected",
    [
        (10, None, 10),
        (10, 1.0, 10),
        (100, 0.29, 29),
        (10, 0.01, 1),
        (10, 0.0, 0),
        (10, 4, 4),
        (3, 40, 3),
    ],
)
def test_limit_batches(number, limit, expected):
    assert compute_limit_batches(number, limit) == expected


def test_limit_batches_refuses():
    with pytest.raises(ConfigError, match="3.0.*write 3 without"):
        compute_limit_batches(10, 3.0)
    with pytest.raises(ConfigError, match="-1 must not be negative"):
        compute_limit_batches(10, -1)


def test_steps_per_epoch():
    sampler = SimpleNamespace(total_samples=103, global_batch_size=10, drop_last=True)
    assert compute_num_steps_per_epoch(sampler) == 10
    assert compute_num_steps_per_epoch(sampler, 0.5) == 5
    assert compute_num_steps_per_epoch(sampler, 3) == 3
    sampler.drop_last = False
    with pytest.raises(ConfigError, match="drop_last"):
        compute_num_steps_per_epoch(sampler)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        # step, max_steps, val_check_interval, save_interval, limit_val_batches, run_time_exceeded,
        # must_save
        ((1, 10, 2, 4, 1.0), (False, False, False)),
        ((2, 10, 2, 4, 1.0), (True, False, False)),
        ((4, 10, 2, 4, 1.0), (True, True, False)),
        ((9, 9, 2, 4, 1.0), (True, True, True)),
        ((3, 10, 2, 4, 1.0, True), (True, True, False)),
        ((3, 10, 2, 4, 1.0, False, True), (False, True, False)),
        ((4, 10, 2, 4, 0), (False, True, False)),
        ((4, 10, 2, 4, 0.0), (False, True, False)),
        ((4, 10, -1, 4, 1.0), (False, True, False)),
        ((4, 4, 2, -1, 1.0), (True, False, True)),
        ((4, 4, 0, 0, 1.0), (False, False, True)),
        ((6, 10, 4, 3, 0), (False, True, False)),
    ],
)
def test_check_progress(arguments, expected):
    assert check_progress(*arguments) == expected
