# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens the passes of this process computed, and how many of them were no padding.

`megatron_steps.py` counts, trainers read the counts once per step and log them.
"""

from collections.abc import Mapping

import torch

from nemo_aligner.core.interfaces import Logger
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device

FORWARD = "forward"  # without gradient: log-probs, scores, validation
TRAIN = "train"

_counts = {FORWARD: [0, 0], TRAIN: [0, 0]}


def count_tokens(phase: str, real: int, computed: int) -> None:
    """Add the tokens of a pass: those of the samples up to their lengths, and all of them."""
    _counts[phase][0] += real
    _counts[phase][1] += computed


def forget_token_counts() -> None:
    """Start at 0: whatever this process computed before does not belong to the next step."""
    for phase in _counts:
        _counts[phase] = [0, 0]


def take_token_counts(names: Mapping[str, str]) -> dict[str, float]:
    """Counts since the last call, as metrics, over all data-parallel ranks; all ranks call it.

    Returns:
        `<name>_computed`, tokens, and `<name>_real_fraction` of each phase that computed
        something, equal on every rank.
    """
    counts = torch.tensor([_counts[phase] for phase in names], dtype=torch.float64)
    forget_token_counts()
    counts = counts.to(get_device())
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    metrics = {}
    for name, (real, computed) in zip(names.values(), counts.tolist(), strict=True):
        if computed:
            metrics[f"{name}_computed"] = computed
            metrics[f"{name}_real_fraction"] = real / computed
    return metrics


def log_token_counts(logger: Logger, step: int, names: Mapping[str, str]) -> dict[str, float]:
    """Log `take_token_counts` as the family `tokens/` and return them; all ranks call it."""
    metrics = take_token_counts(names)
    if metrics:
        logger.log_metrics(metrics, step=step, prefix="tokens/")
    return metrics
