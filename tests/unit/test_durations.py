# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A file of tests that has become slow is named, on a machine of any speed."""

from tests.durations import as_table, read, too_slow

KNOWN = {f"tests/unit/test_{n}.py": 20.0 * n for n in range(1, 9)}


def test_a_file_that_doubles_is_named_on_a_slower_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.durations.TABLE", tmp_path / "durations.txt")
    (tmp_path / "durations.txt").write_text(as_table(KNOWN))
    assert read() == KNOWN
    slower = {file: 3 * took for file, took in KNOWN.items()}
    assert too_slow(slower, KNOWN) == []
    (line,) = too_slow(slower | {"tests/unit/test_2.py": 250.0}, KNOWN)
    assert line.startswith("tests/unit/test_2.py took 250 s, 120 s were expected")
    (line,) = too_slow(slower | {"tests/unit/test_new.py": 11.0}, KNOWN)
    assert line.startswith("tests/unit/test_new.py took 11 s")
    assert too_slow({"tests/unit/test_2.py": 250.0}, KNOWN) == []  # a part of the files
