# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration: OmegaConf resolvers, and the checks that run before anything expensive does.

A script calls `check_config(cfg, name)` with the user's configuration first, and
`check_values(cfg, name, complete=True)` once `cfg.model` also holds what the checkpoint says: only
then TP, PP and CP are known for sure. The rules themselves are in `config_rules.py`. Which keys
exist stands in `config_schema.py`; defaults stand in `conf/*.yaml`.
"""

import difflib
import functools
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.rules import check_values
from nemo_aligner.config.schema import ARCHITECTURE_KEYS, CONFIG_NAMES, FREE, INERT, LIVE, ONLY
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel.environment import is_rank_zero

# ---- resolvers --------------------------------------------------------------------------------


def register_resolvers() -> None:
    """Register `${multiply:a,b}`, `${int_div:a,b}` and `${subtract:a,b}`; may be called any number
    of times.
    """
    resolvers = {
        "multiply": lambda a, b: a * b,
        "int_div": lambda a, b: a // b,
        "subtract": lambda a, b: a - b,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


register_resolvers()


def drop_unset(model_cfg: DictConfig) -> DictConfig:
    """Copy of `model_cfg` without the architecture keys that are null: they must not override a
    checkpoint's values.

    Keys that say how the weights look (`num_layers`, `tokenizer.*`, parallel sizes, ...) are null
    in the YAML files to mean "as in the checkpoint". Other keys keep their null.
    """
    tree = OmegaConf.to_container(model_cfg, resolve=False)
    for key in ARCHITECTURE_KEYS:
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.get(parent) or {}
        if leaf in node and node[leaf] is None:
            del node[leaf]
    if tree.get("tokenizer") == {}:
        del tree["tokenizer"]
    copy = OmegaConf.create(tree, flags={"allow_objects": True})
    copy._set_parent(
        model_cfg._get_parent()
    )  # interpolations such as ${trainer.precision} still resolve
    return copy


# ---- keys --------------------------------------------------------------------------------


@functools.cache
def _known_prefixes(config_name: str) -> set[str]:
    """Every known key with all its parents."""
    prefixes = set()
    for key in [*LIVE[config_name], *INERT[config_name], *ONLY]:
        parts = key.split(".")
        prefixes.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return prefixes


def nearest_key(key: str, candidates) -> str | None:
    """The candidate that `key` was probably meant to be.

    In this order: the same name elsewhere, a sibling of similar name, a similar name elsewhere,
    the closest spelling.
    """
    parent, _, leaf = key.rpartition(".")
    parts = [(*c.rpartition(".")[::2], c) for c in sorted(candidates)]  # (parent, name, whole key)

    def similar(pairs, cutoff: float) -> list[str]:
        names = difflib.get_close_matches(leaf, {name for _, name, _ in pairs}, n=1, cutoff=cutoff)
        return [whole for _, name, whole in pairs if name in names]

    siblings = [part for part in parts if part[0] == parent]
    found = (
        similar(parts, 1.0)
        or similar(siblings, 0.75)
        or similar(parts, 0.75)
        or [whole for *_, whole in parts]
    )
    return max(
        found, key=lambda whole: difflib.SequenceMatcher(None, whole, key).ratio(), default=None
    )


def check_keys(tree: Mapping, config_name: str) -> None:
    """Refuse unknown keys of `tree`, a plain nested dict.

    Raises:
        ConfigError: unknown keys, all of them in one message, each with the nearest known key.
    """
    known = _known_prefixes(config_name)
    unknown = []
    for key in _walk(tree, config_name):
        if key not in known:
            suggestion = nearest_key(key, LIVE[config_name])
            unknown.append(key + (f" (did you mean {suggestion}?)" if suggestion else ""))
    if unknown:
        raise ConfigError(
            f"Unknown configuration key{'s' if len(unknown) > 1 else ''} for {config_name}: "
            f"{'; '.join(unknown)}. "
            "Correct or remove it; docs/config.md lists every key."
        )


def check_sections(tree: Mapping, config_name: str) -> None:
    """Refuse a number, text or list in the place of a section of `tree`, a plain nested dict
    without references.
    """
    for key, value in _walk(tree, config_name).items():
        if isinstance(value, Mapping) or value is None or key in FREE or key in LIVE[config_name]:
            continue
        below = sorted(live for live in LIVE[config_name] if live.startswith(f"{key}."))
        if below:
            raise ConfigError(f"{key}={value!r} is a section; set its keys, such as {below[0]}.")


def inert_notes(tree: Mapping, config_name: str) -> list[str]:
    """One line for each key of `tree` that has no effect and whose value asks for something."""
    inert = INERT[config_name]
    notes = []
    for key, value in _walk(tree, config_name).items():
        if key in inert and value is not None and not inert[key].is_neutral(value):
            notes.append(f"{key}={value}: {inert[key].reason}")
    return notes


def _walk(tree: Mapping, config_name: str, prefix: str = "") -> dict:
    """Dotted key -> value for every key of `tree`, but nothing below free, inert and unknown
    keys.
    """
    found, known = {}, _known_prefixes(config_name)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found[key] = value
        if (
            isinstance(value, Mapping)
            and key in known
            and key not in FREE
            and key not in INERT[config_name]
        ):
            found |= _walk(value, config_name, f"{key}.")
    return found


# ---- everything at once --------------------------------------------------------------------------


def check_config(
    cfg, config_name: str, *, visible_devices: int | None = None, env=None
) -> list[str]:
    """Check a user's configuration before anything is built: keys, missing values, combinations.

    Only what the user wrote is checked here: a checkpoint's own configuration may hold any key.

    Args:
        cfg: the configuration as Hydra composed it (`DictConfig` or dict).
        config_name: one of `CONFIG_NAMES`.

    Returns:
        The notes about keys without effect; they are also logged, as one warning, on rank 0.

    Raises:
        ConfigError: with the key, the value and the remedy.
    """
    if config_name not in CONFIG_NAMES:
        raise ConfigError(
            f"config_name={config_name!r} is unknown; use one of {', '.join(CONFIG_NAMES)}."
        )
    cfg = cfg if OmegaConf.is_config(cfg) else OmegaConf.create(cfg)
    written = OmegaConf.to_container(cfg, resolve=False)
    check_keys(written, config_name)
    missing = [key for key, value in _walk(written, config_name).items() if value == "???"]
    if missing:
        raise ConfigError(
            f"Not set: {', '.join(missing)}; give a value, for example {missing[0]}=..."
        )
    tree = resolved(cfg)
    check_sections(tree, config_name)
    check_values(tree, config_name, complete=False, visible_devices=visible_devices, env=env)
    notes = inert_notes(tree, config_name)
    if Values(tree).get("trainer.ppo.trt_llm.enable"):
        notes.append(
            "trainer.ppo.trt_llm.enable=True: TensorRT-LLM is gone; the built-in engine serves "
            "instead"
        )
    if notes and is_rank_zero():
        from nemo.utils import logging  # here: importing NeMo takes seconds

        logging.warning("These configuration keys have no effect:\n  " + "\n  ".join(notes))
    return notes
