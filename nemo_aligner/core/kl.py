# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KL divergence between two policies from the log-probs of sampled tokens, and the controllers of
its coefficient. Torch only, no ranks. [B, S-1] is per transition, see `nemo_aligner.core.types`.
"""

import math

import torch
from torch import Tensor

from nemo_aligner.core.estimators import KL_ESTIMATORS

# Ziegler et al. 2019 move beta by at most this share (times n / horizon) in one update.
_MAX_RELATIVE_ERROR = 0.2
# A larger exponent says nothing more of the divergence, and its squares or sums overflow float32.
_MAX_K3_EXPONENT = 20.0


def name_kl_estimator(use_absolute_kl: bool, estimator: str | None) -> str:
    """`estimator`, or if it is None the one that NeMo-Aligner's flag means: "abs" or "k1"."""
    if estimator is not None:
        return estimator
    return "abs" if use_absolute_kl else "k1"


def calculate_kl_penalty(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    use_absolute_kl: bool = True,
    estimator: str | None = None,
) -> Tensor:
    """One-sample estimate of KL(a || b) per transition, for tokens that were drawn from a.

    With k1 = log_probs_a - log_probs_b (J. Schulman, "Approximating KL divergence", 2020):

        "k1"   k1                    unbiased; single estimates may be negative
        "abs"  |k1|                  biased, never negative
        "k2"   k1^2 / 2              biased (little where a is close to b), never negative
        "k3"   exp(-k1) - 1 + k1     unbiased, never negative; the exponent is at most 20

    In a reward, with a the policy in training, only "k1" regularises: the update is then the
    gradient of E[reward] - beta KL(a || b). The others also punish a token that is rarer than in
    b, and so make it rarer still, down to probability 0.

    In a loss, what matters is the expected gradient over tokens drawn from a. It is, for "k1": 0,
    so the term adds only noise; for "abs": the gradient of sum |a - b| over the vocabulary, twice
    the total variation; for "k2": the gradient of KL(a || b) of this token, without what it does
    to later ones; for "k3": likewise of KL(b || a). See Tang and Munos 2025, arXiv:2506.09477, and
    Liu et al. 2025, arXiv:2510.01555; `tests/unit/test_kl_optimum.py` derives and measures it.

    All tensors are [B, S-1]. `estimator`: one of `KL_ESTIMATORS`, else `ValueError`; None: "abs"
    or "k1" by `use_absolute_kl`, whose default is NeMo-Aligner's, not the configuration's.
    """
    estimator = name_kl_estimator(use_absolute_kl, estimator)
    k1 = log_probs_a - log_probs_b
    if estimator == "k1":
        return k1
    if estimator == "abs":
        return k1.abs()
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "k3":
        # expm1: for policies that hardly differ, exp(-k1) - 1 would be rounding error.
        return torch.expm1((-k1).clamp(max=_MAX_K3_EXPONENT)) + k1
    raise ValueError(
        f"KL estimator {estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}"
    )


class FixedKLController:
    """A constant coefficient, with the methods of `AdaptiveKLController`."""

    def __init__(self, init_kl_coef: float):
        self.value = float(init_kl_coef)

    def update(self, kl: float, num_samples: int) -> float:
        """Returns `value`, unchanged."""
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Empty: a resumed run takes the coefficient from its configuration."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `state_dict`."""


class AdaptiveKLController:
    """Steers the coefficient beta (`value`) of the KL penalty towards a target KL (Ziegler et al.
    2019, arXiv:1909.08593, 2.2; there n / horizon is K_beta = 0.1). Every rank has one and updates
    it with equal numbers. `ValueError`: a value that is not above 0.

        e = clip(KL / target - 1, -0.2, 0.2),    beta <- beta * (1 + e * n / horizon)

    `target` is the KL per *sample*, summed over its tokens, in nats; `horizon` counts samples.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        given = {"init_kl_coef": init_kl_coef, "target": target, "horizon": horizon}
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name}={value} of an adaptive KL controller must be above 0")
        self.value = float(init_kl_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, num_samples: int) -> float:
        """Adapt to the `kl` of a rollout (means and numbers over all ranks); returns the new
        `value`. `ValueError`: `kl` is not finite, or beta could turn negative.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference is {kl}: its coefficient cannot be adapted")
        if not _MAX_RELATIVE_ERROR * num_samples < self.horizon:
            raise ValueError(
                f"horizon={self.horizon:g} is too short for rollouts of {num_samples} samples: "
                "the KL coefficient could turn negative; it must be above "
                f"{_MAX_RELATIVE_ERROR * num_samples:g}"
            )
        error = min(max(kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= 1.0 + error * num_samples / self.horizon
        return self.value

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold; target and horizon come from the configuration."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of `state_dict()`; an empty state leaves it unchanged."""
        self.value = float(state.get("kl_coef", self.value))
