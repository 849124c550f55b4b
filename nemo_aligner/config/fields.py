# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration keys as fields of classes: a key stands once, with its type, default, bounds and
meaning. From there come defaults, checks, the known names, `nemo-aligner config` and the tables of
docs/config.md.

`Configuration` says where the sections of a job stand. The type of a field is `bool`, `int`,
`float`, `str`, `dict`, `Any`, a `Literal` of its choices, or a section, with `| None` where null
has a meaning; `key` gives its default and bounds. The docstring of a section says what its fields
mean, below its first line: `name, name: meaning`.
"""

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


RESTORE_KEY = "pretrained_checkpoint.restore_from_path"
# What records of data files hold: a prompt; a prompt with a response, with two, or with a labelled
# one; what a reward model learns from; an example with a teacher's logits.
RECORDS = ("prompt", "example", "pair", "labelled", "scored", "logits")
ABSENT: Any = _Absent()  # a default: the key is not there until somebody sets it


@dataclasses.dataclass(frozen=True)
class Key:
    """What is known of a key.

    Attributes:
        name: dotted.
        section: class that it is a field of.
        kind: `bool`, `int`, `float`, `str`, `dict` or `Any`.
        nullable: whether null has a meaning.
        choices: the values that it can have; empty: see the bounds.
        default: of the job; may refer to other keys.
        fallback: of a key of a model, where neither the job nor a checkpoint gives a value.
        free: any key goes below it: names that the user chooses, arguments of another library.
        of_checkpoint: it says how the weights look, and null means "as in the checkpoint".
        code: what it names in a user's own Python file, "function" or "class"; "": no such thing.
        acts: False: it is NeMo-Aligner's, and has no effect here (`inert_keys.py` says why).
    """

    name: str
    section: type
    kind: Any
    nullable: bool
    choices: tuple[Any, ...]
    default: Any
    fallback: Any = ABSENT
    at_least: float = -math.inf
    above: float | None = None
    at_most: float = math.inf
    free: bool = False
    of_checkpoint: bool = False
    code: str = ""
    acts: bool = True

    def check_null(self, values: Values) -> None:
        if self.nullable or not self.acts or not values.is_null(self.name):
            return
        if self.kind is not bool:
            raise ConfigError(f"{self.name} is not set; give it a value (see docs/config.md).")
        if not values.is_null(self.name.rpartition(".")[0]):
            raise ConfigError(f"{self.name}=null must be True or False.")

    def check(self, values: Values) -> None:
        self.check_null(values)
        name, value = self.name, values.get(self.name)
        if value is None or not self.acts or (self.free and isinstance(value, Mapping)):
            return
        if self.kind is dict:
            raise ConfigError(f"{name}={value!r} must be a mapping, {{name: value, ...}}.")
        if self.choices:
            values.choice(name, self.choices)
        elif self.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False.")
        elif self.kind is str and isinstance(value, bool | list | tuple | Mapping):
            raise ConfigError(f"{name}={value!r} must be a text.")
        elif self.kind in (int, float):
            if self.kind is int:
                values.whole(name)
            low = self.at_least if self.above is None else self.above
            values.number(name, low, self.at_most, above=self.above is not None)


class Section:
    """Base of the sections; nobody makes objects of them."""


def key(default: Any, required: bool = False, **more: Any) -> Any:
    """A field; `more` are attributes of its `Key`. `required`: of type `Any`, null is refused."""
    return {"default": default, "required": required} | more


def of_checkpoint(fallback: Any = ABSENT, **more: Any) -> Any:
    return key(ABSENT, fallback=fallback, of_checkpoint=True, **more)


def inert(default: Any) -> Any:
    """A field of NeMo-Aligner's YAML files that has no effect here."""
    return key(default, acts=False)


def section() -> Any:
    """A field that is a section; with the type `SECTION | None` null switches it off."""
    return {}


