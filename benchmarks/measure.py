# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: two ways of doing the same that take turns, and their figures as JSON
and as a table.

Each side runs in a process of its own, at one thread, and they are called in turns (A B A B ...),
so that only one of them works at a time; the first call of each does not count. CPU seconds of the
process are the measure: work of others does not add to them, as it does to the time on the clock.
`others` says how busy it kept the machine meanwhile, as a share of all its cores; busy neighbours
still slow memory and caches down.

A benchmark writes `{"benchmark": name, "title": ..., "machine": {...}, "rows": [{...}, ...]}`. The
keys of a row are the columns of the table, `case` first. `tables` may have more rows, by what
stands above them on the page, and `curves` what is drawn: `{label: {x: y, ...}, ...}`.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("torch", "megatron-core", "transformers", "nemo-toolkit", "numpy")
Row = dict[str, Any]


@dataclass
class Figures:
    """Measured calls of one function.

    Attributes:
        cpu: CPU seconds of each call.
        wall: seconds of each call on the clock.
        others: share of the machine's cores that other processes kept busy during each call.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median CPU seconds."""
        return statistics.median(self.cpu)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the CPU seconds."""
        return (max(self.cpu) - min(self.cpu)) / self.seconds


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What PyTorch reads on a rank of this machine; they meet at `port`."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in values.items()}


def run_ranks(command: Sequence[str], ranks: int) -> None:
    """Run a command on so many ranks and wait for them; `SystemExit`: one of them failed."""
    from nemo_aligner.servers.ports import find_free_port

    port = find_free_port()
    of_rank = [rank_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    processes = [subprocess.Popen(command, env=os.environ | each) for each in of_rank]
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.5)
        if any(codes):
            raise SystemExit(f"a process of {ranks} failed; see its error above")
    finally:
        for process in processes:
            process.kill()  # one that waits for another that is gone


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its descendants have used."""
    total, process = 0.0, psutil.Process(pid)
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Side:
    """A process that builds something and then runs it when asked.

    Args:
        build: function of a module that returns functions by the names of their cases; it is
            called in the process, which PyTorch gives one thread.
        arguments: of `build`.

    Attributes:
        is_warm: whether it has run a case.
    """

    def __init__(self, build: Callable[..., dict[str, Callable[[], object]]], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments))
        self._process.start()
        theirs.close()
        self.is_warm = False

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()
        self._process.join()

    def run(self, case: str) -> tuple[float, float, float]:
        """CPU seconds and seconds on the clock of one call, and the share of all cores that other
        processes kept busy meanwhile.

        Raises:
            EOFError: the process has ended; its error is on the terminal.
        """
        self.is_warm = True
        return _run_together([self], case)

    def send(self, case: str) -> None:
        """Have the process run a case; an empty one collects garbage."""
        self._connection.send(case)

    def receive(self) -> tuple[float, float]:
        """CPU seconds and seconds on the clock of what was sent."""
        return self._connection.recv()


class Ranks:
    """Sides that run each case at the same time, as the ranks of one job do.

    Args:
        build: as in `Side`; its last three arguments are the rank, the number of ranks, and a
            port at which they can meet.
        count: number of ranks.
        arguments: of `build`, before these.
    """

    def __init__(
        self, build: Callable[..., dict[str, Callable[[], object]]], count: int, *arguments: Any
    ):
        from nemo_aligner.servers.ports import find_free_port

        port = find_free_port()
        self._sides = [Side(build, *arguments, rank, count, port) for rank in range(count)]
        self.is_warm = False

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for side in self._sides:
            side.__exit__(*error)

    def run(self, case: str) -> tuple[float, float, float]:
        """As `Side.run`: CPU seconds of all ranks together, seconds until the last one is done."""
        self.is_warm = True
        return _run_together(self._sides, case)


