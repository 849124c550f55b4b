# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Completes a partial or older configuration with the defaults of its keys.

* `complete_config`: a whole configuration of a job, by its script.
* `complete`: one section, by the constructor that receives it.
* `complete_model`: a `model` section, by the constructor of a model. Keys whose null means "as in
  the checkpoint" and keys that no job gives a default have their `fallback`.

A value that is given wins, null included, with two exceptions. A null section reads as one without
keys, except `alarms` and `exp_manager` (null switches them off); `complete_config` leaves it null
where a key below needs a value, so that the checks can say so. In the other two, a null key with a
fallback, or of `NULL_IS_DEFAULT`, takes its default.
"""

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.fields import ABSENT, Configuration, tree_of
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.jobs.supervised import RMModel
from nemo_aligner.config.keys.model import TrainedModel
from nemo_aligner.config.schema import ARCHITECTURE_KEYS, FREE, REQUIRED
from nemo_aligner.config.values import Values, laid_over, leaves, plain_dict
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS


def register_resolvers() -> None:
    """Register what the YAML files compute with; may be called any number of times."""
    resolvers = {"multiply": operator.mul, "int_div": operator.floordiv, "subtract": operator.sub}
    for name, function in (resolvers | {"critic_gives_rewards": _critic_gives_rewards}).items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _critic_gives_rewards(estimator: str, *others: Any) -> bool:
    """Whether there is a critic, and none of the `others` gives the rewards."""
    kind = ADVANTAGE_ESTIMATORS.get(estimator)
    return (kind is None or kind.needs_critic) and all(other is None for other in others)


CONF = Path(__file__).parents[1] / "conf"  # in a checkout a link to conf/ of the repository

NULL_IS_DEFAULT = ("model.loss_reduction", "model.data.train_ds.prompt_template")
# Jobs that compare log-probs in training with those of inference, or learn from single numbers: a
# dropout of the checkpoint's pretraining would be noise in them.
WITHOUT_DROPOUT = tuple(
    name
    for name, job in JOBS.items()
    if job.algo and job.keys["model.hidden_dropout"].default is ABSENT
)
OFF_WHEN_NULL = (
    *(f"trainer.{job.algo}.alarms" for job in JOBS.values() if job.algo),
    "exp_manager",
)


class _Trees(dict):
    """The group `all_keys` of Hydra's store, from which the YAML files take the keys that they do
    not show (their `defaults`): a job's are made when they are asked for.
    """

    def __getitem__(self, file: str) -> ConfigNode:
        node = OmegaConf.create(JOBS[file.removesuffix(".yaml")].tree)
        return ConfigNode(file, node, "all_keys", package=None, provider=None)


register_resolvers()
ConfigStore.instance().repo["all_keys"] = _Trees.fromkeys(f"{name}.yaml" for name in JOBS)
# Hydra copies its sources, and the store, for each group that --help lists, which takes seconds.
# There is one store, and what it gives away are copies.
ConfigStore.__deepcopy__ = lambda store, _: store


def complete_config(cfg: DictConfig | dict, config_name: str) -> DictConfig:
    """Copy of a job's configuration in which each missing key has its default; references stay
    references. A given optimizer is left as it is: a rate and its schedule belong together.
    """
    result = _copy(cfg)
    defaults = JOBS[config_name].tree
    if OmegaConf.select(result, "model.optim", throw_on_missing=False) is not None:
        defaults = defaults | {"model": {**defaults["model"], "optim": {}}}

    def is_default(key: str, default: object) -> bool:
        needs_value = any(required.startswith(f"{key}.") for required in REQUIRED[config_name])
        return isinstance(default, Mapping) and not needs_value

    return _add(result, _missing(plain_dict(result), defaults, is_default))


def complete(cfg: DictConfig | dict | None, config_name: str | None, section: str) -> DictConfig:
    """Copy of `cfg`, the section called `section` (`trainer.ppo`, `remote_rm`, ...), in which each
    missing key has its default in the job; None: its fallback.

    A default that refers to another key gets that key's value: of the completed section, of the
    configuration that `cfg` is a part of, or of the job, in this order; `ConfigError`: it has
    none. The copy keeps the parent of `cfg`, so references in `cfg` resolve as before.
    """
    result = _copy({} if cfg is None else cfg)
    tree = _section_tree(config_name)
    defaults = Values(tree).get(section, {})
    if section == "model":  # these belong to a job
        absent = {"data", "overwrite_base_config", "optim"} - set(result)
        defaults = {key: value for key, value in defaults.items() if key not in absent}

    nullable = {*NULL_IS_DEFAULT, *dict(leaves(_fallbacks(RMModel), "model."))}

    def is_default(key: str, default: object) -> bool:
        return isinstance(default, Mapping) or key in nullable

    added = _missing(plain_dict(result), defaults, is_default, prefix=f"{section}.")
    _add(result, added)
    references = [key for key, value in leaves(added) if "${" in str(value)]
    if references:
        _resolve(result, references, tree, section)
    return result


def complete_model(cfg: DictConfig | dict, config_name: str | None = None) -> DictConfig:
    """Copy of a `model` section in which each key that a model of the job `config_name` reads has
    a value; None: a model of any kind, outside a job. `data` and `overwrite_base_config` are not
    added; `optim` is completed where it is given.
    """
    return complete(cfg, config_name, "model")


def model_fallback(key: str) -> Any:
    return _fallbacks(TrainedModel)[key]


def differences(cfg: DictConfig, config_name: str) -> list[tuple[str, Any, Any, bool]]:
    """Key, value and default of what is not the default in a job's whole, resolved configuration,
    and whether its YAML file leaves the key to the checkpoint; a default that refers to other keys
    counts with their values in `cfg`.
    """
    of_job = {key: value for key, value in leaves(JOBS[config_name].tree) if value is not None}
    defaults = dict(leaves(_section_tree(config_name))) | of_job
    sections = tuple(f"{key}." for key, value in of_job.items() if "${" in str(value))
    found = []
    for key, value in leaves(plain_dict(cfg)):
        default = defaults.get(key)
        if isinstance(default, str) and "${" in default:
            OmegaConf.update(cfg, key, default)
            default = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
            OmegaConf.update(cfg, key, value)
        if value != default and not key.startswith(sections):
            found.append((key, value, default, key.startswith("model.") and key not in of_job))
    return found


def drop_unset(model_cfg: DictConfig) -> DictConfig:
    """Copy of `model_cfg` without the keys whose null means "as in the checkpoint": those of the
    architecture, and the longest sample (`encoder_seq_length`) of a job that does not train.
    """
    tree = plain_dict(model_cfg)
    for key in (*ARCHITECTURE_KEYS, "encoder_seq_length"):
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.get(parent) or {}
        if leaf in node and node[leaf] is None:
            del node[leaf]
    if tree.get("tokenizer") == {}:
        del tree["tokenizer"]
    result = _copy(tree)
    result._set_parent(model_cfg._get_parent())  # ${trainer.precision} and the like still resolve
    return result


def base_dropout(model_cfg: Mapping, base: Mapping, config_name: str | None) -> dict[str, float]:
    """The dropout of the checkpoint `base` that a job, without the keys, switches off."""
    keys = ("hidden_dropout", "attention_dropout") if config_name in WITHOUT_DROPOUT else ()
    return {key: base[key] for key in keys if base.get(key) and key not in model_cfg}


def _missing(
    given: Mapping,
    defaults: Mapping,
    is_default: Callable[[str, object], bool],
    prefix: str = "",
    path: str = "",
) -> dict[str, Any]:
    """Dotted keys and defaults that `given`, at `path` of the section `prefix`, lacks, also for a
    null that reads as the default by `is_default(key, default)`. `prefix`: with a dot at its end.
    """
    missing: dict[str, Any] = {}
    for name, default in defaults.items():
        key, value = f"{prefix}{path}{name}", given.get(name)
        is_null = name in given and value is None and key not in (*FREE, *OFF_WHEN_NULL)
        if name not in given or (is_null and default is not None and is_default(key, default)):
            missing[f"{path}{name}"] = default
        elif isinstance(default, Mapping) and isinstance(value, Mapping) and key not in FREE:
            missing |= _missing(value, default, is_default, prefix, f"{path}{name}.")
    return missing


def _add(result: DictConfig, missing: Mapping[str, Any]) -> DictConfig:
    for key, default in missing.items():
        OmegaConf.update(result, key, copy.deepcopy(default), force_add=True)
    return result


def _resolve(result: DictConfig, references: list[str], tree: dict, section: str) -> None:
    """Put values in the place of the added `references`, in `result`."""
    root = result._get_root()
    if root is not result:
        tree = laid_over(tree, plain_dict(root))
    whole = _copy(laid_over(tree, tree_of({section: plain_dict(result)})))
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
        OmegaConf.update(result, key, value)


def _copy(cfg: DictConfig | dict) -> DictConfig:
    if isinstance(cfg, DictConfig):
        return copy.deepcopy(cfg)
    return OmegaConf.create(cfg, flags={"allow_objects": True})


@functools.cache
def _fallbacks(model: type) -> dict[str, Any]:
    """The values of models with this section that nobody gives; not to be changed."""
    keys = Configuration("", {"": model}).keys
    return tree_of({name: key.fallback for name, key in keys.items()})


@functools.cache
def _section_tree(config_name: str | None) -> dict[str, Any]:
    """The defaults of a job's sections, over the fallbacks of the model; not to be changed."""
    tree = {} if config_name is None else copy.deepcopy(JOBS[config_name].tree)
    for key in ("precision", "optim"):  # a section alone does not take them from there
        tree.get("model", {}).pop(key, None)
    of_language_model = config_name and "model.reward_model_type" not in JOBS[config_name].keys
    fallbacks = _fallbacks(TrainedModel if of_language_model else RMModel)
    return laid_over(tree, tree_of(_missing(tree, {"model": fallbacks}, lambda *_: True)))
