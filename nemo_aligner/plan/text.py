# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan as text for the terminal, and as plain values for JSON."""

import shlex
from types import SimpleNamespace
from typing import Any

from nemo_aligner.config.parallel_rules import count_vocab_rows
from nemo_aligner.plan.jobs import head_outputs
from nemo_aligner.plan.memory import PARTS, RankMemory
from nemo_aligner.plan.parameters import count_model, read_architecture
from nemo_aligner.plan.planning import JobInput, Plan
from nemo_aligner.plan.splits import SIZE_KEYS, Candidate, Machine

GIB = 2**30
SHOWN = 8  # candidates in the text


def gib(size: float) -> str:
    """Bytes for a reader."""
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def split_text(c: Candidate) -> str:
    """Such as `TP2 PP1 CP1 DP4`."""
    s = c.split
    experts = f" EP{s.ep}" if s.ep > 1 else ""
    return f"TP{s.tp} PP{s.pp} CP{s.cp}{experts} DP{s.dp}"


def notes(c: Candidate) -> str:
    """What a candidate changes, in words."""
    words = []
    if c.workload.recompute:
        words.append(f"recompute {c.workload.recompute}")
    for key, value in c.changes.items():
        if "micro_batch_size" in key and "val_" not in key:
            words.append(f"{key.rpartition('.')[2].removesuffix('_micro_batch_size')} {value}")
    return ", ".join(words)


def table(rows: list[list[str]]) -> str:
    """Columns of equal width; the first is aligned to the left, as is the last."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if n in (0, last) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def memory_table(memory: RankMemory) -> str:
    """Kinds of memory by phase, in GiB, of the rank that needs most."""
    names = list(memory.phases)
    rows = [["GiB on the GPU", *names, ""]]
    for part in PARTS:
        values = [memory.phases[name].get(part, 0.0) for name in names]
        if any(values):
            rows.append([part, *map(gib, values), ""])
    rows.append(["sum", *(gib(sum(memory.phases[name].values())) for name in names), ""])
    return table(rows)


def candidate_table(candidates: list[Candidate], limit: float, shown: int) -> str:
    rows = [["split", "peak GiB", "in", "fits", "cost", "with"]]
    for c in candidates[:shown]:
        fits = "yes" if c.memory.peak <= limit else "no"
        cost = f"{c.cost:.2f}" if fits == "yes" else "-"
        rows.append([split_text(c), gib(c.memory.peak), c.memory.tightest, fits, cost, notes(c)])
    return table(rows)


def overrides(c: Candidate, item: JobInput, given: list[str], machine: Machine) -> list[str]:
    """The arguments of the job's script."""
    per_node = min(c.split.ranks, machine.gpus_per_node)
    own = {
        item.job.config.restore_key: item.path,
        "trainer.devices": per_node,
        "trainer.num_nodes": c.split.ranks // per_node,
    }
    sizes = {f"model.{key}": getattr(c.split, short) for short, key in SIZE_KEYS.items()}
    sizes["model.sequence_parallel"] = c.split.sequence_parallel
    chosen = own | sizes | c.changes
    kept = [text for text in given if text.lstrip("+").partition("=")[0] not in chosen]
    return [*(f"{key}={value}" for key, value in chosen.items()), *kept]


def command(c: Candidate, item: JobInput, given: list[str], machine: Machine) -> str:
    words = [shlex.quote(word) for word in overrides(c, item, given, machine)]
    return " \\\n".join([f"  python {item.job.script}", *(f"      {word}" for word in words)])


def number_of_weights(item: JobInput) -> tuple[int, int]:
    """Of the model of a job: all, and those that are trained if the job trains."""
    model = item.cfg["model"]
    alone = SimpleNamespace(**{**model, "tensor_model_parallel_size": 1})
    rows = count_vocab_rows(alone, item.vocab_size)
    weights = count_model(read_architecture(model, rows, head_outputs(item.job, model)))
    return weights.total, weights.trained.total


