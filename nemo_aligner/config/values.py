# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading a configuration's values: a tree by dotted keys, with the checks that every rule
needs.
"""

import math
from collections.abc import Mapping

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.core.errors import ConfigError


def resolved(cfg) -> dict:
    """Plain nested dict of a `DictConfig`; a dict is taken as it is."""
    if not OmegaConf.is_config(cfg):
        return cfg
    cfg = cfg.copy()
    if OmegaConf.select(cfg, "exp_manager.checkpoint_callback_params") is not None:
        # In old YAML files it refers to sizes that only the checkpoint knows. Nobody reads it.
        cfg.exp_manager.checkpoint_callback_params.model_parallel_size = None
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The configuration has a reference that cannot be resolved: {error}"
        ) from error


class Values:
    """Read access to a resolved tree by dotted key; a missing section reads as not set."""

    def __init__(self, tree: Mapping):
        self.tree = tree

    def get(self, key: str, default=None):
        node = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = node[name]
        return default if node is None else node

    def is_null(self, key: str) -> bool:
        """Whether the key, or a section that it is in, was written with the value null."""
        node = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return False
            node = node[name]
            if node is None:
                return True
        return False

    def whole(self, key: str, minimum: int | None = None) -> int | None:
        """A whole number, or None when not set."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key}={value!r} must be a whole number.")
        if minimum is not None and value < minimum:
            raise ConfigError(f"{key}={value} must be at least {minimum}.")
        return value

    def number(
        self, key: str, low: float = -math.inf, high: float = math.inf, *, above: bool = False
    ) -> None:
        """Raise unless the value, where set, is a number in [low, high] (in (low, high] with
        `above`).
        """
        value = self.get(key)
        if value is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise ConfigError(f"{key}={value!r} must be a finite number.")
        if not low <= value <= high or (above and value == low):
            bounds = [f"above {low}" if above else f"at least {low}"] if low > -math.inf else []
            bounds += [f"at most {high}"] if high < math.inf else []
            raise ConfigError(f"{key}={value} must be {' and '.join(bounds)}.")

    def choice(self, key: str, choices: tuple) -> None:
        value = self.get(key)
        if value is not None and value not in choices:
            raise ConfigError(f"{key}={value!r} must be one of {', '.join(choices)}.")

    def port(self, key: str) -> None:
        value = self.whole(key)
        if value is not None and not 1 <= value <= 65535:
            raise ConfigError(f"{key}={value} is not a TCP port; use a number from 1 to 65535.")


def require_multiple(
    name: str, value: int, factors: Mapping[str, int], remedy: str | None = None
) -> None:
    """Raise unless `value` is a positive multiple of the product of `factors` (name -> size).

    Args:
        remedy: what to do; None: the nearest multiples in the place of `value`.
    """
    product = math.prod(factors.values())
    if value > 0 and value % product == 0:
        return
    below, above = value // product * product, (value // product + 1) * product
    nearest = f"{below} or {above}" if below > 0 else f"{above}"
    formula = " x ".join(f"{factor}={size}" for factor, size in factors.items())
    remedy = remedy or f"use {nearest}, or change a factor"
    raise ConfigError(f"{name}={value} must be a multiple of {product} ({formula}); {remedy}.")
