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

ROOT = Path(__file__).parents[1]


def imports_of(script: Path) -> str:
    """The import statements in the job of nemo_aligner/jobs that a script starts, and in the
    functions beside it that the job calls, as a program that makes them as the job does.
    """
    module, job = next(
        (node.module, node.names[0].name)
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nemo_aligner.jobs.")
    )
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    called = [functions.pop(job)]
    statements = [f"from {module} import {job}"]
    for function in called:  # it grows
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                statements.append(ast.unparse(node))
            elif isinstance(node, ast.Name) and node.id in functions:
                called.append(functions.pop(node.id))
    start = "from nemo_aligner.launch.start_up import long_imports\nwith long_imports():\n    "
    return start + "\n    ".join(statements)


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
    for script in sorted((ROOT / "examples/nlp/gpt").glob("*.py")):
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
