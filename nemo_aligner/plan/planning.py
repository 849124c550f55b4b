# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan: GPUs shared out among the jobs that run at the same time, and a split for each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.plan.jobs import Job
from nemo_aligner.plan.splits import Candidate, Machine, find_candidates, powers_of_two

MOST_GPUS = 1024  # where the search for a number of GPUs that suffices ends


@dataclass(frozen=True)
class JobInput:
    job: Job  # which one
    path: str  # of the model that it starts from
    cfg: Mapping[str, Any]  # `jobs.job_config`
    vocab_size: int  # ids of the tokenizer


@dataclass(frozen=True)
class Plan:
    chosen: list[Candidate]  # one candidate per job
    candidates: list[list[Candidate]]  # all candidates of each job at its number of GPUs
    limit: float  # bytes of a GPU that a job may use
    shared: bool = False  # the jobs are on the same GPU


class NothingFitsError(UserError):
    """No split of the given GPUs has room."""


def shares(gpus: int, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Numbers of GPUs for an actor and its server: as many as possible in use, then as equal as
    possible, the actor with more.

    Powers of two within a node, or of whole nodes: other numbers seldom divide a batch.
    """
    within = [n for n in powers_of_two(gpus) if n <= gpus_per_node]
    nodes = [gpus_per_node * n for n in powers_of_two(max(gpus // gpus_per_node, 1))]
    sizes = sorted({*within, *nodes})
    pairs = [(a, b) for a in sizes for b in sizes if a + b <= gpus]
    yield from sorted(pairs, key=lambda pair: (-sum(pair), abs(pair[0] - pair[1]), -pair[0]))


def make_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> Plan:
    """The plan for `gpus` GPUs.

    Raises:
        NothingFitsError: no split has room; says how many GPUs would do.
        ConfigError: no split is allowed by the rules of the jobs.
    """
    plan, reason = try_plan(inputs, gpus, machine)
    if plan is not None:
        return plan
    if reason:
        raise ConfigError(f"no split of {gpus} GPUs is possible: {reason}")
    enough = smallest(inputs, gpus, machine)
    what = f"{machine.memory / 2**30:.4g} GiB"
    names = " and ".join(item.job.name for item in inputs)
    raise NothingFitsError(
        f"nothing fits: no split of {gpus} GPUs of {what} has room for the {names}. "
        + (f"{enough} such GPUs do" if enough else f"Not even {MOST_GPUS} of them do")
        + "; or use larger ones, shorter samples (model.encoder_seq_length), or a smaller model."
    )


def smallest(inputs: list[JobInput], above: int, machine: Machine) -> int | None:
    """The least power of two above `above` of GPUs with a plan; None up to `MOST_GPUS`."""
    gpus = 1
    while gpus <= MOST_GPUS:
        if gpus > above and try_plan(inputs, gpus, machine)[0] is not None:
            return gpus
        gpus *= 2
    return None


def try_plan(inputs: list[JobInput], gpus: int, machine: Machine) -> tuple[Plan | None, str]:
    """The plan for `gpus` GPUs; or None and, if rules forbid every split, the first of them."""
    limit = machine.usable
    if len(inputs) == 1:
        found, reason = search(inputs[0], gpus, machine, limit)
        if found and found[0].memory.peak <= limit:
            return Plan([found[0]], [found], limit), ""
        return None, "" if found else reason
    if gpus == 1:
        for item in inputs:
            found, reason = search(item, 1, machine, limit)
            if not found:
                return None, reason
        return share_one(inputs, machine), ""
    first, second = inputs
    known: dict[tuple[int, int], tuple[list[Candidate], str]] = {}
    possible, reasons = False, []
    for pair in shares(gpus, machine.gpus_per_node):
        both = []
        for index, (item, count) in enumerate(zip((first, second), pair, strict=True)):
            if (index, count) not in known:
                known[index, count] = search(item, count, machine, limit)
            both.append(known[index, count])
        (found, reason), (other, other_reason) = both
        reasons.append(reason or other_reason)
        possible |= bool(found and other)
        if found and other and max(c[0].memory.peak for c in (found, other)) <= limit:
            return Plan([found[0], other[0]], [found, other], limit), ""
    return None, "" if possible else reasons[0]


def share_one(inputs: list[JobInput], machine: Machine) -> Plan | None:
    """Both jobs on one GPU: for each way to run the second, from the cheapest to the smallest, the
    first with what is left.
    """
    first, second = inputs
    quick, _ = search(second, 1, machine, machine.usable)
    small, _ = search(second, 1, machine, 0.0)  # nothing fits: the passes are as small as can be
    for server in (quick, small):
        for each in server:
            left = machine.usable - each.memory.peak
            actor, _ = search(first, 1, machine, left)
            if actor and actor[0].memory.peak <= left:
                return Plan([actor[0], each], [actor, server], machine.usable, shared=True)
    return None


def search(
    item: JobInput, gpus: int, machine: Machine, limit: float
) -> tuple[list[Candidate], str]:
    machine = replace(machine, usable=limit)
    return find_candidates(item.job, item.cfg, item.vocab_size, gpus, machine, limit)
