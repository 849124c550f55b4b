# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers that a job is or asks: the rules that they share, which reward models a job uses, and
where these are served, read from `remote_rm` or `remote_critic_rm`.

One reward model (`reward_model: {name, ip, port}`), or several named ones whose weighted rewards
are added (`reward_models: {helpful: {ip, port, weight}, terse: {...}}`). Each may be served by a
fleet: `ip`, `port` or both are then lists. A judge is a language model that gives rewards: what it
is asked, and the score in its reply. Nothing here talks to a server (see servers/fleet.py).
"""

import importlib.util
import json
import os
import re
import ssl
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_aligner.config import access
from nemo_aligner.config.access import REWARD_TOKEN_VARIABLE as TOKEN
from nemo_aligner.config.fields import Configuration, tree_of
from nemo_aligner.config.keys.rollouts import Judge, RewardAddress
from nemo_aligner.config.values import Values, is_number, require_one_of
from nemo_aligner.core.errors import ConfigError

FRONTENDS = ("triton", "asgi")


def read_frontend(
    frontend: str, certificate: str | None, key: str | None
) -> ssl.SSLContext | None:
    """Check the section `server`; returns how a server encrypts, None if it does not."""
    require_one_of("server.frontend", frontend, FRONTENDS)
    if frontend == "triton" and importlib.util.find_spec("pytriton") is None:
        raise ConfigError(
            "server.frontend=triton needs pytriton, which is not installed: pip install "
            "nvidia-pytriton, or set server.frontend=asgi"
        )
    return access.server_tls(certificate, key)


def check_kind_of_rewards(v: Values, section: str) -> None:
    """Check whether rewards are given per response, step or token."""
    per, step_end = v.get(f"{section}.rewards_per"), v.get(f"{section}.step_end")
    if (per == "step") != bool(step_end):
        raise ConfigError(
            f"{section}.rewards_per={per} and {section}.step_end={step_end!r} do not go together: "
            "the text that ends a step is needed with rewards_per=step, and only there."
        )


def check_source_of_rewards(remote: Mapping) -> None:
    """Raise `ConfigError` if rewards are to come from the critic server and from others too."""
    if remote["reward_models"] and remote["combine_rm_and_critic_server"]:
        raise ConfigError(
            "remote_critic_rm.combine_rm_and_critic_server=True has the critic server score "
            "rewards; set it to False, or remote_critic_rm.reward_models to null."
        )


def check_reward_standardization(model: Mapping) -> None:
    """Check the mean and the standard deviation; `model` is completed, here and below."""
    Values({"model": model}).refuse(
        """
        SECTION.mean=null or SECTION.std=null & SECTION.enable | ; {} needs it
        SECTION.std<=0 & SECTION.enable | must be above 0
        """,
        SECTION="model.reward_standardization",
    )


def check_attributes_are_merged(model: Mapping) -> None:
    Values({"model": model}).refuse(
        f"""model.regression.num_attributes>1 & !model.regression.merge_attributes | : this reward
        model gives {model["regression"]["num_attributes"]} attributes, but a reward is one number;
        set model.regression.merge_attributes=True, and attribute_weights to as many numbers unless
        they all count the same"""
    )


def check_one_reward_per_sample(model: Mapping) -> None:
    check_attributes_are_merged(model)
    served_attributes(model)


def served_attributes(model: Mapping) -> int:
    """How many numbers a reward model gives for each sample: its attributes, or their sum.
    `ConfigError`: it has weights that it does not use, or gives a number per token.
    """
    Values({"model": model}).refuse("""
        model.regression.attribute_weights!=null & !model.regression.merge_attributes | has an
            effect only when attributes are merged; set model.regression.merge_attributes=True
        model.output_sequence | gives a number per token, as a critic does, but a reward is one
            number per sample; serve a reward model, or set it to False (inference.rewards_per
            gives rewards of steps and tokens)
    """)
    regression = model["regression"]
    return 1 if regression["merge_attributes"] else int(regression["num_attributes"])


def check_serving(values: Values, section: str) -> None:
    """What the servers have in common; `section` holds their port."""
    host, token_file = values.get(f"{section}.host"), values.get(f"{section}.token_file")
    access.server_token(host, token_file, section)
    server = (values.get(f"server.{key}") for key in ("frontend", "tls_certificate", "tls_key"))
    read_frontend(*server)
    sizes = values.get(f"{section}.inference_micro_batch_size")
    for size in _as_list(sizes):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{section}.inference_micro_batch_size={sizes!r} must be above 0, or a list."
            )


# Where a reward model is, if the configuration does not say it.
REWARD_ADDRESS = Configuration("", {"": RewardAddress}).tree
REWARD_MODEL, REWARD_MODEL_PORT = REWARD_ADDRESS["name"], REWARD_ADDRESS["port"]
_MEMBER_KEYS = ("ip", "port", "name", "weight")


@dataclass(frozen=True)
class RewardModelSpec:
    name: str | None  # its name in the ensemble; None for the only reward model
    endpoint: str  # name of the served model
    addresses: tuple[tuple[str, int], ...]  # (host, port) of each server; all serve the same model
    weight: float  # factor of its reward in the sum
    setting: str  # its configuration section, for error messages


def read_reward_models(cfg: Mapping, setting: str) -> list[RewardModelSpec]:
    """`host` and `port` of `remote_rm` win over those of its `reward_model`."""
    ensemble = cfg.get("reward_models")
    host, port = cfg.get("host"), cfg.get("port")  # keys of remote_rm only
    if ensemble is None:
        own = f"{setting}.reward_model"
        return [_read_one(cfg.get("reward_model") or {}, own, ip=host, port=port)]
    if not isinstance(ensemble, Mapping) or not ensemble:
        raise ConfigError(f"{setting}.reward_models={ensemble!r} must map names to servers.")
    if host is not None or port is not None:
        raise ConfigError(
            f"{setting}.host={host} and {setting}.port={port} are the address of one reward "
            f"model, but {setting}.reward_models gives {len(ensemble)}; leave host and port null."
        )
    specs = [
        _read_member(member, f"{setting}.reward_models", str(name))
        for name, member in ensemble.items()
    ]
    if all(spec.weight == 0 for spec in specs):
        raise ConfigError(f"every weight in {setting}.reward_models is 0; set at least one.")
    return specs


@dataclass(frozen=True)
class RewardServersSpec:
    setting: str  # the key that names them, for error messages
    urls: list[str]
    token: str | None = field(default=None, repr=False)  # that they ask for, or None
    # how to verify their certificates; None: by the certificates of this system
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"the reward server {', '.join(map(access.shown_url, self.urls))}"


def read_reward_servers(
    options: Mapping, section: str, key: str = "reward_fn"
) -> RewardServersSpec | None:
    """The web servers that `key` of `options` names; None: `reward_fn` is null or code."""
    setting, reward_fn, may_be_code = f"{section}.{key}", options[key], key == "reward_fn"
    given = _as_list(reward_fn)
    texts = [value for value in given if isinstance(value, str) and value.strip()]
    urls = [value for value in texts if value.lower().startswith(("http://", "https://"))]
    if not urls and may_be_code and (reward_fn is None or len(texts) == len(given) == 1):
        for name in ("reward_token_file", "reward_tls_ca_file"):
            if options[name] is not None:
                raise ConfigError(
                    f"{section}.{name}={options[name]} is for an address in {setting}; unset it."
                )
        return None
    if not urls or len(urls) < len(given) or len(set(urls)) < len(urls):
        code = "path/to/file.py:function, " if may_be_code else ""
        raise ConfigError(
            f"{setting}={access.shown_url(str(reward_fn))} must be {code}an address http://... or "
            "https://..., or a list of different addresses."
        )
    for url in urls:
        if not access.is_web_address(url):
            raise ConfigError(
                f"{setting}={access.shown_url(url)} must name a host, and a port from 1 to 65535 "
                f"if any, and hold no user or password; a token comes from {TOKEN} or "
                "reward_token_file."
            )
    token = access.read_token(options["reward_token_file"], section, "reward_token_file", TOKEN)
    tls = access.client_tls(options["reward_tls_ca_file"], section, "reward_tls_ca_file")
    return RewardServersSpec(setting, urls, token, tls)


def read_teacher(cfg: Mapping, setting: str = "remote_teacher") -> RewardModelSpec:
    return _read_one({"name": cfg["name"]}, setting, ip=cfg["host"], port=cfg["port"])


def read_teachers(cfg: Mapping, setting: str = "remote_teacher") -> list[RewardModelSpec]:
    """The teachers of `cfg`: one, or several by their names with what differs."""
    teachers, column = cfg.get("teachers"), cfg.get("column")
    if (teachers is None) != (column is None):
        raise ConfigError(
            f"{setting}.teachers={teachers} and {setting}.column={column} do not go together: "
            "a column of the data names the one of several teachers; set both or neither."
        )
    if teachers is None:
        return [read_teacher(cfg, setting)]
    own = {key: cfg[key] for key in ("host", "port", "name")}
    sections = teachers.values() if isinstance(teachers, Mapping) else ()
    if not sections or not all(isinstance(t, Mapping) and set(t) <= set(own) for t in sections):
        raise ConfigError(
            f"{setting}.teachers={teachers!r} must map names to sections with host, port or name, "
            "for example {mathematics: {port: 5557}, code: {port: 5558}}."
        )
    return [
        replace(read_teacher({**own, **each}, f"{setting}.teachers.{name}"), name=name)
        for name, each in teachers.items()
    ]


def _read_member(member: Mapping, setting: str, name: str) -> RewardModelSpec:
    """One reward model of an ensemble; a key that is misspelt would leave its default in force."""
    if not name.isidentifier() or name == "with_kl":
        raise ConfigError(
            f"{setting} has the name {name!r}, which becomes part of a metric's name, "
            "rewards_<name>: use letters, digits and underscores, but not with_kl."
        )
    spec = _read_one(member, f"{setting}.{name}", name)
    for key in member:
        if key not in _MEMBER_KEYS:
            raise ConfigError(
                f"{setting}.{name} has the unknown key {key}; use {', '.join(_MEMBER_KEYS)}."
            )
    for key in ("ip", "port"):
        if member.get(key) is None:
            raise ConfigError(
                f"{setting}.{name}.{key} is not set; every member needs ip and port."
            )
    return spec


def _read_one(
    section: Mapping,
    setting: str,
    name: str | None = None,
    ip: str | Sequence[str] | None = None,
    port: int | Sequence[int] | None = None,
) -> RewardModelSpec:
    """One reward model; `ip` and `port` win over those of its `section`."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{setting}={section!r} must be a section with ip and port.")
    weight = section.get("weight", 1.0)  # a member that has none counts as it is
    if not is_number(weight):
        raise ConfigError(f"{setting}.weight={weight!r} must be a finite number.")
    given = (*section.items(), ("ip", ip), ("port", port))
    whole = REWARD_ADDRESS | {key: value for key, value in given if value is not None}
    addresses = _read_addresses(whole["ip"], whole["port"], setting)
    return RewardModelSpec(name, whole["name"], addresses, float(weight), setting)


