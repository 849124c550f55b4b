# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KL estimators by hand, and controllers. test_oracles.py has those of other libraries, and
test_kl_optimum.py gradients.
"""

import math

import pytest
import torch

from nemo_aligner.core.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    calculate_kl_penalty,
)

NAN = float("nan")


def test_values_by_hand():
    a, b = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -0.5])  # log ratios 1 and -1.5
    expected = {"k1": [1.0, -1.5], "abs": [1.0, 1.5], "k2": [0.5, 1.125]}
    expected["k3"] = [math.exp(-1.0) - 1 + 1, math.exp(1.5) - 1 - 1.5]
    assert set(expected) == set(KL_ESTIMATORS)
    for estimator, values in expected.items():
        found = calculate_kl_penalty(a, b, estimator=estimator)
        assert found.tolist() == pytest.approx(values, rel=1e-6)
    # The flag decides only where no estimator is named.
    assert calculate_kl_penalty(a, b).tolist() == [1.0, 1.5]
    assert calculate_kl_penalty(a, b, use_absolute_kl=False).tolist() == [1.0, -1.5]
    assert calculate_kl_penalty(a, b, True, "k1").tolist() == [1.0, -1.5]


def test_small_differences_are_not_lost_in_float32():
    gap = torch.tensor([1e-3, -1e-3, 3e-5])
    k3 = calculate_kl_penalty(torch.zeros(3), -gap, estimator="k3")
    expected = [math.expm1(-x) + x for x in gap.double().tolist()]
    torch.testing.assert_close(k3, torch.tensor(expected), rtol=2e-2, atol=1e-12)
    assert calculate_kl_penalty(gap, gap, estimator="k3").tolist() == [0.0, 0.0, 0.0]


def test_k3_of_a_token_that_the_policy_forgot_stays_finite():
    forgotten = torch.tensor([-100.0], requires_grad=True)
    k3 = calculate_kl_penalty(forgotten, torch.tensor([0.0]), estimator="k3")
    assert k3.item() == pytest.approx(math.exp(20) - 1 - 100)
    assert torch.autograd.grad(k3, forgotten)[0].tolist() == [1.0]


def test_controllers_resume():
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    assert controller.value == 0.2
    controller.update(9.0, 512)
    again = AdaptiveKLController(0.2, 6.0, 10000)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value != 0.2
    assert again.update(7.0, 512) == controller.update(7.0, 512)
    # From a run with a fixed coefficient to an adaptive one, and back: the configuration's is the
    # start.
    fixed = FixedKLController(0.05)
    assert fixed.update(100.0, 512) == fixed.value == 0.05
    again = AdaptiveKLController(0.3, 6.0, 10000)
    again.load_state_dict(fixed.state_dict())
    fixed.load_state_dict(controller.state_dict())
    assert (again.value, fixed.value) == (0.3, 0.05)


def test_what_an_adaptive_controller_cannot_do_is_refused():
    for arguments in ((0.0, 6.0, 100), (0.1, 0.0, 100), (0.1, 6.0, -1)):
        with pytest.raises(ValueError, match="must be above 0"):
            AdaptiveKLController(*arguments)
    controller = AdaptiveKLController(0.1, 6.0, 100)
    said = "horizon=100 is too short for rollouts of 512 samples.*above 102.4"
    with pytest.raises(ValueError, match=said):
        controller.update(6.0, 512)
    for kl in (NAN, math.inf):
        with pytest.raises(ValueError, match="cannot be adapted"):
            controller.update(kl, 64)
    assert controller.value == 0.1
