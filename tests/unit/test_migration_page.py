# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md and docs/config.md are what their scripts write from the lists of the code."""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

from nemo_aligner.config.inert_keys import INERT, ONLY
from nemo_aligner.core.retired import RETIRED
from tests.cases import in_one_test

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
    page = generator().page()
    keys = {key for entries in INERT.values() for key in entries} | ONLY.keys()
    retired = {name for entries in RETIRED.values() for name in entries}
    assert {name for name in keys | retired if f"`{name}`" not in page} == set()


def test_every_section_names_its_tests():
    module = generator()
    text = module.page().partition(module.MARK)[2]
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings == list(module.TESTS)
    assert all(tests for section in module.TESTS.values() for tests in section.values())


NAMED = sorted(
    {
        test
        for section in generator().TESTS.values()
        for tests in section.values()
        for test in tests
    }
)


@in_one_test("test", NAMED)
def test_a_test_of_the_page_exists_and_checks_something(test):
    file, _, name = test.partition(":")
    body = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body
    (function,) = [each for each in body if getattr(each, "name", None) == name]
    nodes = list(ast.walk(function))
    raises = {
        call.func.attr
        for call in nodes
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    }
    checks = {"raises", "warns", "assert_close", "assert_allclose"}
    calls = {
        call.func.id
        for call in nodes
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    helpers = {each for each in calls if each.startswith(("assert_", "must_", "run_"))}
    assert any(isinstance(node, ast.Assert) for node in nodes) or raises & checks or helpers
