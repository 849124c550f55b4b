# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One PPO step as a discrete-event simulation, for numbers of ranks that no machine at hand has.

What is simulated is what the code does: `generation/engine.py` keeps `slots` samples of a replica
in its batch and admits the next ones when an eighth of the slots is free; prompts come in
micro-batches, dealt out beforehand or drawn from one queue (`data/nlp/samplers.py`); each
`micro_batch` of finished responses is a request to the critic, which takes one request after the
other (`algorithms/critic_server_trainer.py`); then follow log-probs, the rest of the scores, and
the updates. Seconds come from `Costs`. Nothing is drawn at random: lengths are given.

Not simulated: failures, checkpoints, validation, differences between machines.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import measure
import numpy as np
from gpu_costs import GpuCosts, Shape

ADMITTED_AT = 1 / 8  # as in `generation/engine.py`


class GenerationCosts(Protocol):
    """Seconds that a replica (one copy of a model, on one rank or more) takes to generate."""

    def before_generation(self) -> float:
        """To get the weights ready."""

    def prefill(self, tokens: int) -> float:
        """To feed so many tokens of prompts."""

    def decode(self, rows: int, cached: float, steps: int) -> float:
        """To advance `rows` samples by `steps` tokens; all of them together have `cached` keys, in
        the mean of these steps.
        """


class Costs(GenerationCosts, Protocol):
    """Seconds that a replica takes for all that a step consists of."""

    def forward(self, micro_batches: Sequence[int]) -> float:
        """To compute log-probs or scores, for micro-batches of so many tokens."""

    def update(self, micro_batches: Sequence[int], replicas: int) -> float:
        """To make one update together with the other replicas."""

    def swap(self) -> float:
        """To exchange the weights for those of the reference or the reward model."""

    def gather(self, tokens: int, replicas: int) -> float:
        """To give all samples to all replicas."""

    def send(self, tokens: int) -> float:
        """To send so many tokens to the critic, with what belongs to them."""


@dataclass(frozen=True)
class Workload:
    """What a step has to do.

    Attributes:
        lengths: tokens of each response, in the order of the prompts.
        prompt: tokens of each prompt.
        micro_batch: prompts that are dealt, drawn and scored together.
        slots: samples that a replica decodes together.
        global_batch: samples of an update.
        rows: samples of a micro-batch of log-probs, scores and updates.
        reference: whether there is a reference policy.
    """

    lengths: tuple[int, ...]
    prompt: int
    micro_batch: int
    slots: int
    global_batch: int
    rows: int = 4
    reference: bool = True

    @property
    def tickets(self) -> list[range]:
        """The samples of each micro-batch."""
        total = len(self.lengths)
        return [
            range(start, min(start + self.micro_batch, total))
            for start in range(0, total, self.micro_batch)
        ]


@dataclass(frozen=True)
class Layout:
    """Who does it.

    Attributes:
        generating: replicas that generate.
        training: replicas (data-parallel ranks) that train the policy.
        critic: replicas of the critic.
        shared_queue: replicas draw micro-batches; else they are dealt out beforehand.
        side_by_side: the critic has ranks of its own and works at the same time; else it takes
            turns with the policy on the same ones.
        combined: the critic's ranks hold the reward model too, and swap the weights for each
            request; else rewards come from elsewhere, in time.
    """

    generating: int
    training: int
    critic: int
    shared_queue: bool = False
    side_by_side: bool = True
    combined: bool = True


@dataclass
class Generated:
    """A simulated rollout.

    Attributes:
        ends: when each replica was done.
        groups: when each group of finished samples was there, and which they are.
        by: the replica that generated each sample.
    """

    ends: list[float]
    groups: list[tuple[float, list[int]]]
    by: dict[int, int]


@dataclass
class Step:
    """A simulated step: seconds of its phases, which follow each other.

    Attributes:
        generation: until the last replica is done.
        idle: share of that time in which the replicas had nothing to do, on average.
        logprobs: with those of the reference.
        wait: for scores.
        train: of policy and critic.
        critic_busy: seconds that the critic worked.
    """

    generation: float
    idle: float
    logprobs: float
    wait: float
    train: float
    critic_busy: float

    @property
    def total(self) -> float:
        return self.generation + self.logprobs + self.wait + self.train


@dataclass
class _Replica:
    """The batch of one replica. `steps` counts its decoding steps."""

    number: int
    workload: Workload
    costs: GenerationCosts
    draw: Callable[[], range | None]
    steps: int = 0
    cached: int = 0
    active: list[tuple[int, int]] = field(default_factory=list)  # (step of its end, sample)
    waiting: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)

    def advance(self, now: float) -> tuple[float, list[list[int]]]:
        """Go on from an event to the next.

        Returns:
            When that is, or `now` if this replica is done; and the groups of finished samples that
            are sent now.
        """
        while self.active and self.active[0][0] == self.steps:
            sample = heapq.heappop(self.active)[1]
            self.cached -= self.workload.prompt + self.workload.lengths[sample]
            self.finished.append(sample)
        seconds = self._refill()
        size, sent = self.workload.micro_batch, []
        while len(self.finished) >= size or (self.finished and not self.active):
            sent.append(self.finished[:size])
            self.finished = self.finished[size:]
        if not self.active:
            return now, sent
        rows, steps = len(self.active), self.active[0][0] - self.steps
        # The i-th of these steps attends to rows * i keys more than there are now.
        seconds += self.costs.decode(rows, self.cached + rows * (steps + 1) / 2, steps)
        self.steps += steps
        self.cached += rows * steps
        return now + seconds, sent

    def _refill(self) -> float:
        """Admit the next samples; returns the seconds of their prompts."""
        free = self.workload.slots - len(self.active)
        while len(self.waiting) < free and (samples := self.draw()) is not None:
            self.waiting.extend(samples)
            self.generated.extend(samples)
        if not self.waiting or free < min(self.workload.slots * ADMITTED_AT, len(self.waiting)):
            return 0.0
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        for sample in admitted:
            heapq.heappush(self.active, (self.steps + self.workload.lengths[sample], sample))
        self.cached += self.workload.prompt * len(admitted)
        return self.costs.prefill((self.workload.prompt - 1) * len(admitted))


