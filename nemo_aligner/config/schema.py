# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of all jobs as tables, taken from `jobs/`, and with their meanings as YAML.

* `LIVE[name]`: dotted keys that have an effect in the jobs of configuration `name`.
* `FREE`: prefixes below which any key goes.
* `ARCHITECTURE_KEYS`, `FLAGS`, `REQUIRED`: keys of section `model` whose null means "as in the
  checkpoint", keys whose value is True or False, and other keys that must have a value.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_aligner.config.fields import meaning_of
from nemo_aligner.config.jobs import JOBS

# Those that use a trained policy.
COMMANDS = ("generate", "evaluate", "compute_topk_logits", "inference_teacher")
CONFIG_NAMES = tuple(name for name in JOBS if name not in COMMANDS)

_OF_JOB = {
    name: {key.name: key for key in job.keys.values() if key.acts} for name, job in JOBS.items()
}
_ALL = {key.name: key for keys in _OF_JOB.values() for key in keys.values()}

LIVE = {name: frozenset(keys) for name, keys in _OF_JOB.items()}
FREE = tuple(name for name, key in _ALL.items() if key.free)
FLAGS = frozenset(name for name, key in _ALL.items() if key.kind is bool)
REQUIRED = {
    name: frozenset(key.name for key in keys.values() if not key.nullable and key.kind is not bool)
    for name, keys in _OF_JOB.items()
}
ARCHITECTURE_KEYS = tuple(
    sorted(name.removeprefix("model.") for name, key in _ALL.items() if key.of_checkpoint)
)


def explained(config_name: str) -> str:
    """All keys of a job with their defaults as YAML, and comments that say what each means."""
    return "\n".join(_lines(JOBS[config_name].tree, config_name))


def _lines(tree: Mapping, config_name: str, path: str = "") -> Iterator[str]:
    indent = "  " * path.count(".")
    last = None
    for name, value in tree.items():
        text = meaning(f"{path}{name}", config_name)
        if text is not None and text != last:
            yield f"{indent}# {text}"
        last = text
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, config_name, f"{path}{name}.")
        else:
            yield f"{indent}{name}: {scalar(value)}"


def meaning(name: str, config_name: str) -> str | None:
    """What a key or a section of a job means, in one sentence; None where nothing says it."""
    job = JOBS[config_name]
    key, section = job.keys.get(name), job.section_classes.get(name)
    text = meaning_of(key.section, name.rpartition(".")[2]) if key else None
    if section is not None:
        text = str(section.__doc__).partition("\n")[0].rstrip(".")
    if text is None:
        return None
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*new\*\*[:,] ?|\(\*\*new\*\*\) ?|\*\*", "", text)
    return re.split(r"\. (?=[A-Z`])", text)[0]


def scalar(value: Any) -> str:
    """`value` as YAML, in one line."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6)
    return text.removesuffix("\n...\n").rstrip("\n")
