# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for `tests.mutants`: writes how each test ended, and which package it tested, to
$MUTANT_REPORT (JSON).
"""

import json
import os
import re
import sys

import pytest

_outcomes: dict[str, str] = {}


def _is_assertion(error: BaseException) -> bool:
    """Whether an assertion failed, in the test itself or in a rank of `run_ranks`, or ranks of
    `run_ranks` wait for ever: of one that breaks, it tells the error.
    """
    if isinstance(error, (AssertionError, pytest.fail.Exception, TimeoutError)):
        return True
    failed = re.search(r"^(AssertionError|Failed)\b", str(error), re.MULTILINE)
    return isinstance(error, RuntimeError) and failed is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        _outcomes[item.nodeid] = (
            "assertion" if call.excinfo and _is_assertion(call.excinfo.value) else "error"
        )
    elif report.when == "call" and report.passed:
        _outcomes.setdefault(item.nodeid, "passed")
    return report


def pytest_collectreport(report):
    if report.failed:
        _outcomes[report.nodeid] = "error"


def pytest_sessionfinish():
    package = sys.modules.get("nemo_aligner")
    result = {"package": package and package.__file__, "tests": _outcomes}
    with open(os.environ["MUTANT_REPORT"], "w") as file:
        json.dump(result, file)
