# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Any value of any key of a configuration is accepted, or refused with an error that names it."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.inert_keys import INERT, LATER
from nemo_aligner.config.schema import CONFIG_NAMES, LIVE
from nemo_aligner.core.errors import ConfigError
from tests.cases import rows
from tests.properties import tried
from tests.unit.test_config_checks import load

LEAVES = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats()
LEAVES |= st.text("aZ09_./-:é ", max_size=6)
SHORT = st.text("abc", min_size=1)
NESTED = lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=2)
VALUES = st.recursive(LEAVES, NESTED, max_leaves=4)
KEYS = st.sampled_from(
    [(name, key) for name in CONFIG_NAMES for key in sorted({*LIVE[name], *INERT[name]})]
    + [*LATER]
)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: load(name, folder))


def refusal(configuration, name, key, value):
    """The error, as text; "": it is accepted."""
    cfg = configuration(name).copy()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    try:
        check_config(cfg, name, visible_devices=0, env={})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.full
@tried(60)
@given(place=KEYS, value=VALUES)
def test_any_value_of_any_key(configuration, place, value):
    name, key = place
    message = refusal(configuration, name, key, value)
    # A size may be refused as one of a product that another key names.
    assert not message or key.rpartition(".")[2] in message or "reference" in message, message


TEXTS = rows("""
gpt_sft -> model.optim.name
gpt_sft -> model.optim.sched.name
gpt_ppo_critic -> trainer.ppo.host
gpt_ppo_critic -> trainer.ppo.token_file
gpt_ppo_actor -> remote_critic_rm.token_file
""")


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 1.5, True])
@pytest.mark.parametrize("name, key", TEXTS)
def test_what_is_no_text_is_refused_by_name(configuration, name, key, value):
    assert key in refusal(configuration, name, key, value)
