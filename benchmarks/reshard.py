# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation on two ranks at the split of training, and with the weights resharded for it
(`generation.reshard`): through a pipeline and gathered, tensor-parallel and moved.

    OMP_NUM_THREADS=1 python benchmarks/reshard.py

Both ways take turns on the same two processes, with one thread each, and give the same texts,
which is checked. A resharded rollout includes the time in which its weights are moved, checksums
included; that time is shown too. CPU seconds are the sum of both ranks. The ranks of a pipeline
take turns, so the sum is also the least time on the clock; copies on each rank work side by side,
so for them that is the busiest rank's. The clock itself depends on what others run (`others`).
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import countdown
import measure
import torch
from torch import Tensor

RANKS = 2
# Name, split of training, `generation.reshard`.
SPLITS = {
    "PP2, gathered (auto)": ({"pipeline_model_parallel_size": 2}, "auto"),
    "TP2, moved to TP1": ({"tensor_model_parallel_size": 2}, {"tp": 1, "pp": 1}),
}
LENGTHS = {
    "32 rows, 32 + 128 tokens": countdown.fixed_lengths(32),
    "64 skewed responses": countdown.skewed_lengths(64),
}
MEGABYTE = 1e6


class Spent(NamedTuple):
    """Of one call on both ranks.

    Attributes:
        cpu: seconds, the sum of both.
        busiest: CPU seconds of the rank that needed more.
        clock: seconds of the slower one.
        others: share of all cores that other processes kept busy meanwhile.
    """

    cpu: float
    busiest: float
    clock: float
    others: float


def timed(function: Callable[[], Any]) -> tuple[Any, Spent]:
    """The result and what it took; both ranks call it."""
    torch.distributed.barrier()
    busy, cpu, start = measure.busy_seconds(), time.process_time(), time.perf_counter()
    result = function()
    own = torch.tensor([time.process_time() - cpu, time.perf_counter() - start])
    total, most = own.clone(), own.clone()
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    others = (measure.busy_seconds() - busy - float(total[0])) / float(most[1])
    share = min(max(others / (os.cpu_count() or 1), 0.0), 1.0)
    return result, Spent(float(total[0]), float(most[0]), float(most[1]), share)


def rows_of(at: countdown.Folders, name: str, repeats: int) -> list[measure.Row]:
    """The rows of one of `SPLITS`; both ranks call it."""
    split, reshard = SPLITS[name]
    actor = countdown.load_actor(at, **split)
    actor.prepare_for_inference()
    trained = actor.generator.split
    actor.settings.generation.reshard = reshard
    ways = {"trained": trained, "resharded": actor._generation_split()}

    def generate(lengths: Tensor) -> Any:
        prompts = countdown.prompts(lengths)
        widths = torch.full((len(lengths),), prompts.size(1))
        seeds = torch.arange(len(lengths))
        return actor.generator.generate(prompts, widths, seeds, actor.generation_params)

    def move() -> int:
        (module,) = ways["resharded"].weights(actor.unwrapped())
        own = {weight.data_ptr() for chunk in actor.unwrapped() for weight in chunk.parameters()}
        return sum(w.nbytes for w in module.parameters() if w.data_ptr() not in own)

    moves = [timed(move) for _ in range(repeats + 1)][1:]
    rows = []
    for case, lengths in LENGTHS.items():
        found: dict[str, list[Spent]] = {way: [] for way in ways}
        for repeat in range(repeats + 1):
            texts = []
            for way, groups in ways.items():
                actor.generator.split = groups
                output, spent = timed(lambda lengths=lengths: generate(lengths))
                texts.append(output.response_tokens)
                if repeat:
                    found[way].append(spent)
            if not torch.equal(*texts):
                raise RuntimeError(f"{name}, {case}: other texts with the weights resharded")
        row: measure.Row = {"split": name, "case": case}
        for unit in ("CPU", "busiest", "clock"):
            for way in ways:
                seconds = [getattr(spent, unit.lower()) for spent in found[way]]
                row[f"{way}, {unit} s"] = round(statistics.median(seconds), 2)
        row["moving, CPU s"] = round(statistics.median(spent.cpu for _, spent in moves), 2)
        row["moving, clock s"] = round(statistics.median(spent.clock for _, spent in moves), 2)
        row["moved, MB per rank"] = round(moves[0][0] / MEGABYTE, 1)
        others = [spent.others for way in ways for spent in found[way]]
        row["others"] = f"{statistics.mean(others):.0%}"
        rows.append(row)
    return rows


def rank_main(folder: Path, repeats: int) -> None:
    """On each rank; the first writes the rows."""
    from megatron.core.parallel_state import destroy_model_parallel

    torch.set_num_threads(1)
    rows = []
    for name in SPLITS:
        at = countdown.Folders(folder / "hugging_face", folder / "nemo")
        rows += rows_of(at, name, repeats)
        destroy_model_parallel()
    if torch.distributed.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = measure.arguments(__doc__, repeats=1)
    parser.add_argument("--rank-of", type=Path, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.rank_of, args.repeats)
        return
    with countdown.folders() as at, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hugging_face").symlink_to(at.hugging_face)
        (folder / "nemo").symlink_to(at.nemo)
        command = [sys.executable, __file__, "--rank-of", name, "--repeats", str(args.repeats)]
        measure.run_ranks(command, RANKS)
        rows = json.loads((folder / "rows.json").read_text())
    measure.report("reshard", "Generation on two ranks", rows, args.json)


if __name__ == "__main__":
    main()
