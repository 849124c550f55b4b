# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The fits of the benchmark `scaling` and the simulation of a step, where results are known."""

import numpy as np
import pytest


def test_a_power_law_is_found_again(benchmark):
    law = benchmark("scaling").power_law([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)])
    assert law.factor == pytest.approx(3) and law.exponent == pytest.approx(1.5)
    assert law.residuals == pytest.approx([0, 0, 0, 0])


# --- the simulation ------------------------------------------------------------------------------


class Units:
    """`Costs`: a step takes `step` and `row` for each row; a token of a pass one second.

    Args:
        token: of prompts.
    """

    def __init__(self, step=1.0, row=0.0, key=0.0, token=0.0, request=0.0):
        self.before_generation = self.swap = lambda: 0.0
        self.gather = lambda tokens, replicas: 0.0
        self.send = lambda tokens: request
        self.prefill = lambda tokens: token * tokens
        self.decode = lambda rows, cached, steps: steps * (step + row * rows + key * cached)
        self.forward = lambda micro_batches: float(sum(micro_batches))
        self.update = lambda micro_batches, replicas: 3.0 * sum(micro_batches)


def geometric(samples, seed=0, mean=30, longest=200):
    drawn = np.random.default_rng(seed).geometric(1 / mean, samples)
    return tuple(np.minimum(drawn, longest).tolist())


@pytest.fixture
def simulation(benchmark):
    return benchmark("step_simulation")


def workload(simulation, lengths, micro_batch=1, slots=1, **more):
    keys = {"prompt": 1, "global_batch": len(lengths), "rows": 1, "reference": False}
    return simulation.Workload(tuple(lengths), micro_batch=micro_batch, slots=slots, **keys | more)


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_is_no_slower_than_prompts_dealt_out_and_within_grahams_bound(simulation, seed):
    """Graham 1969: no list schedule is longer than the mean and 1 - 1/m of the longest job."""
    lengths, replicas = geometric(200, seed), 8
    job = workload(simulation, lengths)
    queue, dealt = (
        max(simulation.generate(job, replicas, shared, Units()).ends) for shared in (True, False)
    )
    mean = sum(lengths) / replicas
    assert max(mean, max(lengths)) <= queue <= mean + (1 - 1 / replicas) * max(lengths)
    assert queue <= dealt


def test_side_by_side_and_one_after_another_by_hand(simulation):
    """Four samples of one prompt token and 1, 1, 1, 9 response tokens on a policy and a critic of
    one rank. A sample of n tokens costs the critic 2 n and 1 for the request."""
    job = workload(simulation, (1, 1, 1, 9), slots=4)
    critic = Units(request=1.0)
    tokens = 2 + 2 + 2 + 10
    together = simulation.simulate(job, simulation.Layout(1, 1, 1), Units(), critic)
    # Requests at 1, 1, 1 take 5 each, until 16; that of 21 arrives at 9.
    assert together.generation == 9 and together.logprobs == tokens
    assert together.wait == 16 + 21 - 9 - tokens
    assert together.train == 3 * tokens + 1
    layout = simulation.Layout(1, 1, 1, side_by_side=False)
    alone = simulation.simulate(job, layout, Units(), critic)
    assert alone.wait == 3 * 5 + 21
    assert alone.train == 6 * tokens + 1
    assert alone.critic_busy == together.critic_busy == 3 * 5 + 21 + 3 * tokens + 1
    # Without rewards a sample of n tokens costs n.
    layout = simulation.Layout(1, 1, 1, combined=False)
    assert simulation.simulate(job, layout, Units(), critic).wait == max(9 + 11 - 9 - tokens, 0)
    slow = Units(request=10.0)
    assert simulation.simulate(job, layout, Units(), slow).wait == 37 + 20 - 9 - tokens


def test_gpu_costs_of_a_model_known_by_hand(benchmark):
    gpu = benchmark("gpu_costs")
    shape = gpu.Shape(layers=2, hidden=8, ffn=16, vocabulary=100, heads=4, groups=2)
    assert shape.weights == 2 * (64 * 3 + 3 * 8 * 16) + 800
    assert shape.cache_bytes == 2 * 2 * 2 * 8 / 2
    ones = dict.fromkeys(("matrix_rate", "memory_rate", "network_rate", "host_rate"), 1.0)
    ones |= {f"{part}_efficiency": 1.0 for part in ("matrix", "memory", "link")}
    given = gpu.Assumptions(**ones, network_latency=0.0, launch=0.0, cache_memory=1600)
    one = gpu.GpuCosts(shape, given=given)
    assert one.forward([3, 4]) == 2 * shape.weights * 7
    # Decoding reads all weights (2 bytes each) and keys, or multiplies, whichever takes longer.
    assert one.decode(1, 10, 5) == 5 * (2 * shape.weights + 10 * shape.cache_bytes)
    assert one.decode(9, 10, 5) == 5 * 9 * 2 * shape.weights
    # Stages share the work of a pass, and take turns when they decode.
    piped = gpu.GpuCosts(shape, pp=2, given=given)
    assert piped.forward([7]) == one.forward([7])
    assert piped.forward([7] * 100) == pytest.approx(one.forward([7] * 100) / 2, rel=0.02)
    assert piped.decode(1, 10, 5) == one.decode(1, 10, 5)
    whole = gpu.GpuCosts(shape, pp=2, resharded=True, given=given)
    assert piped.before_generation() == 0 and whole.before_generation() == shape.weights
    assert (piped.slots(10), whole.slots(10)) == (10, 5)


def test_costs_fitted_to_runs_of_known_costs_are_found_again(benchmark, simulation):
    scaling = benchmark("scaling")
    truth = scaling.CpuCosts([0.01, 1e-4, 4e-3, 1e-4, 3e-6], [5e-3, 2e-4], [0.05, 0.01, 5e-4])
    found = {}
    runs = scaling.VARIED["samples"] + scaling.VARIED["tokens of a response"] + scaling.PREFILLS
    for run in runs:
        batches = simulation.padded([scaling.PROMPT + run.response] * run.samples, scaling.ROWS)
        generated = simulation.generate(run.workload, 1, False, truth).ends[0]
        seconds = generated, truth.forward(batches), truth.update(batches, 1)
        kinds = scaling.KINDS[:1] if run in scaling.PREFILLS else scaling.KINDS
        found[run] = dict(zip(kinds, seconds, strict=False))
    costs = scaling.fit_costs(found)
    for name in ("generation", "passes", "training"):
        assert getattr(costs, name) == pytest.approx(getattr(truth, name), rel=1e-3), name


def test_rows_prompts_and_keys_are_paid_for(simulation):
    """Two samples of 2 and 3 tokens after prompts of 4, together in the batch."""
    job = workload(simulation, (2, 3), micro_batch=2, slots=2, prompt=4)
    costs = Units(step=10, row=1, key=0.01, token=0.5)
    (end,) = simulation.generate(job, 1, False, costs).ends
    prompts = 2 * 3 * 0.5
    rows = 2 + 2 + 1
    keys = (5 + 5) + (6 + 6) + 7
    assert end == pytest.approx(prompts + 3 * 10 + rows + 0.01 * keys)
