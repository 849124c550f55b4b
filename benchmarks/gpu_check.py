# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes and how fast, in at most eight minutes and without a network.

    make gpu-check                       in the environment of `make`
    python benchmarks/gpu_check.py       in that of an image: its PyTorch, its numpy

The parts run one after another, each within its own limit: a selection of `make test-gpu`, the
table of `one_gpu.py` (against Hugging Face, and vLLM where it can be imported), the profile of
`gpu_profile.py`, and memory against `nemo-aligner plan`. `--out` gets a log and the figures of
each, `gpu_check.json` with all of them, and `gpu_check.md`, their tables. Without a GPU the parts
are only named.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """A command of this Python, and the seconds that it may take."""

    title: str
    words: tuple[str, ...]
    limit: int
    figures: bool = True  # it writes a JSON file; else its log ends with a table


PARTS = {
    "numbers": Part(
        "The numbers of a CPU",
        ("-m", "pytest", "-q", "tests/gpu", "-k", "llama or graphs"),
        150,
        figures=False,
    ),
    "speed": Part("Speed", ("benchmarks/one_gpu.py", "--repeats", "2"), 180),
    "profile": Part("Where the time goes", ("benchmarks/gpu_profile.py",), 75),
    "memory": Part(
        "Memory against plan",
        ("benchmarks/plan_memory.py", "actor 1.1B bf16", "critic 1.1B bf16"),
        75,
        figures=False,
    ),
}


def run(name: str, part: Part, out: Path) -> dict[str, Any]:
    """Run one part; its seconds, exit code (None: cut off at its limit) and figures."""
    words = [sys.executable, *part.words]
    figures = out / f"{name}.json"
    if part.figures:
        words += ["--json", str(figures)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start, code = time.monotonic(), None
    with open(out / f"{name}.log", "w") as log:
        # A group of its own, so that what the part has started ends with it.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start), "exit_code": code}
    if figures.exists():
        content = json.loads(figures.read_text())
        tables = {content["title"]: content["rows"]} | content.get("tables", {})
        found["tables"] = {title: rows for title, rows in tables.items() if rows}
    else:
        found["end"] = (out / f"{name}.log").read_text().splitlines()[-12:]
    return found


def page(results: dict[str, dict[str, Any]]) -> str:
    """The tables in Markdown."""
    lines = []
    for name, found in results.items():
        part = PARTS[name]
        state = "cut off" if found["exit_code"] is None else f"exit code {found['exit_code']}"
        lines += [f"## {part.title}", "", f"{found['seconds']} s, {state}.", ""]
        for title, rows in found.get("tables", {}).items():
            lines += [title, "", measure.table(rows), ""]
        lines += [*found.get("end", []), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_check")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    names = args.parts or list(PARTS)
    if not torch.cuda.is_available():
        print("There is no CUDA device here. On a machine with one, this would run:")
        for name in names:
            part = PARTS[name]
            print(f"  {name}, at most {part.limit} s: python {shlex.join(part.words)}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in names:
        print(f"{PARTS[name].title}: at most {PARTS[name].limit} s", flush=True)
        results[name] = run(name, PARTS[name], args.out)
        # Written after each part: a run that is cut off leaves what it has found.
        content = {"machine": measure.machine(), "parts": results}
        (args.out / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
        (args.out / "gpu_check.md").write_text(page(results))
    print(page(results))
    return int(any(found["exit_code"] != 0 for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
