# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a user's configuration before anything expensive is built.

A script calls `check_config(cfg, name)` at its start; `check_loaded` follows once it is known what
the checkpoint says, for only then TP, PP and CP are known for sure, and makes up for the first
where a script has none. Nothing here imports PyTorch or NeMo before it is needed.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import cast

import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config import rules
from nemo_aligner.config.defaults import CONF, complete_config
from nemo_aligner.config.inert_keys import INERT, LATER, ONLY, notes_on, old_form_notes
from nemo_aligner.config.rules import check_values
from nemo_aligner.config.schema import FREE, LIVE
from nemo_aligner.config.values import Values, plain_dict, resolved
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel.environment import is_rank_zero

CHECKED = "nemo_aligner_checked"

# How alike a wrong name and the right one are at least, by `difflib`: of four letters one may be
# wrong; unrelated names rarely share three of four.
ALIKE = 0.75
LIGHTNING_KEYS = {"trainer.max_epochs", "trainer.max_steps"}  # not what a job goes by
# What one job or another starts from.
BASES = {*rules.RESTORE_KEYS.values(), rules.RESTORE_KEY, "pretrained_checkpoint"}
# Names of keys in other libraries, and what they are called here.
COMMON_NAMES = dict(
    pair.split("=")
    for pair in """learning_rate=lr batch_size=global_batch_size train_batch_size=global_batch_size
    per_device_train_batch_size=micro_batch_size epochs=max_epochs num_epochs=max_epochs
    num_train_epochs=max_epochs max_seq_len=encoder_seq_length max_new_tokens=max_length
    beta=ref_policy_kl_penalty model_name_or_path=restore_from_path
    output_dir=explicit_log_dir""".split()
)


def check_config(
    cfg: DictConfig | dict,
    config_name: str,
    *,
    visible_devices: int | None = None,
    env: Mapping[str, str] | None = None,
    may_have_other_keys: bool = False,
    before_notes: Callable[[], None] = lambda: None,
) -> list[str]:
    """Check a user's configuration before anything is built: keys, missing values, combinations;
    `ConfigError` with the key, the value and the remedy.

    Only what the user wrote is checked: a checkpoint's own configuration may hold any key.

    Args:
        cfg: the configuration as Hydra composed it.
        config_name: one of `jobs.JOBS`.
        visible_devices, env: as in `check_values`.
        may_have_other_keys: warn of unknown keys, which a script may read, in place of an error.
        before_notes: further checks; to log takes the seconds in which NeMo is imported.

    Returns:
        Notes about unknown keys, keys without effect, and forms with another meaning
        (`inert_keys.py`); rank 0 also logs them, as one warning each.
    """
    if config_name not in LIVE:
        raise ConfigError(f"config_name={config_name!r} is unknown; use one of {', '.join(LIVE)}.")
    completed = complete_config(cfg, config_name)
    written = plain_dict(completed)
    unknown = unknown_keys(written, config_name) if may_have_other_keys else []
    if not may_have_other_keys:
        check_keys(written, config_name)
    asked = {key for key, value in _walk(written, config_name).items() if value == "???"}
    missing = sorted(asked - INERT[config_name].keys())
    if missing:
        raise ConfigError(
            f"Not set: {', '.join(missing)}; give a value, for example {missing[0]}=..."
        )
    tree = resolved(completed)
    check_sections(tree, config_name)
    check_values(tree, config_name, complete=False, visible_devices=visible_devices, env=env)
    before_notes()
    inert, old = inert_notes(tree, config_name), old_form_notes(Values(tree), config_name)
    nothing = rules.why_nothing_is_kept(Values(tree), config_name)
    lost = [f"{nothing}; save_interval is val_check_interval if it is not given"]
    notes = {
        "This job keeps neither a checkpoint nor a model of what it trains:": lost * bool(nothing),
        "This package reads none of these keys:": unknown,
        "These configuration keys have no effect:": inert,
        "This configuration means something else:": old,
    }
    for title, lines in notes.items():
        if lines and is_rank_zero():
            from nemo.utils import logging  # here: importing NeMo takes seconds

            logging.warning("\n  ".join([title, *lines]))
    if isinstance(cfg, DictConfig):
        cfg._set_flag(CHECKED, True)
    return unknown + inert + old


def check_loaded(
    model_cfg: DictConfig, loaded: DictConfig, restore_path: str | PathLike[str]
) -> None:
    """Check the job with the section `model_cfg`, now that `loaded`, which is this over the
    configuration of the checkpoint at `restore_path`, is known; where `model_cfg` is no part of a
    job do nothing. Without a `check_config` before, that comes first, with a warning of keys that
    are not known: they may be those of the script. `ConfigError` as `check_config`.
    """
    config_name = rules.job_of_model(model_cfg)
    if config_name is None:
        return
    job = cast(DictConfig, model_cfg._get_root())
    is_checked = job._get_flag(CHECKED)
    whole = OmegaConf.create(plain_dict(job), flags={"allow_objects": True})
    key = rules.restore_key(config_name)
    if OmegaConf.select(whole, key, throw_on_missing=False) is None:
        OmegaConf.update(whole, key, str(restore_path), force_add=True)
    if not is_checked:
        check_config(whole, config_name, may_have_other_keys=True)
        job._set_flag(CHECKED, True)
    whole.model = loaded
    check_values(whole, config_name, complete=True)


