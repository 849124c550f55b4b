# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the cost of generation, log-probs and updates grows with weights, samples, length and ranks;
whether `step_simulation.py` predicts steps of several ranks from the costs of one; and what it
says about up to 1,024 GPUs.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py

1. One rank, one thread: each quantity is varied alone, and a power law is fitted to the CPU
   seconds. They are the least of several rounds over all cases: a fit has no use for
   the load of others.
2. The costs of a pass, a step, a row and a token are fitted to the same runs. With them the
   simulator predicts generation, log-probs and updates of real jobs of 1, 2 and 4 data-parallel
   ranks, with prompts dealt out and drawn from one queue. Compared are the CPU seconds of the
   slowest rank: with fewer cores than ranks the clock would show the cores.
3. The simulator with assumptions in place of measured costs (`gpu_costs.py`).
"""

import contextlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import countdown
import measure
import numpy as np
import torch
from gpu_costs import Shape, assumptions
from numpy.typing import NDArray
from ppo_step import Prompts, collate
from scipy.optimize import nnls
from step_simulation import (
    Workload,
    generate,
    gpu_curves,
    gpu_rows,
    logprob_seconds,
    padded,
    phase_rows,
    update_seconds,
)
from torch import Tensor

PROMPT, ROWS, FORWARD_ROWS = 32, 4, 4
KINDS = ("generation", "log-probs", "update")


# --- least squares -------------------------------------------------------------------------------


@dataclass
class PowerLaw:
    """y = factor * x ** exponent.

    Attributes:
        residuals: measured over fitted less 1, of each point.
    """

    factor: float
    exponent: float
    residuals: NDArray[np.float64]

    @property
    def worst(self) -> float:
        """The residual farthest from 0."""
        return float(self.residuals[np.abs(self.residuals).argmax()])


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law nearest to the points in the square of the logarithm.

    Args:
        x, y: positive; at least two different x.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    columns = np.stack([np.log(xs), np.ones_like(xs)], axis=1)
    (exponent, constant), *_ = np.linalg.lstsq(columns, np.log(ys), rcond=None)
    fitted = np.exp(columns @ [exponent, constant])
    return PowerLaw(float(np.exp(constant)), float(exponent), ys / fitted - 1)


def costs_of_terms(
    terms: Sequence[Sequence[float]], y: Sequence[float]
) -> tuple[list[float], NDArray[np.float64]]:
    """The cost of each term, none below 0, for which the sums are nearest to y in the square of
    the relative error.

    Args:
        terms: of each measurement, how often each term occurs.
        y: what each measurement cost.

    Returns:
        (costs, measured over fitted less 1 of each measurement).
    """
    counts, ys = np.asarray(terms, float), np.asarray(y, float)
    weighted = counts / ys[:, None]
    scale = weighted.max(axis=0)
    costs, _ = nnls(weighted / scale, np.ones_like(ys))
    costs = costs / scale
    return costs.tolist(), ys / (counts @ costs) - 1


# --- one rank ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Samples of equal length, and the width of the model."""

    samples: int = 16
    response: int = 32
    hidden: int = countdown.HIDDEN

    @property
    def workload(self) -> Workload:
        """All samples at once, in one update."""
        lengths = (self.response,) * self.samples
        return Workload(lengths, PROMPT, self.samples, self.samples, self.samples, ROWS, False)


BASE = Run()
VARIED: dict[str, list[Run]] = {
    "weights": [replace(BASE, hidden=hidden) for hidden in (192, 256, 384, 512)],
    "samples": [replace(BASE, samples=samples) for samples in (4, 8, 16, 32, 64)],
    "tokens of a response": [replace(BASE, response=response) for response in (16, 32, 64, 128)],
}
# Also for the costs of a pass over prompts, which hardly matter above.
PREFILLS = [replace(BASE, samples=samples, response=1) for samples in (4, 16, 64)]


