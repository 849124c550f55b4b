# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens the passes of this process computed, how many of them were no padding, and how
fast.

`megatron_steps.py` counts, trainers read the counts once per step and log them.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from nemo_aligner.core.interfaces import Logger
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.model_flops import peak_of_this_card

FORWARD = "forward"  # without gradient: log-probs, scores, validation
TRAIN = "train"

# Of each phase: samples, their tokens, tokens that were computed, and FLOPs of the former.
_counts = {FORWARD: [0, 0, 0, 0], TRAIN: [0, 0, 0, 0]}


def count_tokens(phase: str, samples: int, real: int, computed: int, flops: int) -> None:
    """Add a pass over so many samples: the tokens up to their lengths, all tokens, and FLOPs for
    the former (`model_flops.py`).
    """
    for index, number in enumerate((samples, real, computed, flops)):
        _counts[phase][index] += number


def forget_token_counts() -> None:
    """Start at 0: whatever this process computed before does not belong to the next step."""
    for phase in _counts:
        _counts[phase] = [0, 0, 0, 0]


def take_token_counts(
    names: Mapping[str, str], seconds: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Counts since the last call, as metrics, over all data-parallel ranks; all ranks call it.

    Args:
        names: of the phases.
        seconds: that those took, by name; without them a phase has no speed.

    Returns:
        Of each phase that computed something: `<name>_computed`, tokens, and
        `<name>_real_fraction`, equal on every rank; and its speed per rank of the job, by this
        rank's `seconds`: `<name>_tokens_per_s` (no padding), `<name>_samples_per_s`,
        `<name>_tflops` and, on a known GPU, `<name>_mfu`.
    """
    counts = torch.tensor([_counts[phase] for phase in names], dtype=torch.float64)
    forget_token_counts()
    counts = counts.to(get_device())
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    peak = peak_of_this_card()
    tokens, speeds = {}, {}
    for name, (samples, real, computed, flops) in zip(
        names.values(), counts.tolist(), strict=True
    ):
        if not computed:
            continue
        tokens[f"{name}_computed"] = computed
        tokens[f"{name}_real_fraction"] = real / computed
        if seconds.get(name):
            rank_seconds = seconds[name] * parallel_state.get_world_size()
            speeds[f"{name}_tokens_per_s"] = real / rank_seconds
            speeds[f"{name}_samples_per_s"] = samples / rank_seconds
            speeds[f"{name}_tflops"] = flops / rank_seconds / 1e12
            if peak is not None:
                speeds[f"{name}_mfu"] = speeds[f"{name}_tflops"] / peak
    return tokens, speeds


def log_token_counts(
    logger: Logger,
    step: int,
    names: Mapping[str, str],
    seconds: Mapping[str, float],
    speeds: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Log `take_token_counts` as the families `tokens/` and `speed/`; returns the latter, with
    other `speeds` and on a GPU with `memory_peak_gb`, of the rank that took most since the last
    call; all ranks call it.
    """
    tokens, counted = take_token_counts(names, seconds)
    speeds = {**speeds, **counted}
    if torch.cuda.is_available():
        peak = {"memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        speeds |= all_reduce_dict(peak, op=torch.distributed.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
    for prefix, metrics in (("tokens/", tokens), ("speed/", speeds)):
        if metrics:
            logger.log_metrics(metrics, step=step, prefix=prefix)
    return speeds


def in_short(speeds: Mapping[str, float]) -> dict[str, float]:
    """Those of `log_token_counts` that a progress bar shows."""
    shown = {
        "generate_tokens_per_s": "generated_tokens_per_s",
        "train_tokens_per_s": "tokens_per_s",
        "train_mfu": "mfu",
    }
    return {shown[name]: speed for name, speed in speeds.items() if name in shown}
