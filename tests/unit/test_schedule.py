# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps per epoch, limits, and when to validate, save and stop; and timers, with a clock that the
tests move.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.training import schedule
from nemo_aligner.training.schedule import (
    ScopedTimer,
    SyncTimer,
    Timer,
    check_progress,
    compute_limit_batches,
    compute_num_steps_per_epoch,
)


def test_limit_batches():
    for number, limit, expected in (
        *((10, None, 10), (10, 1.0, 10), (100, 0.29, 29), (10, 0.01, 1)),
        *((10, 0.0, 0), (10, 4, 4), (3, 40, 3)),
    ):
        assert compute_limit_batches(number, limit) == expected, (number, limit)
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


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now.s)
    return now


def test_durations_are_consumed_once(clock):
    timer = ScopedTimer()
    with timer("generate"):
        clock.s += 2
        with timer("inner"):
            clock.s += 1
    with pytest.raises(KeyError), timer("of an error"):
        raise KeyError
    with pytest.raises(ValueError, match="'inner' already holds a duration"), timer("inner"):
        raise AssertionError("must not run")
    assert timer.consume_durations() == {"inner": 1.0, "generate": 3.0}
    assert timer.consume_durations() == {}


@pytest.mark.parametrize(
    "reduction,expected", [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0)]
)
def test_reduction_of_several_durations(clock, reduction, expected):
    timer = SyncTimer(reduction=reduction, buffer_size=-1)
    for seconds in (1, 2, 3):
        with timer("a"):
            clock.s += seconds
    assert timer.consume_durations() == {"a": expected}


def test_budget(clock):
    timer = Timer("01:02:03:04")
    assert timer.duration_s == 86400 + 2 * 3600 + 3 * 60 + 4
    clock.s += 10**6
    assert not timer.is_finished()  # not started
    timer.start_time()
    clock.s += timer.duration_s - 1
    timer.start_time()  # of the next epoch: the budget is the run's
    assert not timer.is_finished()
    clock.s += 1
    assert timer.is_finished()
    assert not Timer(None).is_finished()
    assert Timer(timedelta(hours=1)).duration_s == 3600


@pytest.mark.parametrize("bad", ["1:00:00", "00:00:-1:00", "three hours", 90])
def test_bad_budget_names_the_value_and_the_form(bad):
    with pytest.raises(UserError, match=f"{bad}.*DD:HH:MM:SS"):
        Timer(bad)
