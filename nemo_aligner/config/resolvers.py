# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic in the YAML files: `${multiply:a,b}`, `${int_div:a,b}` and `${subtract:a,b}`; and
`${critic_gives_rewards:...}`, whether a critic's server gives the rewards too.
"""

import operator
from typing import Any

from omegaconf import OmegaConf

from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS


def register_resolvers() -> None:
    """Register the resolvers; may be called any number of times."""
    OmegaConf.register_new_resolver("multiply", operator.mul, replace=True)
    OmegaConf.register_new_resolver("int_div", operator.floordiv, replace=True)
    OmegaConf.register_new_resolver("subtract", operator.sub, replace=True)
    OmegaConf.register_new_resolver("critic_gives_rewards", _critic_gives_rewards, replace=True)


def _critic_gives_rewards(estimator: str, *others: Any) -> bool:
    """Whether there is a critic, and none of the `others` gives the rewards."""
    has_critic = estimator not in ADVANTAGE_ESTIMATORS or (
        ADVANTAGE_ESTIMATORS[estimator].needs_critic
    )
    return has_critic and all(other is None for other in others)
