# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps on up to 1,024 GPUs, simulated with the assumptions of `gpu_costs.py`; the tables that
`scaling.py` writes.
"""

from dataclasses import dataclass

import measure
import numpy as np
from gpu_costs import GpuCosts, Shape
from step_simulation import Layout, Step, Workload, simulate

GPUS = (64, 128, 256, 512, 1024)
GPU_PROMPTS, GPU_PROMPT, GPU_BATCH = 1024, 512, 256
GPU_LONGEST, GPU_MEAN = 2048, 512
LLAMA_8B = Shape(layers=32, hidden=4096, ffn=14336, vocabulary=128256, heads=32, groups=8)
LLAMA_70B = Shape(layers=80, hidden=8192, ffn=28672, vocabulary=128256, heads=64, groups=8)
# Shape, TP and PP of policy and critic.
MODELS = {"8B, TP 2": (LLAMA_8B, 2, 1), "70B, TP 8, PP 4": (LLAMA_70B, 8, 4)}


@dataclass(frozen=True)
class Way:
    """How a step is run; the defaults are the first one of `WAYS_ON_GPUS`."""

    resharded: bool = True
    graphs: bool = False
    shared_queue: bool = False
    side_by_side: bool = True
    combined: bool = False


WAYS_ON_GPUS = {
    "dealt out": Way(),
    "one queue": Way(shared_queue=True),
    "through the pipeline": Way(resharded=False),
    "rewards by the critic's ranks": Way(combined=True),
    "one after another": Way(side_by_side=False),
    "CUDA graphs": Way(graphs=True),
}


def gpu_lengths(prompts: int) -> tuple[int, ...]:
    """Geometric, as in the other benchmarks, of other sizes."""
    drawn = np.random.default_rng(0).geometric(1 / GPU_MEAN, prompts)
    return tuple(np.minimum(drawn, GPU_LONGEST).tolist())


def gpu_step(model: str, gpus: int, prompts: int, way: Way) -> Step | None:
    """A step on so many GPUs, half of them the critic's if it works side by side; None if there
    are more data-parallel ranks than samples of an update, or a replica has too few GPUs.
    """
    shape, tp, pp = MODELS[model]
    ranks = gpus // (2 if way.side_by_side else 1) // (tp * pp)
    if not 1 <= ranks <= GPU_BATCH:
        return None
    policy = GpuCosts(shape, tp, pp, way.resharded, way.graphs)
    generating = ranks * (pp if way.resharded else 1)
    share = prompts // generating
    slots = min(policy.slots(GPU_PROMPT + GPU_LONGEST), share)
    if way.shared_queue:  # with slots for its whole share a replica would draw nothing later
        slots = min(slots, max(share // 4, 1))
    lengths = gpu_lengths(prompts)
    workload = Workload(lengths, GPU_PROMPT, slots, slots, GPU_BATCH)
    layout = Layout(generating, ranks, ranks, way.shared_queue, way.side_by_side, way.combined)
    return simulate(workload, layout, policy, GpuCosts(shape, tp, pp))


def gpu_rows() -> list[measure.Row]:
    """Seconds of a step for each model and number of GPUs; in the last column those of the first
    way if the next rollout were generated meanwhile, which the trainers do not do.
    """
    rows = []
    sizes = [*((gpus, GPU_PROMPTS) for gpus in GPUS), (GPUS[-1], 8 * GPU_PROMPTS)]
    for model in MODELS:
        for gpus, prompts in sizes:
            row: measure.Row = {"model": model, "GPUs": gpus, "prompts": prompts}
            for name, way in WAYS_ON_GPUS.items():
                step = gpu_step(model, gpus, prompts, way)
                row[f"{name}, s"] = "refused" if step is None else round(step.total, 1)
            first = gpu_step(model, gpus, prompts, Way())
            assert first is not None
            longer = max(first.generation, first.total - first.generation)
            row["next rollout meanwhile, s"] = round(longer, 1)
            rows.append(row)
    return rows


def phase_rows() -> list[measure.Row]:
    """Where the first of `WAYS_ON_GPUS` spends its time."""
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            step = gpu_step(model, gpus, GPU_PROMPTS, Way())
            assert step is not None
            rows.append(
                {
                    "model": model,
                    "GPUs": gpus,
                    "generation, s": round(step.generation, 1),
                    "of it idle": f"{step.idle:.0%}",
                    "log-probs, s": round(step.logprobs, 1),
                    "wait for scores, s": round(step.wait, 1),
                    "updates, s": round(step.train, 1),
                    "critic busy": f"{step.critic_busy / step.total:.0%}",
                    "samples per GPU-hour": round(3600 * GPU_PROMPTS / step.total / gpus),
                }
            )
    return rows


def gpu_curves() -> dict[str, dict[int, float]]:
    """How many times as fast as on the fewest GPUs, by the number of GPUs."""
    curves: dict[str, dict[int, float]] = {}
    for model in MODELS:
        for name in ("dealt out", "CUDA graphs"):
            steps = {g: gpu_step(model, g, GPU_PROMPTS, WAYS_ON_GPUS[name]) for g in GPUS}
            totals = {gpus: step.total for gpus, step in steps.items() if step}
            label = model.split(",")[0] + ("" if name == "dealt out" else f", {name}")
            curves[label] = {gpus: totals[GPUS[0]] / total for gpus, total in totals.items()}
    return curves
