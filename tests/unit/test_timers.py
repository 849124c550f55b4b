# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Timers, with a clock that the tests move."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from nemo_aligner.core.errors import UserError
from nemo_aligner.training import schedule
from nemo_aligner.training.schedule import ScopedTimer, SyncTimer, Timer


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
    assert timer.consume_durations() == {"inner": 1.0, "generate": 3.0}
    assert timer.consume_durations() == {}


def test_an_unconsumed_name_is_refused_before_its_scope_runs(clock):
    timer = ScopedTimer()
    with timer("a"):
        pass
    with pytest.raises(ValueError, match="'a' already holds a duration"):
        with timer("a"):
            raise AssertionError("must not run")


@pytest.mark.parametrize(
    "reduction,expected", [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0)]
)
def test_reduction_of_several_durations(clock, reduction, expected):
    timer = SyncTimer(reduction=reduction, buffer_size=-1)
    for seconds in (1, 2, 3):
        with timer("a"):
            clock.s += seconds
    assert timer.consume_durations() == {"a": expected}


def test_a_scope_that_raises_leaves_no_duration(clock):
    timer = ScopedTimer()
    with pytest.raises(KeyError):
        with timer("a"):
            raise KeyError
    assert timer.consume_durations() == {}


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