def weights_text(item: JobInput) -> str:
    """Such as `1.236 billion weights, of which 11.272 million are trained`."""
    weights, trained = number_of_weights(item)
    text = f"{weights / 1e9:.3f} billion weights"
    return text + (f", of which {trained / 1e6:.3f} million are trained" * (trained < weights))


def plan_text(
    plan: Plan,
    inputs: list[JobInput],
    given: list[list[str]],
    machine: Machine,
    show_all: bool = False,
) -> str:
    """The whole plan, with the user's overrides by job; `show_all`: not the best alone."""
    device = "GPU" if machine.on_gpu else "rank"
    parts = [
        f"{gib(machine.memory)} GiB per {device}, of which {gib(plan.limit)} GiB are planned with "
        "(--reserve)."
    ]
    if plan.shared:
        both = sum(c.memory.peak for c in plan.chosen)
        parts.append(f"Both jobs share one {device}: {gib(both)} GiB together.")
    for c, candidates, item, texts in zip(
        plan.chosen, plan.candidates, inputs, given, strict=True
    ):
        limit = limit_of(plan, c)
        count = len(candidates) if show_all else SHOWN
        parts += [
            "",
            f"{item.job.name.upper()}: {weights_text(item)}, "
            f"{c.split.ranks} {device}{'s' if c.split.ranks > 1 else ''}, {split_text(c)}"
            + (f", {notes(c)}" if notes(c) else ""),
            "",
            memory_table(c.memory),
            "",
            f"  All {device}s of the job together: {gib(c.total)} GiB.",
            host_text(c),
            "",
            candidate_table(candidates, limit, count),
            "",
            command(c, item, texts, machine),
        ]
        if len(candidates) > count:
            parts.insert(-2, f"  ... and {len(candidates) - count} more (--all)")
    return "\n".join(parts)


def limit_of(plan: Plan, chosen: Candidate) -> float:
    """Bytes that the job of a chosen candidate may use: what a job on the same GPU leaves."""
    others = (c.memory.peak for c in plan.chosen if plan.shared and c is not chosen)
    return plan.limit - sum(others)


def host_text(c: Candidate) -> str:
    if not c.host_per_node:
        return "  Host memory: no copies of weights."
    kinds = ", ".join(f"{name} {gib(size)}" for name, size in c.memory.host.items())
    return f"  Host memory per node: {gib(c.host_per_node)} GiB (GiB per rank: {kinds})."


def plan_values(
    plan: Plan, inputs: list[JobInput], given: list[list[str]], machine: Machine
) -> dict[str, Any]:
    """The whole plan as plain values; sizes in bytes."""
    jobs = []
    for c, candidates, item, texts in zip(
        plan.chosen, plan.candidates, inputs, given, strict=True
    ):
        weights, trained = number_of_weights(item)
        jobs.append(
            {
                "job": item.job.name,
                "script": item.job.script,
                "weights": weights,
                "trained": trained,
                "recommended": candidate_values(c, limit_of(plan, c)),
                "overrides": overrides(c, item, texts, machine),
                "candidates": [candidate_values(each, limit_of(plan, c)) for each in candidates],
            }
        )
    return {"memory": machine.memory, "limit": plan.limit, "shared": plan.shared, "jobs": jobs}


def candidate_values(c: Candidate, limit: float) -> dict[str, Any]:
    s = c.split
    return {
        "gpus": s.ranks,
        "tp": s.tp,
        "pp": s.pp,
        "cp": s.cp,
        "ep": s.ep,
        "dp": s.dp,
        "recompute": c.workload.recompute,
        "changes": c.changes,
        "peak": c.memory.peak,
        "tightest": c.memory.tightest,
        "fits": c.memory.peak <= limit,
        "cost": c.cost,
        "stage": c.memory.stage,
        "phases": c.memory.phases,
        "host": c.memory.host,
        "total": c.total,
        "host_per_node": c.host_per_node,
    }