def _read_addresses(
    ip: str | Sequence[str], port: int | Sequence[int], setting: str
) -> tuple[tuple[str, int], ...]:
    """((host, port), ...): paired lists; a single value goes with each of the other list."""
    ips, ports = _as_list(ip), _as_list(port)
    for value in ips:
        # IPv6 addresses have more than one colon.
        is_host = isinstance(value, str) and re.fullmatch(r"[^/\s]+", value)
        if not is_host or value.count(":") == 1:
            raise ConfigError(
                f"{setting}.ip={ip!r}: {value!r} is not a host name; give the host name or IP "
                f"address alone, and {setting}.port."
            )
    for value in ports:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
            raise ConfigError(
                f"{setting}.port={port!r}: {value!r} is not a TCP port (1 to 65535)."
            )
    if not ips or not ports:
        raise ConfigError(f"{setting}.ip={ips} with {setting}.port={ports} names no server.")
    ips = ips * len(ports) if len(ips) == 1 else ips
    ports = ports * len(ips) if len(ports) == 1 else ports
    if len(ips) != len(ports):
        raise ConfigError(
            f"{setting}.ip={ips} names {len(ips)} servers, but {setting}.port={ports} has "
            f"{len(ports)} ports; give one port for all of them, or one for each."
        )
    addresses = tuple(zip(ips, ports))
    for host, number in addresses:
        if addresses.count((host, number)) > 1:
            raise ConfigError(f"{setting} names {host}:{number} more than once; list it once.")
    return addresses


