# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge, a language model that gives rewards: what it is asked, and the score in its reply."""

import json
import os
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.config.access import shown_url
from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.keys.rollouts import Judge
from nemo_aligner.config.server_rules import RewardServersSpec, read_reward_servers
from nemo_aligner.core.errors import ConfigError

_DEFAULTS = Configuration("", {"": Judge}).tree
_COLUMN = re.compile(r"[^\W\d][\w -]*")


@dataclass(frozen=True, kw_only=True)
class JudgeSpec(RewardServersSpec):
    options: Mapping[str, Any]  # its keys
    messages: dict[str, str]  # templates by role
    columns: list[str]  # that they ask for, beside prompt and response
    score: re.Pattern[str] | str
    fields: dict[str, Any]  # of every request

    def __str__(self) -> str:
        return f"the judge {self.options['model']} at {', '.join(map(shown_url, self.urls))}"

    def request(self, values: Mapping[str, Any], number: int) -> dict[str, Any]:
        """The request for a score after `number` others; of prompt, response and columns."""
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        }
        asked = [(role, template.format_map(texts)) for role, template in self.messages.items()]
        fields = {"messages": [{"role": r, "content": text} for r, text in asked], **self.fields}
        if number and isinstance(fields.get("seed"), int):
            fields["seed"] += number
        if number and fields.get("temperature") == 0:  # it would say the same again
            fields["temperature"] = 1.0
        return fields

    def score_in(self, reply: str) -> float | None:
        """The score; None: there is none within the bounds."""
        if isinstance(self.score, str):
            found = [*_values_at(self.score, reply)]
        else:
            found = [match[1] for match in self.score.finditer(reply)]
        value = next((each for each in reversed(found) if each is not None), None)
        try:
            score = float(str(value))  # of True and None there is none
        except ValueError:
            return None
        return score if self.options["least"] <= score <= self.options["most"] else None


def _values_at(path: str, reply: str) -> Iterator[Any]:
    """What stands at a dotted path of the JSON objects in a reply, which may say more."""
    start = 0
    while (start := reply.find("{", start)) >= 0:
        try:
            value, start = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            value, start = None, start + 1
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        yield value


def text_of(given: str) -> str:
    """The text of the file `given`; `given` itself where there is no such file."""
    return Path(given).read_text(encoding="utf-8") if os.path.isfile(given) else given


def read_web_rewards(options: Mapping, section: str) -> RewardServersSpec | None:
    """The judge, or the web servers of `reward_fn`, that `options` of `section` name, or None."""
    judge, setting = options["judge"], f"{section}.judge"
    if judge["url"] is None:
        for name, default in _DEFAULTS.items():
            if judge[name] != default:
                raise ConfigError(
                    f"{setting}.{name}={judge[name]!r} has no effect without a judge; set its "
                    f"address, {setting}.url."
                )
        return read_reward_servers(options, section)
    for name in ("model", "prompt", "score", "least", "most", "cache"):
        if judge[name] is None:
            raise ConfigError(f"{setting}.{name} is not set; a judge ({setting}.url) needs it.")
    if judge["least"] >= judge["most"]:
        raise ConfigError(f"{setting}.least={judge['least']} must be below most={judge['most']}.")
    if options["rewards_per"] != "response":
        raise ConfigError(
            f"{section}.rewards_per={options['rewards_per']}: a judge gives rewards per response."
        )
    servers = read_reward_servers({**options, "judge.url": judge["url"]}, section, "judge.url")
    own = {name: judge[name] for name in ("model", "temperature", "max_tokens", "seed")}
    fields = {name: v for name, v in {**own, **(judge["request"] or {})}.items() if v is not None}
    given = {**vars(servers), "setting": setting, **_messages(judge, setting)}
    return JudgeSpec(**given, options=judge, score=_score(judge["score"], setting), fields=fields)


def _messages(judge: Mapping, setting: str) -> dict[str, Any]:
    messages: dict[str, str] = {}
    names: dict[str | None, str] = {}
    system = str(judge["system"])
    if re.fullmatch(r"\S+\.(txt|md|jinja|j2)", system) and not os.path.isfile(system):
        raise ConfigError(
            f"{setting}.system={system} is no file; correct its path, or give the text itself."
        )
    for role, key in (("system", "system"), ("user", "prompt")):
        try:
            text = "" if judge[key] is None else text_of(judge[key])
            for _, name, form, conversion in string.Formatter().parse(text):
                if name is not None and (form or conversion or not _COLUMN.fullmatch(name)):
                    raise ValueError(f"{{{name}...}} names no column")
                names[name] = role
        except (OSError, ValueError) as error:  # a ValueError too: no UTF-8, a brace alone
            raise ConfigError(
                f"{setting}.{key}={judge[key]!r} cannot be used: {error}. Write {{{{ and }}}} for "
                "braces."
            ) from None
        messages |= {role: text} if text else {}
    if names.get("response") != "user":
        raise ConfigError(
            f"{setting}.prompt={judge['prompt']!r} is no file, or has no {{response}} to judge."
        )
    return {"messages": messages, "columns": sorted({*names} - {None, "prompt", "response"})}


def _score(given: str, setting: str) -> re.Pattern[str] | str:
    try:
        pattern = re.compile(given)
        if "(" in given and pattern.groups != 1:
            raise re.error(f"it has {pattern.groups} groups; one is the score, others are (?:...)")
    except re.error as error:
        raise ConfigError(f"{setting}.score={given} cannot be used: {error}.") from None
    return pattern if "(" in given else given
