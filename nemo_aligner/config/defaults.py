# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Completes a partial or older configuration from the YAML files, where every default stands.

Called at the edge, by scripts and constructors; code behind it reads plain values (`cfg.key`).

* `complete_config`: a whole configuration of a job, by its script.
* `complete`: one section, by the constructor that receives it.
* `complete_model`: a `model` section, by the constructor of a model. Keys whose null means "as in
  the checkpoint" and keys that no job's YAML has come from `conf/model_fallbacks.yaml`.

What a configuration gives wins. A null in it is kept, with three exceptions: a section that is
null reads as a section without keys, except `alarms` (null switches them off); a null key of
`model_fallbacks.yaml` takes the value there; and so does a key of `NULL_IS_DEFAULT`.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.resolvers import register_resolvers
from nemo_aligner.config.schema import FREE
from nemo_aligner.core.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf"  # of a checkout: a link to conf/ of the repository
FALLBACKS = "model_fallbacks"

# Keys for which null has no meaning of its own and reads as "the default".
NULL_IS_DEFAULT = ("model.loss_reduction", "model.forward_micro_batch_size")
# Keys of a job's YAML that a section completed alone does not take from there.
NOT_FROM_JOB = ("model.precision", "model.optim")
# Sections of `model` that belong to a job rather than to a model.
JOB_SECTIONS = ("data", "overwrite_base_config", "optim")
# Sections that a user gives as a whole, and those that null switches off.
WHOLE = FREE
OFF_WHEN_NULL = (
    "trainer.ppo.alarms",
    "trainer.rs.alarms",
    "trainer.rm.alarms",
    "trainer.sft.alarms",
)

register_resolvers()


def complete_config(cfg: DictConfig | dict, config_name: str) -> DictConfig:
    """Copy of a job's configuration in which each missing key has the value of
    `conf/<config_name>.yaml`; references stay references.

    Below `model.optim` nothing is added to a schedule, and no schedule to an optimizer that has
    none: see `conf/model_fallbacks.yaml`.
    """
    result = _copy(cfg)
    defaults = _job_tree(config_name)
    if OmegaConf.select(result, "model.optim", throw_on_missing=False) is not None:
        defaults = defaults | {"model": {**defaults["model"], "optim": {}}}
    _fill(result, defaults, nulls=lambda key: False)
    return result


def complete(cfg: DictConfig | dict | None, config_name: str | None, section: str) -> DictConfig:
    """Copy of `cfg`, the section called `section` (`trainer.ppo`, `remote_rm`, ...), in which each
    missing key has its default in the YAML file of the job; None: in `conf/model_fallbacks.yaml`.

    A default that refers to another key gets that key's value: of the completed section, of the
    configuration that `cfg` is a part of, or of the YAML file, in this order. The copy keeps the
    parent of `cfg`, so that references in `cfg` resolve as before.

    Raises:
        ConfigError: a default refers to a key that has no value.
    """
    return _complete(cfg, config_name, section, leave_out=())


def complete_model(cfg: DictConfig | dict, config_name: str | None = None) -> DictConfig:
    """Copy of a `model` section in which each key that a model of the job `config_name` reads has
    a value; None: of the bare language model.

    The sections that belong to a job (`data`, ...) are left as they are; `optim` is completed
    where it is given.
    """
    return _complete(cfg, config_name, "model", leave_out=JOB_SECTIONS)


def _complete(
    cfg: DictConfig | dict | None,
    config_name: str | None,
    section: str,
    leave_out: tuple[str, ...],
) -> DictConfig:
    result = _copy({} if cfg is None else cfg)
    tree = _section_tree(config_name)
    defaults = functools.reduce(lambda node, name: node.get(name) or {}, section.split("."), tree)
    absent = [key for key in leave_out if key not in result]
    defaults = {key: value for key, value in defaults.items() if key not in absent}
    added = _fill(result, defaults, nulls=_reads_as_default, prefix=f"{section}.")
    references = [key for key in added if OmegaConf.is_interpolation(*_leaf(result, key))]
    if references:
        _resolve(result, references, tree, section)
    return result


