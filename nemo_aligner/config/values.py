# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Read access to a configuration by dotted key, and checks of values: all raise `ConfigError`."""

import functools
import math
import operator
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.core.errors import ConfigError


def plain_dict(cfg: DictConfig, resolve: bool = False) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(cfg, resolve=resolve)
    return tree


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` over `base`, also where one has keys and the other a list: `over` wins."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = laid_over(base[key], value)
        elif key not in base or value != MISSING:
            result[key] = value
    return result


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def resolved(cfg: DictConfig | dict) -> dict[str, Any]:
    """Plain nested dict with resolved references; `ConfigError`: one that cannot be resolved."""
    if not isinstance(cfg, DictConfig):
        return cfg
    cfg = cfg.copy()
    if OmegaConf.select(cfg, "exp_manager.checkpoint_callback_params") is not None:
        # In older YAML files it refers to sizes that only the checkpoint knows. It has no effect.
        cfg.exp_manager.checkpoint_callback_params.model_parallel_size = None
    try:
        return plain_dict(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The configuration has a reference that cannot be resolved: {error}"
        ) from error


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def entries(table: str) -> list[list[str]]:
    """The parts of each entry of a table, with ` | ` between them. Further lines of an entry are
    indented; a text that does not begin with a line end is one entry.
    """
    is_one = not table.startswith("\n")
    lines = [table] if is_one else re.split(r"\n(?! )", textwrap.dedent(table).strip())
    return [" ".join(entry.split()).split(" | ") for entry in lines if entry]


@functools.cache
def _condition(text: str) -> tuple[str, str, str, list[Any]]:
    """What stands before the key, the key, the sign behind it, the values."""
    parts = re.fullmatch(r"([!~]?)([\w.]+)(!=|>=|<=|=|>|<|)(.*)", text.strip())
    assert parts, text
    before, key, sign, given = parts.groups()
    return before, key, sign, [yaml.safe_load(each) for each in given.split("|")]


class Values:
    """Read access to a resolved tree by dotted key; a missing section reads as not set."""

    def __init__(self, tree: Mapping):
        self.tree = tree

    def _find(self, key: str) -> tuple[Any, bool]:
        """The value at `key`, or null that a section above has, and whether anything is there."""
        node: Any = self.tree
        for name in key.split("."):
            if node is None:
                break
            if not isinstance(node, Mapping) or name not in node:
                return None, False
            node = node[name]
        return node, True

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`; `default` where it is absent or null."""
        value = self._find(key)[0]
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """Whether the key, or a section that it is in, was written with the value null."""
        return self._find(key) == (None, True)

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self.get(key) is not None

    def shown(self, key: str) -> str:
        """The key with its value as a command writes it, without secrets of a URL."""
        value = self.get(key)
        from nemo_aligner.config.access import shown_url  # imports Hydra

        text = shown_url(str(value))
        text = text.replace("'", "") if isinstance(value, Mapping) else text
        return f"{key} is not set" if value is None else f"{key}={text}"

    def error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{self.shown(key) if self.has(key) else f'{key}=None'} {text}")

    def refuse(self, rules: str, **names: str) -> None:
        """Raise `ConfigError` for the first of `rules` whose conditions hold.

        A rule is `condition & condition | text` (see `entries`); a condition may be several with
        ` or ` between them. The error has the key of the first condition with its value, and the
        text, in which `{key}` and `{}`, the key of the last condition, become such pairs too.

        Args:
            rules: of conditions `key` (its value is not null, 0, False or empty), `!key`, `~key`
                (it was written as null), `key=value|value`, `key!=value|value` (it has another
                value than these and null), and `key>other` with a number or the key of one, also
                `>=`, `<` and `<=`; values are YAML.
            names: words of the rules, and what stands in the place of each.
        """
        for name, stands_for in names.items():
            rules = re.sub(rf"\b{name}\b", stands_for, rules)
        for given, text in entries(rules):
            if keys := self._keys_that_hold(given):
                text = re.sub(r"\{([\w.]+)\}", lambda match: self.shown(match[1]), text)
                text = text.replace("{}", self.shown(keys[-1]))
                raise ConfigError(f"{self.shown(keys[0])}{' ' * (text[0] not in ',;:')}{text}.")

    def holds(self, conditions: str) -> bool:
        """Whether all conditions, as in `refuse`, hold."""
        return bool(self._keys_that_hold(conditions))

    def _keys_that_hold(self, conditions: str) -> list[str]:
        """The key of each of the conditions; none of them unless all hold."""
        keys = []
        for any_of in conditions.split(" & "):
            found = [each.strip("!~ ") for each in any_of.split(" or ") if self._holds(each)]
            if not found:
                return []
            keys.append(re.split("[!=<>]", found[0])[0])
        return keys

    def _holds(self, condition: str) -> bool:
        before, key, sign, given = _condition(condition)
        value = self.get(key)
        if not sign:
            return self.is_null(key) if before == "~" else bool(value) == (before == "")
        if sign in ("=", "!="):
            return (value in given) == (sign == "=") and (sign == "=" or value is not None)
        other = self.get(given[0]) if isinstance(given[0], str) else given[0]
        return is_number(value) and is_number(other) and _COMPARISONS[sign](value, other)

    def whole(self, key: str, minimum: int | None = None) -> int | None:
        """The whole number at `key`, None where it is not set; `ConfigError`: none, or too low."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{key}={value!r} must be a whole number.")
        if value is not None and minimum is not None and value < minimum:
            raise ConfigError(f"{key}={value} must be at least {minimum}.")
        return value

    def size(self, key: str, minimum: int = 1) -> int:
        """As `whole`, but the number must be set."""
        value = self.whole(key, minimum)
        if value is None:
            raise ConfigError(f"{key} is not set; give a whole number.")
        return value

    def number(
        self, key: str, low: float = -math.inf, high: float = math.inf, *, above: bool = False
    ) -> None:
        """Refuse a value, where set, that is not in [low, high], or with `above` (low, high]."""
        value = self.get(key)
        if value is None:
            return
        if not is_number(value):
            raise ConfigError(f"{key}={value!r} must be a finite number.")
        if not low <= value <= high or (above and value == low):
            bounds = [f"above {low}" if above else f"at least {low}"] if low > -math.inf else []
            bounds += [f"at most {high}"] if high < math.inf else []
            raise ConfigError(f"{key}={value} must be {' and '.join(bounds)}.")

    def choice(self, key: str, choices: tuple) -> None:
        if self.has(key):
            require_one_of(key, self.get(key), choices)

    def at_most(self, key: str, other: str) -> None:
        """Raise `ConfigError` if the number at `key` is above a set one, not 0, at `other`."""
        low, high = self.get(key), self.get(other)
        if low is not None and high and low > high:
            raise self.error(key, f"is above {other}={high}; lower it.")

    def multiple(self, whole: str, *parts: str, times: Mapping[str, int]) -> None:
        """Refuse a size at `whole` that is no multiple of the others' product, if all are set."""
        total = self.whole(whole, minimum=1)
        factors = {part: self.whole(part, minimum=1) for part in parts}
        given = {part: size for part, size in factors.items() if size is not None}
        if total is not None and len(given) == len(factors):
            require_multiple(whole, total, given | dict(times))


def require_one_of(key: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r} must be one of {', '.join(map(str, choices))}.")


def require_multiple(
    name: str, value: int, factors: Mapping[str, int], remedy: str | None = None
) -> None:
    """Raise `ConfigError` unless `value` is a positive multiple of the product of `factors`
    (name -> size). `remedy`: what to do; None: use one of the nearest multiples.
    """
    product = math.prod(factors.values())
    if value > 0 and value % product == 0:
        return
    below, above = value // product * product, (value // product + 1) * product
    nearest = f"{below} or {above}" if below > 0 else f"{above}"
    formula = " x ".join(f"{factor}={size}" for factor, size in factors.items())
    remedy = remedy or f"use {nearest}, or change a factor"
    raise ConfigError(f"{name}={value} must be a multiple of {product} ({formula}); {remedy}.")
