# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which keys of a `model` section a model can be built with.

A model's constructor asks, so the same rules hold for scripts, `load_from_nemo` and models that
are built directly. The tables are in `inert_keys.py` and `schema.py`.
"""

import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.inert_keys import INERT, INERT_ARCHITECTURE, ONLY
from nemo_aligner.config.schema import LIVE
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@functools.cache
def known_model_keys() -> frozenset[str]:
    """First names of all keys below `model.` that act, have no effect, or are refused."""
    keys = {key for table in (*LIVE.values(), *INERT.values(), ONLY) for key in table}
    return frozenset(key.split(".")[1] for key in keys if key.startswith("model."))


def has_no_effect(name: str) -> bool:
    """Whether `model.<name>` is a key without effect, in any job."""
    return any(f"model.{name}" in table for table in INERT.values())


def refuse_model_values(values: Values) -> None:
    """Raise `ConfigError` where a key of `ONLY` has a value that is not accepted."""
    for key, (accepted, remedy) in ONLY.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported here: {remedy}.")


def check_model_keys(cfg: DictConfig | Mapping[str, Any]) -> list[str]:
    """Check the keys of the `model` section that a model is built from.

    Args:
        cfg: the section, with what the checkpoint's own configuration says. References in other
            keys than those of the tables are not resolved.

    Returns:
        Notes worth a warning: keys of the network that have no effect, and unknown keys.

    Raises:
        ConfigError: a key has a value that would change the model and is not supported.
    """
    read = {key.split(".")[1] for key in (*ONLY, *INERT_ARCHITECTURE)}
    section = {name: to_plain(cfg[name]) for name in cfg if name in read}
    values = Values({"model": section})
    refuse_model_values(values)
    notes = []
    for key, inert in INERT_ARCHITECTURE.items():
        value = values.get(key)
        if value is not None and not inert.is_neutral(value):
            notes.append(f"{key}={value}: {inert.reason}")
    unknown = sorted(str(name) for name in cfg if name not in known_model_keys())
    if unknown:
        notes.append(f"{', '.join(f'model.{name}' for name in unknown)}: unknown here")
    return notes


def to_plain(value: Any) -> Any:
    """`value` of a `DictConfig` as plain dicts and lists."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
