# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What is refused of a user's own loss, and how (that one trains: functional/)."""

import sys

import pytest
import torch

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.launch.rollout_job import own_function

FILE = """
import beside
def good(x, mask): return beside.TWO * x * mask
def short(x, mask): return x.sum()
def number(x, mask): return 0.5
def detached(x, mask): return x.detach()
def other(y): return y
async def late(x, mask): return x
class Loss: pass
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("TWO = 2\n")
    (tmp_path / "mine.py").write_text(FILE)
    return lambda name: own_function(f"{tmp_path / 'mine.py'}:{name}", "a.loss", ("x", "mask"))


def test_a_function_is_called_by_names(named, tmp_path):
    first = sys.path[0]
    x = torch.ones(2, 3, requires_grad=True)
    named("good")(x=x, mask=torch.ones(2, 3)).sum().backward()
    named("good")
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    # A `logging.py` beside it must not hide Python's from what is imported later.
    assert sys.path[0] == first and sys.path.count(str(tmp_path)) == 1
    assert own_function(None, "a.loss", ("x",)) is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("other", "unexpected keyword argument 'x'|missing a required argument: 'y'"),
        ("late", r"it is async. It is called as late\(x=..., mask=...\)"),
        ("nothing", "no function 'nothing'; it has good, short"),
        ("Loss", "is no function|called as Loss"),
    ],
)
def test_what_cannot_be_called_is_refused_at_start(named, name, message):
    with pytest.raises(ConfigError, match=rf"(?s)a\.loss=.*mine\.py:{name}.*({message})"):
        named(name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("short", r"returns the shape \[\]; .* of x, \[2, 3\]"),
        ("number", "returns the type float"),
        ("detached", "without gradient; compute it from x"),
    ],
)
def test_what_it_returns_is_checked(named, name, message):
    with pytest.raises(ConfigError, match=rf"a\.loss=.*:{name} .*{message}"):
        named(name)(x=torch.ones(2, 3, requires_grad=True), mask=torch.ones(2, 3))
