# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md is what scripts/migration_page.py writes from the lists of the code."""

import importlib.util
from pathlib import Path

from nemo_aligner.config.inert_keys import INERT, ONLY
from nemo_aligner.core.retired import RETIRED

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location(
        "migration_page", ROOT / "scripts" / "migration_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_the_generated_one():
    module = generator()
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), (
        "run python scripts/migration_page.py"
    )


def test_every_entry_of_the_lists_is_on_the_page():
    page = generator().page()
    keys = {key for entries in INERT.values() for key in entries} | ONLY.keys()
    retired = {name for entries in RETIRED.values() for name in entries}
    assert {name for name in keys | retired if f"`{name}`" not in page} == set()
