# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a job with the meaning of every key: `nemo-aligner config JOB`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_aligner.config.fields import meaning_of
from nemo_aligner.config.jobs import JOBS


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