def unknown_keys(tree: Mapping, config_name: str) -> list[str]:
    """The unknown keys of `tree`, a plain nested dict, each with the nearest known key."""
    known = _known_prefixes(config_name)
    unknown = []
    for key in _walk(tree, config_name):
        if key not in known:
            near = _likely_key(key, config_name)
            unknown.append(f"{key} (did you mean {_place(near, config_name)}?)" if near else key)
    return unknown


def _likely_key(key: str, config_name: str) -> str | None:
    """`nearest_key`, but the job's own for the base of another job and the steps of Lightning."""
    live = LIVE[config_name]
    if key in BASES:
        return rules.restore_key(config_name)
    near = nearest_key(key, live) or ""
    own = f"trainer.{rules.SECTIONS.get(config_name)}.{near.rpartition('.')[2]}"
    if near in LIGHTNING_KEYS and own in live:
        return own
    return nearest_key(key, live - LIGHTNING_KEYS)


def _place(key: str, config_name: str) -> str:
    """`key`, and where it stands in the YAML file of the job, if it does."""
    path = CONF.resolve() / f"{config_name}.yaml"
    node, line = yaml.compose(path.read_text(encoding="utf-8")), 0
    for name in key.split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(mark, value) for mark, value in entries if mark.value == name]
        if not found:
            return key
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{key}, {near}:{line}"


def check_keys(tree: Mapping, config_name: str) -> None:
    """Refuse unknown keys of `tree`, a plain nested dict, all in one message."""
    unknown = unknown_keys(tree, config_name)
    if unknown:
        raise ConfigError(
            f"Unknown configuration key{'s' if len(unknown) > 1 else ''} for {config_name}: "
            f"{'; '.join(unknown)}. Correct or remove it; docs/config.md lists every key."
        )


def nearest_key(key: str, candidates: Iterable[str]) -> str | None:
    """The one of `candidates`, or of the sections that they are in, that `key` was probably meant
    to be: the same name elsewhere, else a sibling of similar name, else a similar name elsewhere.
    A name may also be one of `COMMON_NAMES`. None where nothing is near.
    """
    parent, _, leaf = key.rpartition(".")

    def likeness(candidate: str) -> tuple[float, ...]:
        above, _, name = candidate.rpartition(".")
        names = [name, *(other for other, ours in COMMON_NAMES.items() if ours == name)]
        alike = max(difflib.SequenceMatcher(None, each, leaf).ratio() for each in names)
        whole = difflib.SequenceMatcher(None, candidate, key).ratio()
        near = alike >= ALIKE
        return near, alike == 1, near and above == parent, alike, whole

    found = max(_with_sections(candidates), key=lambda each: (likeness(each), each), default=None)
    return found if found and likeness(found)[0] else None


def check_sections(tree: Mapping, config_name: str) -> None:
    for key, value in _walk(tree, config_name).items():
        if isinstance(value, Mapping) or value is None or re.fullmatch(r"\$\{.*\}", str(value)):
            continue
        if key in FREE or key in LIVE[config_name]:
            continue
        below = sorted(live for live in LIVE[config_name] if live.startswith(f"{key}."))
        if below:
            raise ConfigError(f"{key}={value!r} is a section; set its keys, such as {below[0]}.")


def inert_notes(tree: Mapping, config_name: str) -> list[str]:
    """One line for each key of `tree` that has no effect and whose value asks for something."""
    return notes_on(_walk(tree, config_name), INERT[config_name])


@functools.cache
def _known_prefixes(config_name: str) -> set[str]:
    later = [key for job, key in LATER if job == config_name]
    return _with_sections([*LIVE[config_name], *INERT[config_name], *ONLY, *later])


def _with_sections(keys: Iterable[str]) -> set[str]:
    parts = [key.split(".") for key in keys]
    return {".".join(names[:n]) for names in parts for n in range(1, len(names) + 1)}


def _walk(tree: Mapping, config_name: str, prefix: str = "") -> dict[str, object]:
    """Dotted keys and values of `tree`, but below free, inert, unknown and refused keys."""
    found, known = {}, _known_prefixes(config_name)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found[key] = value
        ends_here = key not in known or key in FREE or key in INERT[config_name]
        ends_here = ends_here or (config_name, key) in LATER or key in ONLY
        if isinstance(value, Mapping) and not ends_here:
            found |= _walk(value, config_name, f"{key}.")
    return found
