# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The decorators of `tests/cases.py`: a check in a loop fails as a test would, and the cases that
`make test` leaves out are marked.
"""

import pytest

from tests.cases import in_one_test, some_of


def test_all_faults_are_in_one_message(tmp_path):
    @in_one_test("number, word", [(1, "a"), (2, "b"), (3, "c")])
    def check(number, word, tmp_path):
        assert number == 2 and tmp_path.is_dir(), word

    with pytest.raises(AssertionError) as caught:
        check(tmp_path=tmp_path)
    text = str(caught.value)
    assert "(1, 'a')" in text and "(3, 'c')" in text and "(2, 'b')" not in text
    with pytest.raises(AssertionError):
        in_one_test("number", [])(lambda number: None)()


@pytest.mark.parametrize("keep, kept", [(1, ["a"]), (["b", "c"], ["b", "c"])])
def test_the_cases_that_are_not_kept_are_full(keep, kept):
    _names, cases = some_of("name", "abc", keep=keep).mark.args
    assert [case.values[0] for case in cases if pytest.mark.full not in case.marks] == kept


@pytest.mark.parametrize("keep", [3, ["d"]])
def test_something_is_kept_and_something_left_out(keep):
    with pytest.raises(AssertionError, match="of 3 cases"):
        some_of("name", "abc", keep=keep)
