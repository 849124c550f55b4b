# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks, one after another, and write their figures into benchmarks/figures.md.

    python benchmarks/run.py --page

`make bench` does that. Each benchmark is a process that writes `benchmarks/results/<name>.json`;
`--only` names some of them, and with `--page` alone `--only` may be empty: the page is then
written from the figures that are there. The table of a benchmark stands between two comments of
the page, which name it; a table without new figures stays as it is.
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE, PLOT = ROOT / "benchmarks/figures.md", ROOT / "docs/assets/performance.svg"
CURVES = ROOT / "docs/assets"
# In this order; those of start-up choose their threads themselves.
BENCHMARKS = (
    "generate",
    "updates",
    "ppo_step",
    "rs_step",
    "padding",
    "reshard",
    "wire",
    "startup",
    "scaling",
)
OWN_THREADS = ("startup",)
WIDTH, ROW, LEFT = 760, 22, 400  # of the plot


def run(name: str) -> bool:
    """Run one benchmark; returns whether it succeeded."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # figures of CPUs
    if name in OWN_THREADS:
        del environment["OMP_NUM_THREADS"]
    script, figures = ROOT / f"benchmarks/{name}.py", RESULTS / f"{name}.json"
    start = time.monotonic()
    with open(RESULTS / f"{name}.log", "w") as log:
        code = subprocess.run(
            [sys.executable, str(script), "--json", str(figures)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    minutes = (time.monotonic() - start) / 60
    outcome = "done" if not code else f"failed, see {log.name}"
    print(f"{name}: {outcome} ({minutes:.1f} minutes)", flush=True)
    if not code:
        print(measure.table(json.loads(figures.read_text())["rows"]), flush=True)
    return not code


def section(name: str) -> str:
    """The tables of one benchmark and what it was measured with."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    machine = content.get("machine") or measure.machine()
    versions = ", ".join(f"{key} {machine[key]}" for key in ("python", *measure.LIBRARIES))
    where = f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, {versions}."
    words, lines = where.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 95:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    parts = [measure.table(content["rows"])]
    for title, rows in content.get("tables", {}).items():
        parts += [f"{title}:", measure.table(rows)]
    return "\n\n".join([*parts, "\n".join(lines)])


def plot(rows: list[dict[str, Any]]) -> str:
    """Bars of how many times as fast as the peer each case is, as SVG."""
    height = ROW * len(rows) + 40
    largest = max(row["ratio"] for row in rows)

    def x_of(ratio: float) -> float:
        return LEFT + ratio / largest * (WIDTH - LEFT - 50)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#888">',
        f'<text x="{x_of(1):.0f}" y="14" text-anchor="middle">as fast as the peer</text>',
    ]
    for number, row in enumerate(rows):
        y = 24 + ROW * number
        color = "#2a7" if row["ratio"] >= 1 else "#c63"
        end, case = x_of(row["ratio"]), html.escape(row["case"])
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{case}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.0f}" height="{ROW - 6}" '
            f'fill="{color}"/>',
            f'<text x="{end + 5:.0f}" y="{y + 13}">{row["ratio"]:.2f}</text>',
        ]
    line = x_of(1)
    parts.append(
        f'<line x1="{line:.0f}" x2="{line:.0f}" y1="18" y2="{height - 12}" stroke="#888"/></svg>'
    )
    return "\n".join(parts) + "\n"


STYLE = (
    "text{font:12px sans-serif;fill:#888}.grid{stroke:#8884}.curve{fill:none;stroke-width:2}"
    ".c1{stroke:#2a7;fill:#2a7}.c2{stroke:#37c;fill:#37c}.c3{stroke:#c63;fill:#c63}"
    ".c4{stroke:#888;fill:#888}.curve.c1,.curve.c2,.curve.c3,.curve.c4{fill:none}"
    ".label{stroke:none}"
)


def drawn(title: str, curves: dict[str, dict[str, float]]) -> str:
    """Curves as SVG that needs no style of a page."""
    from nemo_aligner.report.elements import chart_svg

    numbers = {name: {float(x): y for x, y in curve.items()} for name, curve in curves.items()}
    svg = chart_svg(title, numbers, axis="GPUs")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
    return svg.replace("<svg ", head, 1).replace(">", f"><style>{STYLE}</style>", 1) + "\n"


def write_page() -> None:
    """Write the tables of all figures that are there, the plot of those against a peer, and the
    curves.
    """
    text, compared = PAGE.read_text(), []
    for name in BENCHMARKS:
        figures = RESULTS / f"{name}.json"
        if not figures.is_file():
            continue
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"{PAGE} has no lines '{begin}' and '{end}'")
        text = pattern.sub(lambda _: f"{begin}\n\n{section(name)}\n\n{end}", text)  # noqa: B023
        content = json.loads(figures.read_text())
        compared += [row for row in content["rows"] if "ratio" in row and "case" in row]
        for title, curves in content.get("curves", {}).items():
            (CURVES / f"{name}.svg").write_text(drawn(title, curves))
    PAGE.write_text(text)
    if compared:
        PLOT.write_text(plot(compared))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=list(BENCHMARKS), choices=BENCHMARKS)
    parser.add_argument("--page", action="store_true", help="write the figures into the page")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    names = [name for name in args.only if (ROOT / f"benchmarks/{name}.py").is_file()]
    succeeded = [run(name) for name in names]
    if args.page:
        write_page()
    sys.exit(not all(succeeded))


if __name__ == "__main__":
    main()
