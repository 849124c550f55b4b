# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted faults, and the tests that must notice them: `python -m tests.mutants [NAME ...]`, or
`make mutants`.

Each fault is planted alone in a copy of the repository, where the tests that should notice it
run. It is caught if one of them fails by an assertion; a fault that merely crashes would be
noticed without a test. The same tests must first pass in the untouched copy. Exit code 1: a fault
was not caught, or its text is no longer in its file.
"""

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("nemo_aligner", "tests", "benchmarks", "conf", "examples", "setup.py", "pyproject.toml")
TIME_LIMIT_S = 3600  # for one run of pytest, which has limits of its own


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: of the fault.
        file: that it is planted in, below the package, or `examples/...`.
        old, new: text of the file, and what takes its place; `old` must occur once.
        tests: selections for pytest that must notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        return self.file if self.file.startswith("examples/") else f"nemo_aligner/{self.file}"


def read(table: str) -> Iterator[Mutant]:
    """The faults of `mutants.txt`, whose first lines say what stands there."""
    for fault in re.split(r"\n(?=[\w/]+\.py: )", table)[1:]:
        title, *lines = fault.splitlines()
        parts = {mark: [line[2:] for line in lines if line[:1] == mark] for mark in "-+="}
        old, new = ("\n".join(parts[mark]) for mark in "-+")
        file, _, name = title.partition(": ")
        yield Mutant(name, file, old, new, tuple(f"tests/{test}" for test in parts["="]))


MUTANTS = list(read((ROOT / "tests" / "mutants.txt").read_text()))


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    return (root / mutant.path).read_text().count(mutant.old)


def copy_repository(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "runs", "results", "*.pyc")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """Run a selection in a copy: ({test: "passed", "assertion" or "error"}, output).

    The package is installed in place: the copy is imported only because its folder comes first on
    the path, and the report says which one was.

    Raises:
        RuntimeError: the tests imported another package than the copy.
    """
    report = copy / "mutant_report.json"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        # a file that changes twice in a second may have stale byte code
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MUTANT_REPORT": str(report),
    }
    options = "-q -W ignore -p no:cacheprovider -p tests.mutant_report --tb=short".split()
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(copy), *tests]
    try:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options["timeout"] = TIME_LIMIT_S
        done = subprocess.run(command, cwd=copy, env=environment, **options)
    except subprocess.TimeoutExpired:
        return {}, f"no end after {TIME_LIMIT_S} s"
    if not report.exists():
        return {}, done.stdout
    result = json.loads(report.read_text())
    if result["package"] is not None and not Path(result["package"]).resolve().is_relative_to(
        copy.resolve()
    ):
        raise RuntimeError(f"the tests in {copy} imported {result['package']}")
    return result["tests"], done.stdout


def judge(mutant: Mutant, copy: Path) -> tuple[bool, str]:
    """Return (whether the fault is caught, what was seen)."""
    if occurrences(mutant, copy) != 1:
        return False, f"its text occurs {occurrences(mutant, copy)} times in {mutant.path}"
    path = copy / mutant.path
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        outcomes, output = run_tests(copy, mutant.tests)
    finally:
        path.write_text(original)
    noticed = [test for test, outcome in outcomes.items() if outcome == "assertion"]
    if noticed:
        first = noticed[0].rpartition("/")[2]
        return True, f"{len(noticed)} of {len(outcomes)} tests fail, e.g. {first}"
    if any(outcome == "error" for outcome in outcomes.values()) or not outcomes:
        return False, f"no test fails by an assertion, but something breaks:\n{output[-3000:]}"
    return False, f"SURVIVES {len(outcomes)} tests"


def check_untouched(copy: Path, mutants: list[Mutant]) -> str | None:
    """Return what is wrong with the selected tests in a copy without a fault, or None."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    outcomes, output = run_tests(copy, tests)
    failed = [test for test, outcome in outcomes.items() if outcome != "passed"]
    empty = [test for test in tests if not any(name.startswith(test) for name in outcomes)]
    if failed or empty or not outcomes:
        said = f"without a fault these fail: {failed}, and these ran nothing: {empty}"
        return f"{said}\n{output[-5000:]}"
    print(f"{len(outcomes)} tests pass without a fault", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time, each in its copy")
    arguments = parser.parse_args()
    wanted = arguments.names
    named = lambda mutant: not wanted or any(name in mutant.name for name in wanted)
    mutants = [mutant for mutant in MUTANTS if named(mutant)]
    if not mutants:
        names = "; ".join(mutant.name for mutant in MUTANTS)
        print(f"no fault is named like {wanted}; there are: {names}")
        return 1
    start = time.monotonic()
    pool = ThreadPoolExecutor(arguments.jobs)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, pool:
        copies = queue.SimpleQueue()
        for job in range(arguments.jobs):
            copies.put(copy_repository(Path(folder) / str(job)))
        copy = copies.get()
        problem = check_untouched(copy, mutants)
        copies.put(copy)
        if problem:
            print(problem)
            return 1

        def one(mutant: Mutant):
            copy, began = copies.get(), time.monotonic()
            try:
                return mutant, *judge(mutant, copy), time.monotonic() - began
            finally:
                copies.put(copy)

        survivors = 0
        for mutant, caught, seen, seconds in pool.map(one, mutants):
            survivors += not caught
            word = "caught" if caught else "MISSED"
            print(f"{word} {seconds:5.0f} s  {mutant.name}\n{'':14}{seen}", flush=True)
    caught, seconds = len(mutants) - survivors, time.monotonic() - start
    print(f"{caught} of {len(mutants)} faults are caught, in {seconds:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