def shape_of(hidden: int) -> Shape:
    """The model of that width; its feed-forward layers grow with it."""
    return replace(countdown.SMALL, hidden=hidden, ffn=countdown.FFN * hidden // countdown.HIDDEN)


def weights_of(hidden: int) -> int:
    """Weights of all matrix products of the model."""
    return int(shape_of(hidden).weights)


def sizes_of(samples: int) -> dict[str, Any]:
    """Keys of a model that makes one update on so many samples."""
    optim = {"name": "distributed_fused_adam", "lr": 1e-7, "sched": {"name": "constant"}}
    sizes = {"micro_batch_size": ROWS, "global_batch_size": samples, "optim": optim}
    return sizes | {"ppo": {"forward_micro_batch_size": FORWARD_ROWS}}


def train_batch(tokens: Tensor, lengths: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
    """What an update takes of samples; the advantages are random."""
    positions = torch.arange(1, tokens.size(1))
    mask = (positions >= PROMPT) & (positions < lengths.unsqueeze(1))
    return {
        "response_tokens": tokens,
        "response_lengths": lengths,
        "prompt_lengths": torch.full_like(lengths, PROMPT),
        "is_end": torch.ones(len(lengths), dtype=torch.bool),
        "mask": mask.float(),
        "advantages": torch.randn(mask.shape, generator=torch.Generator().manual_seed(3)),
        "prev_logprobs": logprobs,
    }


class OneRank:
    """A model in this process, and the three kinds of work."""

    def __init__(self, at: countdown.Folders):
        from nemo_aligner.training.optim import train_on_batch

        self.model = countdown.load_actor(at, **sizes_of(BASE.samples))
        self.training = self.model.setup_megatron_optimization(max_steps=10**6)
        self.train_on_batch = train_on_batch

    def functions(self, run: Run) -> dict[str, Callable[[], object]]:
        """The work of `KINDS` on these samples."""
        from nemo_aligner.generation import GenerationParams

        lengths = torch.full((run.samples,), run.response)
        prompts, model = countdown.prompts(lengths, PROMPT), self.model
        seeds, of_prompts = torch.arange(run.samples), torch.full_like(lengths, PROMPT)
        of_samples = of_prompts + run.response
        params = GenerationParams(max_length=run.response)
        width = PROMPT + run.response
        tokens = torch.nn.functional.pad(prompts, (0, run.response), value=1)
        batch: dict[str, Tensor] = {}

        def generation() -> None:
            model.set_eval()
            output = model.generator.generate(prompts, of_prompts, seeds, params)
            assert output.response_lengths.tolist() == [width] * run.samples

        def logprobs() -> Tensor:
            model.set_eval()
            return model.get_inference_log_probs(
                tokens, response_lengths=of_prompts + run.response
            )

        def update() -> None:
            if not batch:
                batch.update(train_batch(tokens, of_samples, logprobs()))
            self.train_on_batch(model, *self.training, batch, 1.0)

        return dict(zip(KINDS, (generation, logprobs, update), strict=True))


Measured = dict[Run, dict[str, float]]


def measure_one_rank(repeats: int) -> Measured:
    """CPU seconds of each kind of work for each run, the least of all rounds."""
    runs = dict.fromkeys(run for varied in [*VARIED.values(), PREFILLS] for run in varied)
    functions: dict[Run, dict[str, Callable[[], object]]] = {}
    for hidden in sorted({run.hidden for run in runs}):
        with countdown.folders(shape_of(hidden)) as at:
            rank = OneRank(at)
        for run in [run for run in runs if run.hidden == hidden]:
            all_kinds = rank.functions(run)
            kinds = KINDS[:1] if run in PREFILLS else KINDS
            functions[run] = {kind: all_kinds[kind] for kind in kinds}
    found: Measured = {run: dict.fromkeys(each, math.inf) for run, each in functions.items()}
    for _ in range(repeats + 1):
        for run, each in functions.items():
            for kind, function in each.items():
                start = time.process_time()
                function()
                found[run][kind] = min(found[run][kind], time.process_time() - start)
    return found


def varied_value(name: str, run: Run) -> int:
    """What the runs of `VARIED[name]` differ in."""
    values = {"weights": weights_of(run.hidden), "samples": run.samples}
    return values.get(name, run.response)


def exponent_rows(found: Measured) -> list[measure.Row]:
    """A row for each kind of work and each quantity."""
    rows = []
    for name, runs in VARIED.items():
        x = [varied_value(name, run) for run in runs]
        for kind in KINDS:
            y = [found[run][kind] for run in runs]
            rows.append(law_row(kind, name, x, y))
    return rows


def law_row(kind: str, name: str, x: Sequence[float], y: Sequence[float]) -> measure.Row:
    """A fitted power law."""
    law = power_law(x, y)
    return {
        "CPU s of": kind,
        "over": name,
        "from": f"{x[0] / 1e6:.1f} million" if x[0] > 1e6 else x[0],
        "to": f"{x[-1] / 1e6:.1f} million" if x[-1] > 1e6 else x[-1],
        "first, CPU s": round(y[0], 3),
        "last, CPU s": round(y[-1], 3),
        "exponent": round(law.exponent, 2),
        "largest residual": f"{law.worst:+.0%}",
    }


# --- costs ---------------------------------------------------------------------------------------


@dataclass
class Counter:
    """`GenerationCosts` that take no time and count."""

    prefills: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0
    cached: float = 0.0

    def before_generation(self) -> float:
        return 0.0

    def prefill(self, tokens: int) -> float:
        self.prefills += 1
        self.prompt_tokens += tokens
        return 0.0

    def decode(self, rows: int, cached: float, steps: int) -> float:
        self.steps += steps
        self.rows += steps * rows
        self.cached += steps * cached
        return 0.0

    def terms(self) -> list[float]:
        """How often each cost of `CpuCosts.generation` occurs."""
        return [self.prefills, self.prompt_tokens, self.steps, self.rows, self.cached]


@dataclass
class CpuCosts:
    """`Costs` of a rank of this machine, in CPU seconds; what the runs of ranks do not do is free.

    Attributes:
        generation: of a pass over prompts, a token in it; a step, a row in it, a key in it.
        passes: of a micro-batch of log-probs, a token in it.
        training: of an update, a micro-batch in it, a token in it. Data-parallel ranks divide the
            first, which is the optimizer's.
        reduction: of the gradients of all weights, by the number of ranks.
    """

    generation: list[float]
    passes: list[float]
    training: list[float]
    reduction: dict[int, float] = field(default_factory=dict)

    def before_generation(self) -> float:
        return 0.0

    def prefill(self, tokens: int) -> float:
        return self.generation[0] + self.generation[1] * tokens

    def decode(self, rows: int, cached: float, steps: int) -> float:
        step, row, key = self.generation[2:]
        return steps * (step + row * rows + key * cached)

    def forward(self, micro_batches: Sequence[int]) -> float:
        return self.passes[0] * len(micro_batches) + self.passes[1] * sum(micro_batches)

    def update(self, micro_batches: Sequence[int], replicas: int) -> float:
        update, micro_batch, token = self.training
        own = update / replicas + self.reduction.get(replicas, 0.0)
        return own + micro_batch * len(micro_batches) + token * sum(micro_batches)

    def swap(self) -> float:
        return 0.0

    def gather(self, _tokens: int, _replicas: int) -> float:
        return 0.0

    def send(self, _tokens: int) -> float:
        return 0.0


def fit_costs(found: Measured) -> CpuCosts:
    """Costs of the model of `BASE` from its runs."""
    terms: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for run in [run for run in found if run.hidden == BASE.hidden]:
        counter = Counter()
        generate(run.workload, 1, False, counter)
        batches = padded([PROMPT + run.response] * run.samples, ROWS)
        sums = [float(len(batches)), float(sum(batches))]
        counts = counter.terms(), sums, [1.0, *sums]
        for kind, row in zip(KINDS, counts, strict=True):
            if kind in found[run]:
                terms[kind].append(row)
                seconds[kind].append(found[run][kind])
    generation, passes, training = (
        costs_of_terms(terms[kind], seconds[kind])[0] for kind in KINDS
    )
    return CpuCosts(generation, passes, training)


# --- several ranks -------------------------------------------------------------------------------

RANKS = (1, 2, 4)
SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 64, 32, 4
LENGTHS = countdown.skewed_lengths(SAMPLES)
SKEWED = Workload(
    tuple(LENGTHS.tolist()), PROMPT, MICRO_BATCH, MICRO_BATCH, GLOBAL_BATCH, ROWS, False
)
WAYS = {False: "dealt out", True: "one queue"}
GENERATION = {shared: f"generation, {way}" for shared, way in WAYS.items()}
REDUCTION = "reduction"


def work(rank: int, ranks: int, port: int, at: countdown.Folders, repeats: int, send: Any) -> None:
    """One rank of a job: sends its CPU seconds of each part, a list for each, and the lengths of
    the responses, which now and then are not those that the prompts ask for.
    """
    os.environ.update(measure.rank_environment(rank, ranks, port))
    torch.set_num_threads(1)
    from nemo_aligner.algorithms import rollouts
    from nemo_aligner.data.nlp.samplers import DefaultBatchIterator, StoreBatchIterator
    from nemo_aligner.training.optim import train_on_batch

    model = countdown.load_actor(at, **sizes_of(GLOBAL_BATCH))
    training = model.setup_megatron_optimization(max_steps=10**6)
    gradients = torch.zeros(sum(weight.numel() for weight in model.parameters()))
    seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def measured(part: str) -> Iterator[None]:
        if ranks > 1:
            torch.distributed.barrier()
        start = time.process_time()
        yield
        seconds.setdefault(part, []).append(time.process_time() - start)

    def rollout(shared: bool) -> dict[str, Tensor]:
        own = [list(ticket) for ticket in SKEWED.tickets[rank::ranks]]
        kind = StoreBatchIterator if shared else DefaultBatchIterator
        prompts = kind(iter(own), len(own), Prompts(LENGTHS), collate)
        model.set_eval()
        with measured(GENERATION[shared]):
            repeated = rollouts.repeat_prompts(prompts, 1, 0, 0)
            parts = [
                rollouts.with_prompt_columns(part, batch)
                for batch, part in model.infer_all(repeated)
            ]
        joined = rollouts.PPORolloutBatch.from_rollout_batches(parts, countdown.END, None)
        gathered = joined.gather_and_balance_globally()
        return gathered.select(gathered["sample_key"].argsort()).data

    for _ in range(repeats + 1):
        for shared in WAYS if ranks > 1 else [False]:
            whole = rollout(shared)
        places = rollouts.deal(SAMPLES, rank, ranks, GLOBAL_BATCH)
        tokens, lengths = whole["response_tokens"][places], whole["response_lengths"][places]
        with measured("log-probs"):
            logprobs = model.get_inference_log_probs(tokens, response_lengths=lengths)
        batch = train_batch(tokens, lengths, logprobs)
        with measured("update"):
            for share in rollouts.shares_of_global_batches(batch, GLOBAL_BATCH):
                train_on_batch(model, *training, share, 1.0)
        with measured(REDUCTION):
            if ranks > 1:
                torch.distributed.all_reduce(gradients)
    found = {part: values[1:] for part, values in seconds.items()}
    send.send((found, (whole["response_lengths"] - PROMPT).tolist()))


def measure_ranks(
    ranks: int, at: countdown.Folders, repeats: int
) -> tuple[dict[str, float], Workload]:
    """CPU seconds of the slowest rank for each part, the least of all rounds; and what was
    generated.

    Raises:
        SystemExit: a rank has failed; its error is on the terminal.
    """
    from nemo_aligner.servers.ports import find_free_port

    context, port = multiprocessing.get_context("spawn"), find_free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=work, args=(rank, ranks, port, at, repeats, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _receiver, sender in pipes:
        sender.close()
    try:
        found = [receiver.recv() for receiver, _sender in pipes]
    except EOFError:
        sys.exit(f"a rank of {ranks} has failed; see its error above")
    finally:
        for process in processes:
            process.join(10)
            process.kill()  # one that waits for another that is gone
    seconds = {
        part: min(map(max, zip(*(each[part] for each, _lengths in found), strict=True)))
        for part in found[0][0]
    }
    return seconds, replace(SKEWED, lengths=tuple(found[0][1]))


def predict(ranks: int, workload: Workload, shared: bool, costs: CpuCosts) -> dict[str, float]:
    """CPU seconds of the slowest rank for each of `KINDS`."""
    seconds = [
        max(generate(workload, ranks, shared, costs).ends),
        logprob_seconds(workload, ranks, costs),
        update_seconds(workload, ranks, costs),
    ]
    return dict(zip(KINDS, seconds, strict=True))


def rank_rows(
    found: dict[int, tuple[dict[str, float], Workload]], costs: CpuCosts
) -> list[measure.Row]:
    """Predicted and measured, for each number of ranks and way of dealing prompts."""
    rows = []
    for ranks, (parts, workload) in found.items():
        costs = replace(costs, reduction={ranks: parts[REDUCTION]})
        for shared, way in WAYS.items():
            if GENERATION[shared] not in parts:
                continue
            measured = {kind: parts.get(kind, parts[GENERATION[shared]]) for kind in KINDS}
            predicted = predict(ranks, workload, shared, costs)
            row: measure.Row = {"ranks": ranks, "prompts": way}
            for kind in KINDS:
                row[f"{kind}: predicted"] = round(predicted[kind], 3)
                row[f"{kind}: measured"] = round(measured[kind], 3)
            row["all: error"] = f"{sum(predicted.values()) / sum(measured.values()) - 1:+.0%}"
            rows.append(row)
    return rows


def main() -> None:
    parser = measure.arguments(__doc__, repeats=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure_one_rank(args.repeats)
    costs = fit_costs(found)
    with countdown.folders() as at:
        of_ranks = {ranks: measure_ranks(ranks, at, args.repeats) for ranks in RANKS}
    rows = exponent_rows(found)
    for kind in KINDS:
        key = GENERATION[False] if kind == KINDS[0] else kind
        seconds = [parts[key] for parts, _workload in of_ranks.values()]
        rows.append(law_row(kind, "ranks", RANKS, seconds))
    measure.report(
        "scaling",
        "Cost over weights, samples, length and ranks",
        rows,
        args.json,
        tables={
            "Predicted from the costs of one rank, and measured, CPU s": rank_rows(
                of_ranks, costs
            ),
            "Seconds of a step, simulated and not measured": gpu_rows(),
            "Where the time of the first way goes, simulated and not measured": phase_rows(),
            "Assumptions of the simulation": assumptions(),
        },
        curves={"Simulated: times as fast as on 64 GPUs": gpu_curves()},
    )


if __name__ == "__main__":
    main()
