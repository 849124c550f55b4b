# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of unit tests."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """`write(*records, name="data.jsonl") -> path`: a jsonl file."""

    def write(*records, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write