@functools.cache
def fields_of(section_class: type) -> dict[str, dict[str, Any]]:
    """The fields of a section, those of its bases first: name -> what `key` was given."""
    found: dict[str, dict[str, Any]] = {}
    for each in reversed(section_class.__mro__):
        own = (name for name in vars(each).get("__annotations__", {}) if name in vars(each))
        found |= {name: vars(each)[name] for name in own if isinstance(vars(each)[name], dict)}
    return found


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The configuration of a job, or of a command.

    Attributes:
        name: of its file in conf/, without its ending.
        sections: dotted name of a section -> its class; "": keys that are in none.
        defaults: dotted key -> its default, where it is not that of the section.
        required: keys whose null is refused although the section takes it.
        without: keys of its sections that it does not have.
        bare: sections whose keys are not there until somebody sets them.
        rules: across its keys, as for `Values.refuse`; `OWN`: its own section below `model`.
        check: `check(values, dp, ranks)`, other rules: raises `ConfigError`. `dp` is `{"data
            parallel size": DP}`, empty while that is not known; `ranks` counts processes.
        restore_key: key that names the weights that it starts from.
        from_scratch: without them it starts from random weights.
        pairs: what `model.micro_batch_size` counts are pairs of samples.
        records: what a record of its data files holds, one of `RECORDS`; "": it reads none.
    """

    name: str
    sections: Mapping[str, type]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    bare: tuple[str, ...] = ()
    rules: str = ""
    check: Callable[[Values, dict[str, int], int], None] = lambda values, dp, ranks: None
    restore_key: str = RESTORE_KEY
    from_scratch: bool = False
    pairs: bool = False
    records: str = ""

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        found = {name: each for name, each in self._contents() if isinstance(each, Key)}
        assert self.records in ("", *RECORDS)
        assert {*self.without, *self.required, *self.defaults} <= set(found)
        bare = tuple(f"{name}." for name in self.bare)
        keys = {}
        for name, key in found.items():
            is_bare = name.startswith(bare)
            default = self.defaults.get(name, ABSENT if is_bare else key.default)
            if isinstance(default, str):
                default = default.replace("<job>", self.name).replace("<algo>", self.algo or "")
            nullable = (key.nullable or is_bare) and name not in self.required
            if name not in self.without:
                keys[name] = dataclasses.replace(key, default=default, nullable=nullable)
        return keys

    @functools.cached_property
    def section_classes(self) -> dict[str, type]:
        """The sections by their dotted names, also those that are in others."""
        return {name: each for name, each in self._contents() if isinstance(each, type)}

    def _contents(self) -> Iterator[tuple[str, Key | type]]:
        for name, each in self.sections.items():
            yield from _contents(each, name)

    @functools.cached_property
    def algo(self) -> str | None:
        """The job's own section below `trainer`, "ppo" of `trainer.ppo`; None: it has none."""
        names = (name.split(".") for name in self.sections)
        return next((parts[1] for parts in names if parts[0] == "trainer" and parts[1:]), None)

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """The defaults as nested dicts; not to be changed."""
        return tree_of({name: key.default for name, key in self.keys.items()})


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys and their values as nested dicts, without `ABSENT` ones."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if value is not ABSENT:
            *parents, leaf = name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return tree


@functools.cache
def meanings(section_class: type) -> dict[tuple[str, ...], str]:
    """What fields of a section mean, of each group of names that its own docstring explains, and
    of its other own fields if the class has `OTHERS`, which explains them.
    """
    doc = str(section_class.__doc__) if _is_section(section_class) else ""
    text = inspect.cleandoc(doc).partition("\n\n")[2]
    found = {}
    for entry in re.split(r"\n(?! )", text) if text else ():
        names, _, meaning = re.sub(r"\s+", " ", entry).partition(": ")
        found[tuple(names.split(", "))] = meaning
    own = vars(section_class).get("__annotations__", {})
    others = tuple(name for name in own if all(name not in names for names in found))
    if others and hasattr(section_class, "OTHERS") and "OTHERS" not in own:
        found[others] = section_class.OTHERS
    return found


def meaning_of(section_class: type, field: str) -> str | None:
    """What a field means: as its section says, or one that it is made from."""
    for each in section_class.__mro__:
        for names, text in meanings(each).items():
            if field in names:
                return text
    return None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


_hints = functools.cache(typing.get_type_hints)


def _contents(section_class: type, name: str) -> Iterator[tuple[str, Key | type]]:
    """A section, what it holds, and what its own sections hold, by their dotted names."""
    yield name, section_class
    for field, given in fields_of(section_class).items():
        hint, own, more = _hints(section_class)[field], f"{name}.{field}".lstrip("."), dict(given)
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kind, *others = typing.get_args(hint) if is_union else (hint,)
        if _is_section(kind):
            yield from _contents(kind, own)
            continue
        required = more.pop("required")
        nullable = type(None) in others or (kind is Any and not required)
        is_literal = typing.get_origin(kind) is Literal
        choices = more.pop("choices", typing.get_args(kind) if is_literal else ())
        yield own, Key(own, section_class, kind, nullable, choices, **more)
