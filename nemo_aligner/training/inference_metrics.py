# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated responses, from objects that the configuration names."""

from collections.abc import Mapping
from typing import Any

import hydra
from omegaconf import DictConfig


class InferenceMetricsHandler:
    """Several metrics by name, called together.

    A metric has `update(batch, generation_output)`, `compute() -> float` and `reset()`.

    `metrics_config`: from name to what Hydra makes the metric of (`_target_`, ...), or None.
    """

    def __init__(self, metrics_config: DictConfig | dict[str, Any] | None) -> None:
        self.metrics: Mapping[str, Any] = hydra.utils.instantiate(metrics_config or {})

    def has_metrics(self) -> bool:
        """Whether there is one."""
        return len(self.metrics) > 0

    def update(self, batch: Mapping[str, Any], generation_output: Mapping[str, Any]) -> None:
        """Give every metric a batch and what the model generated for it."""
        for metric in self.metrics.values():
            metric.update(batch, generation_output)

    def compute(self) -> dict[str, float]:
        """The value of every metric."""
        return {name: metric.compute() for name, metric in self.metrics.items()}

    def reset(self) -> None:
        """Start every metric anew."""
        for metric in self.metrics.values():
            metric.reset()
