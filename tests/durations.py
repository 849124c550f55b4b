# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Plugin of `make test-full`: the seconds that each file of tests took, beside durations.txt. A
file that takes twice as long as there, or is new and long, ends the run with an error.

    make test-full ARGS=--write-durations     # writes the table anew

Machines differ, so the files are compared with each other: what most of them take more is the
machine's.
"""

from collections import Counter
from pathlib import Path
from statistics import median

import pytest

TABLE = Path(__file__).with_name("durations.txt")
TWICE, LEAST_S = 2.0, 10.0  # times, and seconds more, that are too much
KNOWN_SHARE = 0.9  # of the table's files, that a run must have to be judged


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config))


class Durations:
    """Adds up the seconds of each file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.seconds = config, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        passed = exitstatus == pytest.ExitCode.OK
        if not self.config.getoption("--write-durations"):
            wrong = too_slow(self.seconds, read())
        elif passed and not self.config.getoption("keyword"):
            TABLE.write_text(as_table(self.seconds))
            return
        else:
            wrong = ["durations.txt stays as it is: only a run of all tests that passed writes it"]
        if wrong:
            session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
            self.config.get_terminal_writer().line("\n".join(["", *wrong]), red=True)


def as_table(seconds: dict[str, float]) -> str:
    """One line for each file that takes a second, the slowest first."""
    ordered = sorted(seconds.items(), key=lambda item: (-round(item[1]), item[0]))
    return "".join(f"{took:6.0f} {file}\n" for file, took in ordered if round(took))


def read() -> dict[str, float]:
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {file: float(took) for took, file in map(str.split, lines)}


def too_slow(seconds: dict[str, float], known: dict[str, float]) -> list[str]:
    """A line for each file that takes too long; none for a run of a part of the files."""
    both = known.keys() & seconds.keys()
    if not both or len(both) < KNOWN_SHARE * len(known):
        return []
    machine = median(seconds[file] / known[file] for file in both)
    slow = []
    for file, took in sorted(seconds.items()):
        expected = machine * known.get(file, 0.0)
        if took > TWICE * expected and took - expected > LEAST_S:
            slow.append(
                f"{file} took {took:.0f} s, {expected:.0f} s were expected of this machine: make "
                "it faster, or run make test-full ARGS=--write-durations."
            )
    return slow
