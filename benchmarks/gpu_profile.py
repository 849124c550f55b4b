# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the time of generation and of an update goes: milliseconds of the device by operation.

    python benchmarks/gpu_profile.py

The model and the samples are those of `one_gpu.py`; without a GPU a small model runs on the CPU.
Generation runs without CUDA graphs, so that its operations can be told apart: per decoding step
(prefill included), next to the whole time with graphs on the clock.
"""

import time
from collections.abc import Callable
from typing import Any

import countdown
import measure
import one_gpu
import torch
import updates
from torch.profiler import ProfilerActivity, profile

LARGEST = 14  # operations of a table


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], object]) -> float:
    """Of one call on the clock, after one that does not count."""
    function()
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def operations(function: Callable[[], object], steps: int = 1) -> list[measure.Row]:
    """Calls and milliseconds of the device by operation, of one of `steps` equal parts of a call;
    the largest first, and all others together.
    """
    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    function()
    with profile(activities=kinds) as found:
        function()
        synchronize()
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [
        (getattr(event, kind) / 1e3 / steps, event.count / steps, event.key)
        for event in found.key_averages()
        if event.device_type == torch.autograd.DeviceType.CPU and getattr(event, kind)
    ]
    rows.sort(reverse=True)
    whole, rest = sum(row[0] for row in rows), rows[LARGEST:]
    shown = rows[:LARGEST]
    if rest:
        shown.append((sum(row[0] for row in rest), sum(row[1] for row in rest), "others"))
    shown.append((whole, sum(row[1] for row in rows), "all"))
    return [
        {
            "operation": key,
            "calls": round(calls, 1),
            "ms": round(ms, 3),
            "share": f"{ms / whole:.0%}",
        }
        for ms, calls, key in shown
    ]


def tables(at: countdown.Folders, precision: str, rows: int, sizes: updates.Sizes) -> dict:
    """The tables by their titles."""
    lengths = countdown.fixed_lengths(rows)
    case = {"all": one_gpu.generate.Case(lengths, rows, sizes.prompt)}
    found: dict[str, list[measure.Row]] = {}
    times = {}
    for graphs in ("auto", False):
        keys = {"ppo": {"generation": {"cuda_graphs": graphs}}}
        [generate] = one_gpu.generate.build_ours(at, precision, case, **keys).values()
        times[graphs] = seconds(generate) / countdown.LONGEST * 1e3
    whole = " and ".join(f"{ms:.2f} ms with cuda_graphs={key}" for key, ms in times.items())
    title = f"A decoding step of {rows} rows ({whole} on the clock)"
    found[title] = operations(generate, countdown.LONGEST)
    del generate
    functions: dict[str, Any] = updates.build_ours(at, precision, sizes)
    name = sizes.cases[len(sizes.lengths)]
    found[f"{name} ({seconds(functions[name]):.3f} s on the clock)"] = operations(functions[name])
    return found


def main() -> None:
    args = measure.arguments(__doc__).parse_args()
    on_gpu = torch.cuda.is_available()
    shape, precision = (one_gpu.SHAPE, one_gpu.PRECISION) if on_gpu else (countdown.SMALL, "32")
    rows, sizes = (64, one_gpu.SIZES) if on_gpu else (16, updates.SMALL)
    with countdown.folders(shape) as at:
        found = tables(at, precision, rows, sizes)
    title, *others = found
    more = {other: found[other] for other in others}
    measure.report("gpu_profile", title, found[title], args.json, tables=more)


if __name__ == "__main__":
    main()
