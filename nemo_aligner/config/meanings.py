# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The YAML file of a job with the meaning of every key: `nemo-aligner config JOB`.

The meanings stand in the tables of docs/config.md, and for commands on their pages; beside the
YAML files lie links to these pages.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from nemo_aligner.config.defaults import CONF, complete_config
from nemo_aligner.config.inert_keys import INERT
from nemo_aligner.config.schema import COMMAND_PAGES
from nemo_aligner.config.values import plain_dict

# Headings of tables for all jobs; any other is for the job that it names, and for those without a
# table of their own for the key.
GENERAL = ("Every job", "Model", "Data")


@dataclass(frozen=True)
class Row:
    """A line of a table: patterns of the keys, and what they mean."""

    heading: str
    keys: tuple[str, ...]
    meaning: str

    def matches(self, key: str, config_name: str) -> tuple[bool, bool, int]:
        """How well it explains `key`; (False, False, 0): not at all."""
        found = [
            name.count(".") + 1
            for name in self.keys
            if re.search(rf"(^|\.){re.escape(name).replace('<algo>', '[^.]+')}$", key)
        ]
        own = f"{config_name}.yaml" in self.heading
        return (own, self.heading.startswith(GENERAL), max(found)) if found else (False, False, 0)


def explained(config_name: str) -> str:
    """`conf/<config_name>.yaml` with a comment that says what each key means."""
    return "\n".join(_lines(plain_dict(complete_config({}, config_name)), config_name))


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
            yield f"{indent}{name}: {_scalar(value)}"


def meaning(key: str, config_name: str) -> str | None:
    """What a key or a section of a job means, in one sentence; None where nothing says it."""
    if key in INERT[config_name]:
        return f"without effect: {INERT[config_name][key]}"
    rows = _rows("config") + _rows(COMMAND_PAGES.get(config_name, "config"))
    best = max(rows, key=lambda row: row.matches(key, config_name))
    return best.meaning or None if best.matches(key, config_name)[2] else None


def _scalar(value: Any) -> str:
    """`value` as YAML, in one line."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6)
    return text.removesuffix("\n...\n").rstrip("\n")


@functools.cache
def _rows(page: str) -> tuple[Row, ...]:
    """The rows of all tables of keys of a page."""
    rows, heading, prefix = [], "", ""
    for line in (CONF / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| Key"):
            prefix = "".join(re.findall(r"`(.+)`", cells[0]))
        elif len(cells) == 3 and cells[0].startswith("`"):
            names = re.findall(r"`([^`]+)`", cells[0])
            keys = (
                n if n.startswith(("trainer.", "model.", "remote_")) else prefix + n for n in names
            )
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[2]).replace("\\|", "|")
            text = re.sub(r"\*\*new\*\*[:,] ?|\(\*\*new\*\*\) ?|\*\*", "", text)
            rows.append(Row(heading, tuple(keys), re.split(r"\. (?=[A-Z`])", text)[0]))
    return tuple(rows)
