# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of docs/parallelism.md, from the figures of the matrix of splits.

    MATRIX=all MATRIX_REPORT=matrix.jsonl make test-full ARGS="-k test_matrix"
    python scripts/matrix_table.py matrix.jsonl

The tests append to the report: begin with a new file.
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

# Column -> what the names of its figures begin with
COLUMNS = {
    "Loss, metrics": ("loss", "step", "empty"),
    "Gradients": ("gradient",),
    "Log-probs, entropy, values, rewards": (
        "logprobs",
        "reference",
        "entropy",
        "values",
        "rewards",
    ),
    "Weights after 2 steps": ("weights 2",),
}


def rows(lines: list[str]) -> list[str]:
    """A row of Markdown for each split, with the worst figure of each column."""
    models: dict[str, list[str]] = defaultdict(list)
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    texts: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        record = json.loads(line)
        if len(record["case"]) != 3:  # a checkpoint loaded at another split
            continue
        split, model, _role = record["case"]
        if model not in models[split]:
            models[split].append(model)
        # A split of the data deals other samples to a micro-batch: its reduction must differ.
        deals = "DP" in split or "EP" in split
        for name, number in record["numbers"].items():
            if deals and "microbatch" in name and not name.endswith(" 1"):
                continue
            if name.startswith("generated"):  # infinite where a token differs
                texts[split].append(number)
            for column, starts in COLUMNS.items():
                if name.startswith(starts):
                    known = worst[split].get(column, 0.0)
                    worst[split][column] = number if math.isnan(number) else max(number, known)
    result = []
    for split, names in models.items():
        if split == "one rank":
            continue
        figures = [worst[split].get(column, 0.0) for column in COLUMNS]
        if "bf16" in split or not texts[split]:
            text = "not compared"
        else:
            text = "the same" if max(texts[split]) < math.inf else "differ"
        cells = [split, ", ".join(names), *(_short(n) for n in figures), text]
        result.append(f"| {' | '.join(cells)} |")
    return result


def _short(number: float) -> str:
    """Two digits, as 2.6e-6."""
    return f"{number:.1e}".replace("e-0", "e-") if number else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("report", type=Path, help="file that MATRIX_REPORT named")
    args = parser.parse_args()
    print("\n".join(rows(args.report.read_text().splitlines())))


if __name__ == "__main__":
    main()
