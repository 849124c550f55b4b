# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a step would cost on GPUs, for `step_simulation.py`: a roofline of matrix rates, bandwidths
and latencies. Every figure is an assumption, from a data sheet or a guess; none was measured here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


def _assumed(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


DATA_SHEET = "data sheet of the H100 SXM"


@dataclass(frozen=True)
class Assumptions:
    """One GPU and its connections; `assumptions()` lists units and sources."""

    matrix_rate: float = _assumed(989e12, "FLOP/s, bf16, dense", DATA_SHEET)
    memory_rate: float = _assumed(3.35e12, "B/s", DATA_SHEET)
    nvlink_rate: float = _assumed(450e9, "B/s, one way", DATA_SHEET)
    network_rate: float = _assumed(50e9, "B/s, one way", "400 Gbit/s for each GPU")
    host_rate: float = _assumed(64e9, "B/s, one way", "PCIe 5.0 x16")
    matrix_efficiency: float = _assumed(0.4, "of the rate", "guess, for training and prefill")
    memory_efficiency: float = _assumed(0.7, "of the rate", "guess, for reading weights and keys")
    link_efficiency: float = _assumed(0.7, "of the rate", "guess, for large messages")
    nvlink_latency: float = _assumed(10e-6, "s for a collective", "guess")
    network_latency: float = _assumed(20e-6, "s for a hop", "guess")
    operations: float = _assumed(37, "for a layer and decoding step", "300 for 8 layers, above")
    launch: float = _assumed(5e-6, "s for an operation", "guess, without CUDA graphs")
    request: float = _assumed(6e-3, "s for a request to the critic", "guess, as on CPUs, above")
    wire_rate: float = _assumed(450e6, "B/s to the critic", "guess, as on CPUs, above")
    wire_bytes: float = _assumed(20, "B for a token to the critic", "tensors of critic_train")
    cache_memory: float = _assumed(20e9, "B of a GPU for keys and values", "guess")


def assumptions() -> list[dict[str, str]]:
    """The assumptions as rows of a table."""
    return [
        {
            "assumption": each.name.replace("_", " "),
            "value": f"{each.default:g}",
            "unit": each.metadata["unit"],
            "source": each.metadata["source"],
        }
        for each in fields(Assumptions)
    ]


@dataclass(frozen=True)
class Shape:
    """A dense transformer with grouped queries and gated feed-forward layers."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    heads: int
    groups: int

    @property
    def weights(self) -> float:
        """Those of all matrix products; the table of input embeddings is none."""
        attention = self.hidden**2 * (2 + 2 * self.groups / self.heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + (
            self.vocabulary * self.hidden
        )

    @property
    def cache_bytes(self) -> float:
        """Keys and values of a token, in bf16."""
        return 2 * 2 * self.layers * self.hidden * self.groups / self.heads


@dataclass(frozen=True)
class GpuCosts:
    """`Costs` of a model on GPUs, TP x PP of them for a replica, in bf16.

    Attributes:
        resharded: each rank of a pipeline gathers all stages and generates by itself
            (`generation.reshard=auto`); else tokens pass through the stages.
        graphs: a decoding step launches one CUDA graph instead of its operations.
    """

    shape: Shape
    tp: int = 1
    pp: int = 1
    resharded: bool = False
    graphs: bool = False
    given: Assumptions = field(default_factory=Assumptions)

    def _memory(self, size: float) -> float:
        return size / self.tp / (self.given.memory_rate * self.given.memory_efficiency)

    def _products(self, tokens: float) -> float:
        rate = self.tp * self.given.matrix_rate * self.given.matrix_efficiency
        return 2 * self.shape.weights * tokens / rate

    def _reductions(self, tokens: float) -> float:
        """The sums over TP of a pass through all layers, two for each."""
        if self.tp == 1:
            return 0.0
        given, moved = self.given, 2 * (self.tp - 1) / self.tp * 2 * self.shape.hidden * tokens
        one = given.nvlink_latency + moved / (given.nvlink_rate * given.link_efficiency)
        return 2 * self.shape.layers * one

    def _hops(self) -> float:
        """A token's way through the stages, and back to the first."""
        return 0.0 if self.resharded or self.pp == 1 else self.pp * self.given.network_latency

    def prefill(self, tokens: int) -> float:
        return self._products(tokens) + self._reductions(tokens) + self._hops()

    def decode(self, rows: int, cached: float, steps: int) -> float:
        read = self._memory(2 * self.shape.weights + self.shape.cache_bytes * cached)
        launches = self.given.launch * (
            1 if self.graphs else self.given.operations * self.shape.layers
        )
        longest = max(read, self._products(rows), launches)
        return steps * (longest + self._reductions(rows) + self._hops())

    def forward(self, micro_batches: Sequence[int]) -> float:
        tokens = sum(micro_batches)
        seconds = (self._products(tokens) + self._reductions(tokens)) / self.pp
        filled = len(micro_batches)  # of the pipeline; it empties and fills once
        return seconds * (filled + self.pp - 1) / filled

    def update(self, micro_batches: Sequence[int], replicas: int) -> float:
        given, own = self.given, self.shape.weights / (self.tp * self.pp)
        # fp32 gradients are summed to the rank that has their part of the optimizer, bf16 weights
        # come back.
        moved = 6 * own * (replicas - 1) / replicas
        exchange = moved / (given.network_rate * given.link_efficiency)
        exchange += 2 * (replicas - 1) * given.network_latency if replicas > 1 else 0.0
        # Moments and main weights are read and written, gradients read, weights written.
        states = 30 * own / replicas / (given.memory_rate * given.memory_efficiency)
        return 3 * self.forward(micro_batches) + exchange + states

    def before_generation(self) -> float:
        if not self.resharded or self.pp == 1:
            return 0.0
        received = 2 * self.shape.weights / self.tp * (self.pp - 1) / self.pp
        return received / (self.given.network_rate * self.given.link_efficiency)

    def swap(self) -> float:
        """One model out, another one in, in both directions at once."""
        own = 2 * self.shape.weights / (self.tp * self.pp)
        return own / (self.given.host_rate * self.given.link_efficiency)

    def gather(self, tokens: int, replicas: int) -> float:
        received = 8 * tokens * (replicas - 1) / replicas
        rate = self.given.network_rate * self.given.link_efficiency
        return received / rate + (replicas - 1) * self.given.network_latency

    def send(self, tokens: int) -> float:
        return self.given.request + self.given.wire_bytes * tokens / self.given.wire_rate

    def slots(self, longest: int) -> int:
        """Most samples of so many tokens that a generating replica has room for."""
        gpus = self.tp if self.resharded else self.tp * self.pp
        room = self.given.cache_memory * gpus
        return max(1, math.floor(room / (self.shape.cache_bytes * longest)))
