# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidate splits of a job over its GPUs and what each needs; and the plan, which shares the GPUs
out among jobs that run at the same time. The rules of `config/` forbid splits, as in the job.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from nemo_aligner.config.fields import tree_of
from nemo_aligner.config.jobs.supervised import check_steerlm2
from nemo_aligner.config.keys.common import PARALLEL
from nemo_aligner.config.parallel_rules import check_architecture, count_vocab_rows
from nemo_aligner.config.rules import check_values
from nemo_aligner.config.values import Values, laid_over
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.plan.jobs import STEERLM2, Job, head_outputs, read_workload
from nemo_aligner.plan.memory import RankMemory, Workload, job_memory, rank_memory
from nemo_aligner.plan.parameters import Architecture, Split, read_architecture

RECOMPUTE_KEYS = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}
LEAST_TOKENS = 1024  # of a sample on a context-parallel rank
# A rule of thumb, not measured: what each choice multiplies the time of a step by.
FULL_RECOMPUTE_COST = 1.3
TP_COST, PP_COST, CP_COST, EP_COST = 0.05, 0.05, 0.1, 0.02  # per doubling
NEARLY_FULL, NEARLY_FULL_COST = 0.95, 1.05  # of what may be used; little is left for a surprise
PIPELINED_GENERATION_COST = 0.3  # per further stage: the stages wait for each other
SMALLER_FORWARD_COST, SMALLER_ROLLOUT_COST = 0.01, 0.05  # per halving


@dataclass(frozen=True)
class Machine:
    memory: float  # bytes of one GPU
    usable: float  # of these; the rest is for CUDA, NCCL's buffers and gaps
    gpus_per_node: int = 8  # ranks that share a node


@dataclass(frozen=True)
class JobInput:
    job: Job  # which one
    path: str  # of the model that it starts from
    cfg: Mapping[str, Any]  # `jobs.job_config`
    vocab_size: int  # ids of the tokenizer
    overrides: list[str]  # the user's


@dataclass(frozen=True)
class Candidate:
    split: Split  # over its ranks
    workload: Workload  # what it computes at once
    memory: RankMemory  # of the rank that needs most
    total: float  # bytes on all GPUs of the job, each in the phase that needs most
    host_per_node: float  # bytes of host memory of one node's ranks, without their processes
    cost: float  # relative time of a step, by rule of thumb; less is better
    changes: dict[str, Any] = field(default_factory=dict)  # keys that differ from those given


def powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())]


