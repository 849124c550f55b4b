# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Addresses of reward models as the configuration gives them: one server, a fleet, an ensemble."""

import pytest
from omegaconf import OmegaConf

from nemo_aligner.config.server_rules import read_reward_models
from nemo_aligner.core.errors import ConfigError
from tests.cases import says


def read(**section):
    return read_reward_models(OmegaConf.create(section), "remote_rm")


def at(ip, port, /, **beside):
    return {"reward_model": {"ip": ip, "port": port}, **beside}


@pytest.mark.parametrize(
    "section, addresses",
    [
        ({}, [("localhost", 5555)]),
        (at("a", 7), [("a", 7)]),
        (at(["a", "b"], 7), [("a", 7), ("b", 7)]),
        (at("a", [7, 8, 9]), [("a", 7), ("a", 8), ("a", 9)]),
        (at("a", 7, host="h", port=9), [("h", 9)]),
        (at("a", 7, host=["h", "i"]), [("h", 7), ("i", 7)]),
        (at(["a", "b"], 7, host=None, port=9), [("a", 9), ("b", 9)]),
    ],
)
def test_addresses_of_one_reward_model(section, addresses):
    (spec,) = read(**section)
    assert list(spec.addresses) == addresses
    assert spec.name is None and spec.endpoint == "reward_model" and spec.weight == 1.0


def test_an_ensemble_keeps_names_order_endpoints_and_weights():
    specs = read(
        reward_model={"ip": "not_used", "port": 1},
        reward_models={
            "helpful": {"name": "rm_a", "ip": ["a", "b"], "port": 7, "weight": 0.7},
            "terse": {"ip": "c", "port": 8},
            "watched": {"ip": "d", "port": 9, "weight": 0},
        },
    )
    assert [(s.name, s.endpoint, s.weight, len(s.addresses)) for s in specs] == [
        ("helpful", "rm_a", 0.7, 2),
        ("terse", "reward_model", 1.0, 1),
        ("watched", "reward_model", 0.0, 1),
    ]
    assert specs[1].setting == "remote_rm.reward_models.terse"


def one(name="x", **options):
    return {"reward_models": {name: {"ip": "a", "port": 7, **options}}}


@pytest.mark.parametrize(
    "section, words",
    [
        (at(["a", "b"], [1, 2, 3]), ["2 servers", "3 ports", "remote_rm.reward_model.ip"]),
        (at("a", 0), ["reward_model.port=0", "not a TCP port"]),
        (at(["a", ""], 7), ["'' is not a host name"]),
        (at(["a", "b", "a"], 7), ["a:7 more than once"]),
        ({"reward_model": "a:7"}, ["remote_rm.reward_model='a:7'", "section"]),
        ({"reward_models": ["a", "b"]}, ["remote_rm.reward_models=", "must map names to servers"]),
        (one(wieght=0.1), ["x has the unknown key wieght", "weight"]),
        ({"reward_models": {"x": {"ip": "a"}}}, ["x.port is not set"]),
        (one("with_kl"), ["'with_kl'", "metric"]),
        (one("a b"), ["'a b'", "letters"]),
        ({"reward_model": {"ip": "a:7"}}, ["ip='a:7'", "remote_rm.reward_model.port"]),
        (one(weight=float("nan")), ["x.weight=nan"]),
        (one(weight=0), ["every weight", "is 0"]),
        ({**one(), "host": "h"}, ["remote_rm.host=h", "leave host and port"]),
    ],
)
def test_addresses_that_cannot_work(section, words):
    with says(ConfigError, *words):
        read(**section)
