# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic in the YAML files: `${multiply:a,b}`, `${int_div:a,b}` and `${subtract:a,b}`."""

import operator

from omegaconf import OmegaConf


def register_resolvers() -> None:
    """Register the resolvers; may be called any number of times."""
    OmegaConf.register_new_resolver("multiply", operator.mul, replace=True)
    OmegaConf.register_new_resolver("int_div", operator.floordiv, replace=True)
    OmegaConf.register_new_resolver("subtract", operator.sub, replace=True)
