# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md and docs/config.md are what their scripts write from the lists of the code."""

import functools
import importlib.util
from pathlib import Path

import pytest

from nemo_aligner.config.inert_keys import INERT, ONLY
from nemo_aligner.core.retired import RETIRED

ROOT = Path(__file__).parents[2]


@functools.cache
def generator(name="migration_page"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["migration_page", "config_page"])
def test_the_committed_page_is_the_generated_one(name):
    module = generator(name)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), f"run scripts/{name}.py"


def test_every_entry_of_the_lists_is_on_the_page():
    module = generator()
    page = module.page()
    keys = {module.of_any_set(key) for entries in INERT.values() for key in entries} | ONLY.keys()
    retired = {name for entries in RETIRED.values() for name in entries}
    assert {name for name in keys | retired if f"`{name}`" not in page} == set()