def _run_together(sides: Sequence[Side], case: str) -> tuple[float, float, float]:
    for side in sides:
        side.send("")
    for side in sides:
        side.receive()
    busy = busy_seconds()
    for side in sides:
        side.send(case)
    cpus, walls = zip(*(side.receive() for side in sides), strict=True)
    cpu, wall = sum(cpus), max(walls)
    others = (busy_seconds() - busy - cpu) / wall / (os.cpu_count() or 1)
    return cpu, wall, min(max(others, 0.0), 1.0)


def _serve(connection: Any, build: Callable, arguments: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    functions = build(*arguments)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        cpu, wall = time.process_time(), time.perf_counter()
        if case:
            functions[case]()
        else:
            gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        connection.send((time.process_time() - cpu, time.perf_counter() - wall))


def in_turns(
    sides: Mapping[str, Side | Ranks], case: str | Mapping[str, str], repeats: int
) -> dict[str, Figures]:
    """Figures of a case, or of the one that `case` names for each side; the first run of a process
    does not count.
    """
    figures = {name: Figures() for name in sides}
    cases = dict.fromkeys(sides, case) if isinstance(case, str) else case
    for name, side in sides.items():
        if not side.is_warm:
            side.run(cases[name])
    for _ in range(repeats):
        for name, side in sides.items():
            cpu, wall, others = side.run(cases[name])
            figures[name].cpu.append(cpu)
            figures[name].wall.append(wall)
            figures[name].others.append(others)
    return figures


def seconds_of(function: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a function in this process, after one call that does not count."""
    return seconds_in_turns({"": function}, repeats)[""]


def seconds_in_turns(
    functions: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """As `seconds_of`, of several functions that take turns."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            found[name].append(time.process_time() - start)
    return {name: statistics.median(each[1:]) for name, each in found.items()}


def pair_row(case: str, figures: dict[str, Figures], **more: Any) -> Row:
    """A row for `ours` and `peer` of `in_turns`: CPU seconds and their ratio, which is above 1
    where ours is the faster one.
    """
    ours, peer = figures["ours"], figures["peer"]
    return {
        "case": case,
        "ours, CPU s": round(ours.seconds, 3),
        "peer, CPU s": round(peer.seconds, 3),
        "ratio": round(peer.seconds / ours.seconds, 2),
        "spread": f"{ours.spread:.0%}, {peer.spread:.0%}",
        "ours, clock s": round(statistics.median(ours.wall), 3),
        "peer, clock s": round(statistics.median(peer.wall), 3),
        "others": f"{statistics.mean([*ours.others, *peer.others]):.0%}",
        **more,
    }


def precisions() -> list[str]:
    """Precisions to be measured. On a CPU on which oneDNN has no kernels for bf16 it takes up to
    twenty times as long as fp32 on either side, which nobody would choose.
    """
    import torch

    from nemo_aligner.parallel.device import onednn_packs

    return ["32", "bf16"] if onednn_packs(torch.bfloat16) else ["32"]


def cpu_model() -> str:
    """The processor's name, and what it has of matrix units for bf16."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    units = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', platform.processor())} ({', '.join(units) or 'no AVX-512'})"


def machine() -> dict[str, str]:
    """Where and with what the figures were measured."""
    import torch

    found = {"date": datetime.date.today().isoformat(), "cpu": cpu_model()}
    found |= {"cores": str(os.cpu_count())}
    found |= {"system": f"{platform.system()} {platform.release()}"}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    found["python"] = platform.python_version()
    return found | {name: importlib.metadata.version(name) for name in LIBRARIES}


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table; a key that a row lacks is an empty cell."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(str(row.get(column, '')) for column in columns)} |")
    return "\n".join(lines)


def report(benchmark: str, title: str, rows: list[Row], path: str | None, **more: Any) -> None:
    """Print the tables, and write the JSON file if `path` is given; `more` has its other keys."""
    for name, each in {title: rows, **more.get("tables", {})}.items():
        print(f"\n{name}\n\n{table(each)}", flush=True)
    if path:
        content = {"benchmark": benchmark, "title": title, "machine": machine(), "rows": rows}
        content |= more
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def arguments(doc: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """The parser of a benchmark: `--json` and `--repeats`."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds that count")
    return parser