def _as_list(value: object) -> list:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return [value]


# --- a judge

_JUDGE = Configuration("", {"": Judge}).tree
_COLUMN = re.compile(r"[^\W\d][\w -]*")


@dataclass(frozen=True, kw_only=True)
class JudgeSpec(RewardServersSpec):
    options: Mapping[str, Any]  # its keys
    messages: dict[str, str]  # templates by role
    columns: list[str]  # that they ask for, beside prompt and response
    score: re.Pattern[str] | str
    fields: dict[str, Any]  # of every request

    def __str__(self) -> str:
        return (
            f"the judge {self.options['model']} at {', '.join(map(access.shown_url, self.urls))}"
        )

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
        for name, default in _JUDGE.items():
            if judge[name] != default:
                raise ConfigError(
                    f"{setting}.{name}={judge[name]!r} has no effect without a judge; set its "
                    f"address, {setting}.url."
                )
        return read_reward_servers(options, section)
    needed = ("model", "prompt", "score", "least", "most", "cache")
    Values(tree_of({section: options})).refuse(
        f"""
        {" or ".join(f"JUDGE.{name}=null" for name in needed)} | ; a judge (JUDGE.url) needs it
        JUDGE.least>=JUDGE.most | must be below {{JUDGE.most}}
        {section}.rewards_per!=response | : a judge gives rewards per response
        """,
        JUDGE=setting,
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
