# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Each cell of the matrix of faults, which docs/troubleshooting.md sums up, from its report.

    CHAOS=all CHAOS_REPORT=chaos.jsonl make chaos
    PYTHONPATH=. python scripts/fault_table.py chaos.jsonl

The tests append to the report: begin with a new file.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from tests.chaos import test_fault_matrix, test_two_machines
from tests.chaos.test_fault_matrix import Cell

CELLS = [*test_fault_matrix.ALL_CELLS, *test_two_machines.CELLS]
JOBS = {"ppo": "PPO", "rs": "Rejection sampling", "sft": "SFT"}


def rows(records: list[dict]) -> list[str]:
    """A row of Markdown for each process and fault: its phases, how many of them passed, and the
    median seconds.
    """
    seconds = {
        Cell(*(record[name] for name in Cell._fields)): record["seconds"] for record in records
    }
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in CELLS:
        role, fault = cell.role, cell.fault
        if role == "drawn":
            role, fault = "any process", "a signal at a drawn instant"
        groups[cell.kind, role, fault].append(cell)
    lines = []
    for (kind, role, fault), cells in groups.items():
        passed = [seconds[cell] for cell in cells if cell in seconds]
        phases = ", ".join(dict.fromkeys(cell.phase for cell in cells))
        median = f"{statistics.median(passed):.0f}" if passed else "-"
        count = f"{len(passed)} of {len(cells)}"
        lines.append(f"| {JOBS[kind]} | {role} | {fault} | {phases} | {count} | {median} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what CHAOS_REPORT named")
    lines = parser.parse_args().report.read_text().splitlines()
    print("\n".join(rows([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main()