def splits(gpus: int, gpus_per_node: int, model: Mapping[str, Any]) -> Iterator[Split]:
    """All splits of `gpus` ranks in powers of two; tensor parallelism stays within a node, and a
    context-parallel rank has at least `LEAST_TOKENS` of the longest sample.
    """
    contexts = powers_of_two(max(int(model["encoder_seq_length"]) // LEAST_TOKENS, 1))
    experts = model.get("num_moe_experts") or 0
    vpp = model.get("virtual_pipeline_model_parallel_size") or 1
    in_node = min(gpus, gpus_per_node)
    for tp in [size for size in powers_of_two(in_node) if in_node % size == 0]:
        for pp in powers_of_two(gpus // tp):
            for cp in contexts:
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                for ep in powers_of_two(dp * cp) if experts else [1]:
                    yield Split(tp, pp, cp, ep, dp, vpp, sequence_parallel=tp > 1)


def split_keys(split: Split, gpus_per_node: int) -> dict[str, Any]:
    """The keys by which a job runs at a split."""
    per_node = min(split.ranks, gpus_per_node)
    return {
        "trainer.devices": per_node,
        "trainer.num_nodes": split.ranks // per_node,
        **dict(zip(PARALLEL, (split.tp, split.pp, split.cp, split.ep), strict=True)),
        "model.sequence_parallel": split.sequence_parallel,
    }


def obstacle(job: Job, cfg: Mapping[str, Any], vocab_size: int) -> str:
    """The first rule that does not let the job start at the split in `cfg`; empty if it can."""
    try:
        check_architecture(cfg["model"], fixed=True)  # the quick one first
        count_vocab_rows(SimpleNamespace(**cfg["model"]), vocab_size)
        if cfg["model"].get("num_moe_experts"):
            # Here: it imports PyTorch, and only experts have rules of splits there.
            from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config

            build_transformer_config(OmegaConf.create(cfg["model"]))
        check_values(
            dict(cfg),
            job.config.name,
            complete=True,
            visible_devices=cfg["trainer"]["devices"],
            env={},
        )
        if job is STEERLM2:
            check_steerlm2(Values(dict(cfg)))
    except ConfigError as error:
        return str(error)
    return ""


def halved_until(fits: Callable[[int], bool], size: int) -> int:
    """The largest of `size`, half of it, ... 1 that fits, or 1. An odd size becomes 1."""
    while size > 1 and not fits(size):
        size = size // 2 if size % 2 == 0 else 1
    return size


def relative_cost(w: Workload, given: Workload, split: Split) -> float:
    """The rule of thumb for the time of a step, from 1 up, relative to the `given` workload."""
    cost = 1.0 + (split.pp - 1) / (w.micro_batches * split.vpp) if w.trains else 1.0
    cost *= 1 + TP_COST * math.log2(split.tp) + CP_COST * math.log2(split.cp)
    cost *= 1 + PP_COST * math.log2(split.pp) + EP_COST * math.log2(split.ep)
    if w.recompute == "full":
        cost *= FULL_RECOMPUTE_COST
    if w.rollout_samples:
        cost *= 1 + PIPELINED_GENERATION_COST * (split.pp - 1)
        steps = math.log2(given.rollout_samples) - math.log2(w.rollout_samples)
        cost *= 1 + SMALLER_ROLLOUT_COST * steps
    if w.forward_samples:
        steps = math.log2(given.forward_samples) - math.log2(w.forward_samples)
        cost *= 1 + SMALLER_FORWARD_COST * steps
    return cost


def fit_passes(a: Architecture, split: Split, w: Workload, limit: float) -> Workload:
    """The workload with as many samples per pass without gradient, and responses, as fit."""

    def fits(phase: str, changed: Workload) -> bool:
        return sum(job_memory(a, split, changed).phases[phase].values()) <= limit

    forward, rollout = w.forward_samples, w.rollout_samples
    if forward:
        phase = "scores" if a.head_outputs else "log-probs"
        forward = w.unit * halved_until(
            lambda n: fits(phase, replace(w, forward_samples=n * w.unit)),
            max(forward // w.unit, 1),
        )
    if rollout:
        rollout = halved_until(
            lambda n: fits("generation", replace(w, rollout_samples=n)), rollout
        )
    return replace(w, forward_samples=forward, rollout_samples=rollout)


def pass_keys(job: Job, w: Workload, given: Workload) -> dict[str, Any]:
    """The keys of the passes that were made smaller."""
    keys: dict[str, Any] = {}
    if w.forward_samples != given.forward_samples and w.by_tokens:
        keys["model.dynamic_micro_batch_tokens"] = w.forward_samples * w.width
    elif w.forward_samples != given.forward_samples:
        keys[job.forward_key] = w.forward_samples // w.unit
    if w.rollout_samples != given.rollout_samples:
        keys |= dict.fromkeys(job.rollout_keys, w.rollout_samples)
    return keys


def candidate(
    item: JobInput,
    cfg: Mapping[str, Any],
    split: Split,
    machine: Machine,
    recompute: str | None,
    limit: float,
) -> Candidate:
    """One way to run a job, with passes as large as fit `limit` bytes; it may not fit itself."""
    model = cfg["model"]
    rows = count_vocab_rows(SimpleNamespace(**model), item.vocab_size)
    a = read_architecture(model, rows, head_outputs(item.job, model))
    given = read_workload(item.job, cfg, split)
    keys: dict[str, Any] = {}
    if recompute != given.recompute:
        given = replace(given, recompute=recompute, recompute_layers=1, block=False)
        keys |= {f"model.{key}": value for key, value in RECOMPUTE_KEYS.items()}
    workload = fit_passes(a, split, given, limit)
    ranks_on_node = min(split.ranks, machine.gpus_per_node)
    stages = [rank_memory(a, split, stage, workload) for stage in range(split.pp)]
    return Candidate(
        split,
        workload,
        max(stages, key=lambda memory: memory.peak),
        sum(memory.peak for memory in stages) * split.ranks / split.pp,
        max(sum(memory.host.values()) for memory in stages) * ranks_on_node,
        relative_cost(workload, given, split),
        keys | pass_keys(item.job, workload, given),
    )


def find_candidates(
    item: JobInput, gpus: int, machine: Machine, limit: float
) -> tuple[list[Candidate], str]:
    """All ways to run a job on `gpus` ranks, those that fit `limit` bytes and cost least first,
    and the first rule that forbade a split.
    """
    if gpus > machine.gpus_per_node and gpus % machine.gpus_per_node:
        return [], (
            f"{gpus} GPUs are neither a part of a node nor whole nodes of "
            f"{machine.gpus_per_node}; change --gpus or --gpus-per-node."
        )
    found, reason = [], ""
    own = item.cfg["model"].get("activations_checkpoint_granularity")
    for split in splits(gpus, machine.gpus_per_node, item.cfg["model"]):
        cfg = laid_over(item.cfg, tree_of(split_keys(split, machine.gpus_per_node)))
        forbidden = obstacle(item.job, cfg, item.vocab_size)
        reason = reason or forbidden
        if forbidden:
            continue
        # Recomputation that the user or the checkpoint asks for stays.
        ways = ((own,) if own else (None, "full")) if item.job.trains else (None,)
        found += [candidate(item, cfg, split, machine, way, limit) for way in ways]

    def order(c: Candidate) -> tuple[bool, float]:
        """The cost of what fits, then the memory of what does not."""
        if c.memory.peak > limit:
            return True, c.memory.peak
        return False, c.cost * (NEARLY_FULL_COST if c.memory.peak > NEARLY_FULL * limit else 1)

    return sorted(found, key=order), reason


MOST_GPUS = 1024  # where the search for a number of GPUs that suffices ends


@dataclass(frozen=True)
class Planned:
    item: JobInput  # the job
    chosen: Candidate  # of the candidates
    candidates: list[Candidate]  # all of them at its number of GPUs
    limit: float  # bytes of a GPU that it may use: what a job on the same GPU leaves


@dataclass(frozen=True)
class Plan:
    jobs: list[Planned]
    limit: float  # bytes of a GPU that all jobs on it may use
    shared: bool = False  # the jobs are on the same GPU


def shares(gpus: int, gpus_per_node: int, jobs: int) -> list[tuple[int, ...]]:
    """Numbers of GPUs for the jobs, an actor and its servers: as many as possible in use, then as
    equal as possible, the first with more; powers of two within a node, or of whole nodes.
    """
    within = [n for n in powers_of_two(gpus) if n <= gpus_per_node]
    nodes = [gpus_per_node * n for n in powers_of_two(max(gpus // gpus_per_node, 1))]
    counts = itertools.product(sorted({*within, *nodes}), repeat=jobs)
    return sorted(
        (each for each in counts if sum(each) <= gpus),
        key=lambda each: (-sum(each), max(each) - min(each), [-n for n in each]),
    )


def make_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> Plan:
    """The plan for `gpus` GPUs. `UserError`: no split has room; says how many GPUs would do.
    `ConfigError`: no split is allowed by the rules of the jobs.
    """
    plan, reason = try_plan(inputs, gpus, machine)
    if plan is not None:
        return plan
    if reason:
        raise ConfigError(f"no split of {gpus} GPUs is possible: {reason}")
    more = (count for count in powers_of_two(MOST_GPUS) if count > gpus)
    enough = next((count for count in more if try_plan(inputs, count, machine)[0]), None)
    what = f"{machine.memory / 2**30:.4g} GiB"
    names = " and ".join(item.job.name for item in inputs)
    raise UserError(
        f"nothing fits: no split of {gpus} GPUs of {what} has room for the {names}. "
        + (f"{enough} such GPUs do" if enough else f"Not even {MOST_GPUS} of them do")
        + "; or use larger ones, shorter samples (model.encoder_seq_length), or a smaller model."
    )


def try_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> tuple[Plan | None, str]:
    """The plan for `gpus` GPUs; or None and, if rules forbid every split, the first of them."""
    limit = machine.usable
    search = functools.cache(
        lambda index, count: find_candidates(inputs[index], count, machine, limit)
    )
    if len(inputs) > 1 and gpus == 1:
        alone = [search(index, 1) for index in range(len(inputs))]
        reasons = [reason for found, reason in alone if not found]
        return (None, reasons[0]) if reasons else (share_one(inputs, machine), "")
    possible, reasons = False, []
    counts: list[tuple[int, ...]] = [(gpus,)]
    if len(inputs) > 1:
        counts = shares(gpus, machine.gpus_per_node, len(inputs))
    if not counts:
        return None, (
            f"{len(inputs)} jobs run at the same time, each on GPUs of its own; give as many, or "
            "one, which they share."
        )
    for count in counts:
        found_for = [search(index, each) for index, each in enumerate(count)]
        reasons.append(next((reason for _, reason in found_for if reason), ""))
        if not all(found for found, _ in found_for):
            continue
        possible = True
        if all(found[0].memory.peak <= limit for found, _ in found_for):
            planned = [
                Planned(item, found[0], found, limit)
                for item, (found, _) in zip(inputs, found_for, strict=True)
            ]
            return Plan(planned, limit), ""
    return None, "" if possible else reasons[0]


def share_one(inputs: list[JobInput], machine: Machine) -> Plan | None:
    """All jobs on one GPU: for each way to run the servers, from the cheapest to the smallest, the
    first with what is left.
    """
    first, *servers = inputs
    ways = []
    for item in servers:
        quick, _ = find_candidates(item, 1, machine, machine.usable)
        small, _ = find_candidates(item, 1, machine, 0.0)  # nothing fits: the smallest passes
        ways.append([(each, found) for found in (quick, small) for each in found])
    for chosen in itertools.product(*ways):
        taken = sum(each.memory.peak for each, _ in chosen)
        left = machine.usable - taken
        actor, _ = find_candidates(first, 1, machine, left)
        if actor and actor[0].memory.peak <= left:
            spare = left - actor[0].memory.peak
            planned = [Planned(first, actor[0], actor, left)] + [
                Planned(item, each, found, spare + each.memory.peak)
                for item, (each, found) in zip(servers, chosen, strict=True)
            ]
            return Plan(planned, machine.usable, shared=True)
    return None
