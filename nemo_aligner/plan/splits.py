# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidate splits of a job over its GPUs and what each needs; and the plan, which shares the GPUs
out among jobs that run at the same time. The rules of `config/` forbid splits, as in the job.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from nemo_aligner.config.fields import tree_of
from nemo_aligner.config.jobs.supervised import check_steerlm2
from nemo_aligner.config.keys.common import PARALLEL
from nemo_aligner.config.parallel_rules import check_architecture, count_vocab_rows
from nemo_aligner.config.rules import check_values
from nemo_aligner.config.values import Values, laid_over
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.plan.jobs import STEERLM2, Job, read_workload
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

    def architecture(self, tp: int) -> Architecture:
        """Of its model, with a vocabulary that is padded for `tp` ranks."""
        model = self.cfg["model"]
        rows = count_vocab_rows({**model, "tensor_model_parallel_size": tp}, self.vocab_size)
        outputs = 0
        if "model.regression.num_attributes" in self.job.config.keys:
            outputs = int((model.get("regression") or {}).get("num_attributes") or 1)
        return read_architecture(model, rows, outputs)


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
    tensor = [size for size in powers_of_two(in_node) if in_node % size == 0]
    for tp, pp, cp in itertools.product(tensor, powers_of_two(gpus), contexts):
        dp, left_over = divmod(gpus, tp * pp * cp)
        for ep in powers_of_two(dp * cp) if experts else [1]:
            if not left_over:
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


def obstacle(item: JobInput) -> str:
    """The first rule that does not let the job start at the split in `cfg`; empty if it can."""
    job, cfg, model = item.job, item.cfg, item.cfg["model"]
    devices = cfg["trainer"]["devices"]
    try:
        check_architecture(model, fixed=True)  # the quick one first
        count_vocab_rows(model, item.vocab_size)
        if model.get("num_moe_experts"):
            # Here: it imports PyTorch, and only experts have rules of splits there.
            from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config

            build_transformer_config(OmegaConf.create(model))
        check_values(dict(cfg), job.config.name, complete=True, visible_devices=devices, env={})
        if job is STEERLM2:
            check_steerlm2(Values(dict(cfg)))
    except ConfigError as error:
        return str(error)
    return ""


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


def fit_passes(
    job: Job, a: Architecture, split: Split, given: Workload, limit: float
) -> tuple[Workload, dict[str, Any]]:
    """The workload with as many samples per pass without gradient, and responses, as fit: the
    largest of the given number, half of it, ... 1 that does, or 1. An odd number becomes 1. And
    the keys of the passes that were made smaller.
    """
    w, keys = given, dict[str, Any]()
    scoring = "scores" if a.head_outputs else "log-probs"
    for name, phase, unit in (
        ("forward_samples", scoring, w.unit),
        ("rollout_samples", "generation", 1),
    ):
        count = getattr(w, name) // unit
        while count > 1 and sum(job_memory(a, split, w).phases[phase].values()) > limit:
            count = count // 2 if count % 2 == 0 else 1
            smaller: dict[str, Any] = {name: count * unit}
            w = replace(w, **smaller)
    if w.forward_samples != given.forward_samples and w.by_tokens:
        keys["model.dynamic_micro_batch_tokens"] = w.forward_samples * w.width
    elif w.forward_samples != given.forward_samples:
        keys[job.forward_key] = w.forward_samples // w.unit
    if w.rollout_samples != given.rollout_samples:
        keys |= dict.fromkeys(job.rollout_keys, w.rollout_samples)
    return w, keys


def candidate(
    item: JobInput, split: Split, machine: Machine, recompute: str | None, limit: float
) -> Candidate:
    """One way to run a job, with passes as large as fit `limit` bytes; it may not fit itself."""
    a = item.architecture(split.tp)
    given = read_workload(item.job, item.cfg, split)
    keys: dict[str, Any] = {}
    if recompute != given.recompute:
        given = replace(given, recompute=recompute, recompute_layers=1, block=False)
        keys |= {f"model.{key}": value for key, value in RECOMPUTE_KEYS.items()}
    workload, smaller = fit_passes(item.job, a, split, given, limit)
    ranks_on_node = min(split.ranks, machine.gpus_per_node)
    stages = [rank_memory(a, split, stage, workload) for stage in range(split.pp)]
    return Candidate(
        split,
        workload,
        max(stages, key=lambda memory: memory.peak),
        sum(memory.peak for memory in stages) * split.ranks / split.pp,
        max(sum(memory.host.values()) for memory in stages) * ranks_on_node,
        relative_cost(workload, given, split),
        keys | smaller,
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
        keys = tree_of(split_keys(split, machine.gpus_per_node))
        there = replace(item, cfg=laid_over(item.cfg, keys))
        forbidden = obstacle(there)
        reason = reason or forbidden
        if forbidden:
            continue
        # Recomputation that the user or the checkpoint asks for stays.
        ways = ((own,) if own else (None, "full")) if item.job.trains else (None,)
        found += [candidate(there, split, machine, way, limit) for way in ways]

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


def make_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> list[Planned]:
    """The jobs on `gpus` GPUs. `UserError`: no split has room; says how many GPUs would do.
    `ConfigError`: no split is allowed by the rules of the jobs.
    """
    plan, reason = try_plan(inputs, gpus, machine)
    if plan:
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


def try_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> tuple[list[Planned], str]:
    """The jobs on `gpus` GPUs; or none and, if rules forbid every split, the first of them."""
    limit = machine.usable
    search = functools.cache(
        lambda index, count: find_candidates(inputs[index], count, machine, limit)
    )
    if len(inputs) > 1 and gpus == 1:
        alone = [search(index, 1) for index in range(len(inputs))]
        reasons = [reason for found, reason in alone if not found]
        return ([], reasons[0]) if reasons else (share_one(inputs, machine), "")
    counts = [(gpus,)] if len(inputs) == 1 else shares(gpus, machine.gpus_per_node, len(inputs))
    if not counts:
        return [], (
            f"{len(inputs)} jobs run at the same time, each on GPUs of its own; give as many, or "
            "one, which they share."
        )
    possible, reasons = False, []
    for count in counts:
        found, forbidden = zip(*itertools.starmap(search, enumerate(count)), strict=True)
        reasons.append(next(filter(None, forbidden), ""))
        possible = possible or all(found)
        if all(each and each[0].memory.peak <= limit for each in found):
            jobs = zip(inputs, found, strict=True)
            return [Planned(item, each[0], each, limit) for item, each in jobs], ""
    return [], "" if possible else reasons[0]


def share_one(inputs: list[JobInput], machine: Machine) -> list[Planned]:
    """All jobs on one GPU: for each way to run the servers, from the cheapest to the smallest, the
    first with what is left.
    """
    first, *servers = inputs
    ways = []
    for item in servers:
        # The second time nothing fits: the smallest passes.
        found = (find_candidates(item, 1, machine, limit)[0] for limit in (machine.usable, 0.0))
        ways.append([(item, each, all_of) for all_of in found for each in all_of])
    for chosen in itertools.product(*ways):
        left = machine.usable - sum(each.memory.peak for _, each, _ in chosen)
        actor, _ = find_candidates(first, 1, machine, left)
        if actor and actor[0].memory.peak <= left:
            spare = left - actor[0].memory.peak
            return [Planned(first, actor[0], actor, left)] + [
                Planned(item, each, all_of, spare + each.memory.peak)
                for item, each, all_of in chosen
            ]
    return []