def _fill(
    result: DictConfig,
    defaults: Mapping,
    nulls: Callable[[str], bool],
    prefix: str = "",
    path: str = "",
) -> list[str]:
    """Add to `result` what only `defaults` has; returns the added leaves by their dotted keys.

    Args:
        nulls: whether a null at a dotted key reads as the default.
        prefix: dotted key of the whole section, with a dot at its end.
        path: likewise, of `result` in the section.
    """
    added = []
    for name, default in defaults.items():
        key = f"{prefix}{path}{name}"
        if name not in result.keys():  # `in result` leaves out what is "???"
            OmegaConf.update(result, name, copy.deepcopy(default), force_add=True)
            added += _leaves(default, f"{path}{name}")
        elif OmegaConf.is_interpolation(result, name) or OmegaConf.is_missing(result, name):
            continue
        elif result[name] is None:
            is_section = isinstance(default, Mapping) and key not in (*WHOLE, *OFF_WHEN_NULL)
            if default is not None and (is_section or nulls(key)):
                OmegaConf.update(result, name, copy.deepcopy(default))
                added += _leaves(default, f"{path}{name}")
        elif isinstance(default, Mapping) and isinstance(result[name], DictConfig):
            if key not in WHOLE:
                added += _fill(result[name], default, nulls, prefix, f"{path}{name}.")
    return added


def _leaves(value: object, path: str) -> list[str]:
    """Dotted keys of the leaves of `value`, which stands at `path`."""
    if not isinstance(value, Mapping):
        return [path]
    return [leaf for name, child in value.items() for leaf in _leaves(child, f"{path}.{name}")]


def _leaf(cfg: DictConfig, key: str) -> tuple[DictConfig, str]:
    """The node that holds `key`, and the last name of `key`."""
    parent, _, name = key.rpartition(".")
    return (OmegaConf.select(cfg, parent) if parent else cfg), name


def _resolve(result: DictConfig, references: list[str], tree: Mapping, section: str) -> None:
    """Put values in the place of the added `references`, in `result`."""
    whole = OmegaConf.create(copy.deepcopy(tree), flags={"allow_objects": True})
    root = result._get_root()
    if root is not result:
        whole = OmegaConf.merge(whole, root)
    OmegaConf.update(whole, section, result, force_add=True)
    for key in references:
        try:
            value = OmegaConf.select(whole, f"{section}.{key}")
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, TypeError) as error:
            raise ConfigError(
                f"{section}.{key} is not set, and its default cannot be computed: "
                f"{str(error).splitlines()[0]}"
            ) from error
        node, name = _leaf(result, key)
        OmegaConf.update(node, name, value)


def _copy(cfg: DictConfig | dict) -> DictConfig:
    """Deep copy with the parent of `cfg`, whose structure may be extended."""
    if not OmegaConf.is_config(cfg):
        return OmegaConf.create(cfg, flags={"allow_objects": True})
    return copy.deepcopy(cfg)


def _reads_as_default(key: str) -> bool:
    """Whether a null at `key` reads as its default."""
    return key in NULL_IS_DEFAULT or key in _fallback_keys()


@functools.cache
def _fallback_keys() -> frozenset[str]:
    return frozenset(_leaves(_tree(FALLBACKS)["model"], "model"))


@functools.cache
def _tree(name: str) -> dict:
    """`conf/<name>.yaml` as a plain dict with its references; not to be changed."""
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=False)


@functools.cache
def _job_tree(config_name: str) -> dict:
    """The defaults of a job, without Hydra's own list."""
    return {key: value for key, value in _tree(config_name).items() if key != "defaults"}


@functools.cache
def _section_tree(config_name: str | None) -> dict:
    """The defaults of a job's sections: its YAML file over the fallbacks of the model."""
    tree = {} if config_name is None else copy.deepcopy(_job_tree(config_name))
    for key in NOT_FROM_JOB:
        tree.get("model", {}).pop(key.removeprefix("model."), None)
    result = OmegaConf.create(tree)
    _fill(result, _tree(FALLBACKS), nulls=lambda key: True)
    return OmegaConf.to_container(result, resolve=False)
