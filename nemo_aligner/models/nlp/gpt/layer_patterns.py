# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys that say which layers of a model have something."""

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.core.errors import ConfigError


def layer_pattern(cfg: DictConfig, key: str, least: int, one: str) -> int | list[int]:
    """`model.<key>`, checked: a number of which Megatron Core makes a pattern, or the pattern.

    Args:
        one: what a layer with 1 has or is, for the message.

    Raises:
        ConfigError: another number, or a list that is no pattern of the layers.
    """
    given = cfg[key]
    if OmegaConf.is_list(given):
        given = list(given)
        good = len(given) == cfg.num_layers and set(given) <= {0, 1}
    else:
        good = type(given) is int and given >= least
    if not good:
        raise ConfigError(
            f"model.{key}={given!r} must be a whole number from {least} on, or a list with 1 "
            f"({one}) or 0 for each of the model.num_layers={cfg.num_layers} layers."
        )
    return given
