# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The algorithms share their code: few of its lines stand twice."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "algorithms", "core", "data/nlp", "models/nlp/gpt", "jobs"
FOLDERS = [ROOT / "nemo_aligner" / folder for folder in FOLDERS]
FILES = [file for folder in FOLDERS for file in sorted(folder.glob("*.py"))]
RUN = 5  # equal lines, one after the other, that count as a duplicate
MOST = 0.05  # of the lines; measured: 0.031


def code_lines(text: str) -> list[str]:
    """The lines without blank ones, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = [line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in left_out]
    return [line for line in lines if line and not line.startswith("#")]


def duplicates(texts: list[str]) -> tuple[int, int]:
    """(lines that stand in a run which another text has too, all lines)."""
    files = [code_lines(text) for text in texts]
    holders = defaultdict(set)
    for number, lines in enumerate(files):
        for start in range(len(lines) - RUN + 1):
            holders[tuple(lines[start : start + RUN])].add(number)
    found = 0
    for lines in files:
        twice: set[int] = set()
        for start in range(len(lines) - RUN + 1):
            if len(holders[tuple(lines[start : start + RUN])]) > 1:
                twice.update(range(start, start + RUN))
        found += len(twice)
    return found, sum(map(len, files))


def test_few_lines_of_the_algorithms_stand_twice():
    found, lines = duplicates([file.read_text(encoding="utf-8") for file in FILES])
    assert lines > 10_000 and found < MOST * lines, f"{found} of {lines} lines stand twice"


def test_what_counts_as_a_duplicate():
    same = "\n".join(f"x{n} = {n}" for n in range(RUN))
    assert duplicates([f'"""A."""\nimport a\n{same}\n', f"# b\n\n{same}\ny = 1"]) == (10, 11)
    assert duplicates([same, same.replace("x4", "z")]) == (0, 10)
