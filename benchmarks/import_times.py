# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What each script costs before it does anything: CPU seconds of `--help`, and of the imports that
its job makes.

    OMP_NUM_THREADS=1 python benchmarks/import_times.py

Each figure is the best of `--rounds` processes, one after the other.
"""

import argparse
import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "examples/nlp/gpt"


def imports_of(script: Path) -> str:
    """The import statements of a script, those inside its functions too, as a program that makes
    them as the script does.
    """
    statements = [
        node
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    start = "from nemo_aligner.launch.start_up import long_imports\nwith long_imports():\n    "
    return start + "\n    ".join(map(ast.unparse, statements))


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    print("| script | --help | imports of the job |")
    print("|---|---|---|")
    for script in sorted(SCRIPTS.glob("*.py")):
        commands = ([str(script), "--help"], ["-c", imports_of(script)])
        figures = [
            min(cpu_seconds([sys.executable, *command]) for _ in range(args.rounds))
            for command in commands
        ]
        print(
            f"| {script.name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |", flush=True
        )


if __name__ == "__main__":
    main()
