# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of unit tests."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from nemo.utils import logging

from nemo_aligner import compat
from nemo_aligner.core.endings import ExitCode
from nemo_aligner.data.nlp import index_files

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))


@pytest.fixture
def write(tmp_path):
    """`write(*records, name="data.jsonl") -> path`: a jsonl file; a text is a line as it is."""

    def write(*records, name="data.jsonl"):
        path = tmp_path / name
        lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


@pytest.fixture(scope="module")
def benchmark():
    """`benchmark(name)`: a module of the folder `benchmarks`; the walk-throughs have a `run`
    too.
    """
    others = sys.modules.pop("run", None)
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
    sys.modules.pop("run", None)
    if others is not None:
        sys.modules["run"] = others


@pytest.fixture
def log_level():
    """The commands lower it for their process."""
    level = logging.getEffectiveLevel()
    yield
    logging.setLevel(level)


@pytest.fixture
def error_of(capsys):
    """`error_of(main, *words) -> text`: the message with which a command ends."""

    def error_of(main, *words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == ExitCode.USER_ERROR, words
        return capsys.readouterr().err.split("ERROR: ")[-1]

    return error_of


@pytest.fixture
def no_small_files(monkeypatch, tmp_path):
    """Every file counts as large; nothing is written outside the test's folder."""
    monkeypatch.setattr(index_files, "SMALL", 0)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "home"))


@pytest.fixture
def installed():
    """What stands in for NeMo's removed collection `nlp` can be imported."""
    finders = list(sys.meta_path)
    compat.install()
    yield
    sys.meta_path[:] = finders
    for module in [name for name in sys.modules if name.startswith(compat.PREFIX)]:
        del sys.modules[module]
