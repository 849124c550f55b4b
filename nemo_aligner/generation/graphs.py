# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding steps as CUDA graphs: a step starts hundreds of kernels for a few microseconds of work
each, which takes a CPU several times as long as a GPU needs for them. A graph starts them at once.
"""

from collections.abc import Callable, Hashable
from functools import cache

import torch
from nemo.utils import logging
from torch import Tensor


class StepGraphs:
    """Runs steps, as graphs where it may.

    A graph holds the addresses of all that a step reads and writes: an object lives no longer than
    the weights and the cache stay where they are.

    Args:
        wanted: capture steps.
        required: an error of a capture is raised; otherwise steps run without from then on.
    """

    def __init__(self, wanted: bool, required: bool) -> None:
        self._wanted, self._required = wanted, required
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if wanted else None

    def run(self, shape: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """What `step` returns, which the next step may overwrite.

        Args:
            shape: names all that is not read from tensors. The first step of a shape runs as it
                is: it warms up what a capture must not start. The second one is captured.
            step: works on the same tensors each time, in place, and waits for nothing.
        """
        if not self._wanted:
            return step()
        if shape not in self._captured:
            self._captured[shape] = None
            return step()
        captured = self._captured[shape]
        if captured is None:
            try:
                captured = self._captured[shape] = self._capture(step)
            except RuntimeError as error:
                if self._required:
                    raise
                cause = error.__context__ or error
                logging.warning(f"decoding steps run eagerly, since a capture failed: {cause}")
                self._wanted = False
                return step()
        graph, output = captured
        graph.replay()
        return output

    def close(self) -> None:
        """Give the memory of the graphs back, but for what cuBLAS keeps."""
        if any(self._captured.values()):
            self._captured.clear()
            torch.cuda.empty_cache()

    def _capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """`torch.cuda.graph`, which would give all cached memory back before each capture."""
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads of the job may use the GPU meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = step()
            finally:
                graph.capture_end()
        return graph, output


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One of the process: cuBLAS keeps 34 MB for each stream that it has worked on."""
    return torch.cuda.Stream()
