# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of planted faults keeps up with the code: `make mutants` itself takes minutes."""

import re

from tests.cases import in_one_test
from tests.mutants import MUTANTS, ROOT, occurrences


@in_one_test("mutant", MUTANTS)
def test_its_text_is_in_its_file_once(mutant):
    assert occurrences(mutant) == 1
    assert mutant.old != mutant.new


@in_one_test("mutant", MUTANTS)
def test_the_tests_that_must_notice_it_exist(mutant):
    assert mutant.tests
    for selection in mutant.tests:
        file, _, test = selection.partition("::")
        text = (ROOT / file).read_text()
        if test:
            assert re.search(rf"^def {re.escape(test.partition('[')[0])}\(", text, re.MULTILINE)


def test_names_differ():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 10