def generate(
    workload: Workload, replicas: int, shared_queue: bool, costs: GenerationCosts
) -> Generated:
    """Simulate the generation of a rollout."""
    tickets = workload.tickets
    queue = iter(tickets)

    def drawing(number: int) -> Callable[[], range | None]:
        source: Iterator[range] = queue if shared_queue else iter(tickets[number::replicas])
        return lambda: next(source, None)

    began = costs.before_generation()
    batches = [_Replica(i, workload, costs, drawing(i)) for i in range(replicas)]
    events = [(began, i) for i in range(replicas)]
    result = Generated([began] * replicas, [], {})
    while events:
        now, number = heapq.heappop(events)
        following, sent = batches[number].advance(now)
        result.groups += [(now, group) for group in sent]
        result.ends[number] = following
        if batches[number].active:
            heapq.heappush(events, (following, number))
    for batch in batches:
        result.by |= dict.fromkeys(batch.generated, batch.number)
    return result


def padded(lengths: Sequence[int], rows: int) -> list[int]:
    """Tokens of each micro-batch: samples sorted by length, `rows` at a time, each as wide as the
    longest of them.
    """
    ordered = sorted(lengths)
    parts = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
    return [max(part) * len(part) for part in parts]


def shares(workload: Workload, replicas: int) -> list[list[list[int]]]:
    """Tokens of the samples of each update and each replica (`rollouts.deal`)."""
    totals = [workload.prompt + length for length in workload.lengths]
    size = workload.global_batch // replicas
    return [
        [totals[start + i * size : start + (i + 1) * size] for i in range(replicas)]
        for start in range(0, len(totals), workload.global_batch)
    ]


def logprob_seconds(workload: Workload, replicas: int, costs: Costs) -> float:
    """Until the slowest replica has the log-probs of its samples."""
    updates = shares(workload, replicas)
    slowest = max(
        costs.forward(padded([x for update in updates for x in update[i]], workload.rows))
        for i in range(replicas)
    )
    return 2 * (slowest + costs.swap()) if workload.reference else slowest


def update_seconds(workload: Workload, replicas: int, costs: Costs) -> float:
    """All updates of a step, each as long as its slowest replica."""
    return sum(
        max(costs.update(padded(share, workload.rows), replicas) for share in update)
        for update in shares(workload, replicas)
    )


def _request(workload: Workload, samples: list[int], layout: Layout, costs: Costs) -> float:
    """Seconds of the critic for one request, of which its replicas do a part each."""
    totals = [workload.prompt + workload.lengths[sample] for sample in samples]
    dealt = [totals[i :: layout.critic] for i in range(min(layout.critic, len(totals)))]
    slowest = max(costs.forward(padded(share, workload.rows)) for share in dealt)
    if layout.combined:  # values and rewards
        slowest = 2 * slowest + costs.swap()
    return costs.send(sum(totals)) + slowest


def simulate(workload: Workload, layout: Layout, policy: Costs, critic: Costs) -> Step:
    """Simulate a step.

    Args:
        policy, critic: costs of a replica of each. Those of generation are the policy's; with
            `layout.generating` other than `layout.training` its `prefill` and `decode` are those
            of a generating replica.
    """
    rollout = generate(workload, layout.generating, layout.shared_queue, policy)
    generated = max(rollout.ends)
    idle = 1 - sum(rollout.ends) / len(rollout.ends) / generated
    busy, free = 0.0, 0.0 if layout.side_by_side else generated
    for arrived, samples in sorted(rollout.groups):
        seconds = _request(workload, samples, layout, critic)
        free = max(free, arrived) + seconds
        busy += seconds
    tokens = sum(workload.lengths) + workload.prompt * len(workload.lengths)
    logprobs = policy.gather(tokens, layout.training)
    logprobs += logprob_seconds(workload, layout.training, policy)
    wait = free - generated
    trains = [
        update_seconds(workload, layout.training, policy),
        critic.send(tokens) + update_seconds(workload, layout.critic, critic),
    ]
    if layout.side_by_side:
        wait, train = max(wait - logprobs, 0.0), max(trains)
    else:
        train = sum(trains)
    return Step(generated, idle, logprobs, wait, train, busy + trains[1])


# --- on up to 1,024 GPUs, with the assumptions of gpu_costs.py -----------------------------------

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
