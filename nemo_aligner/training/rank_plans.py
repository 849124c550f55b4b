# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a rank, as the split needs them: widths that sequence and context parallel
ranks can share, numbers that virtual pipelining can schedule and expert-parallel ranks have in
common. `micro_batches.py` shares the samples out.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.context_parallel import width_multiple
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.micro_batches import (
    MicroBatch,
    fewest_micro_batches,
    plan_micro_batches,
    with_rows_together,
)

Plan = Sequence[MicroBatch]


def plan_of_rank(
    model_chunks: Sequence[torch.nn.Module],
    tokens: torch.Tensor,
    lengths: torch.Tensor | None,
    micro_batch_size: int,
    micro_batch_tokens: int | None,
    *,
    training: bool,
    keep_order: bool = False,
    together: int = 1,
) -> Plan:
    """The micro-batches of this rank's samples; all ranks call it.

    The ranks of a model-parallel group call it with equal arguments and get the same plan. The
    arguments that are not named here are those of `megatron_steps.forward_backward`.

    Args:
        tokens: int64 `[B, S]`; only its shape matters.
        training: no sample may be in two micro-batches.

    Raises:
        UserError: in training, the samples do not make whole micro-batches, or virtual pipelining
            needs another number of them.
    """
    config = get_model_config(model_chunks[0])
    rows, columns = tokens.shape
    group = micro_batch_group(model_chunks)
    if training and (micro_batch_tokens is None or keep_order):
        _check_micro_batches(rows, micro_batch_size, group)
    if lengths is None:
        lengths = torch.full((rows,), columns)
    longest = lengths.reshape(-1, together).amax(1).clamp(max=columns)
    widths = [_padded_width(width, config) for width in longest.tolist()]
    by_tokens = micro_batch_tokens is not None and not keep_order
    count = (
        fewest_micro_batches(widths, micro_batch_tokens // together)
        if micro_batch_tokens is not None and by_tokens
        else -(-rows // micro_batch_size)
    )
    count = _most_of_expert_ranks(-(-count // group) * group)
    if training and count > len(widths):  # then they cannot be as small as they should
        count = len(widths) // group * group
        if not count:
            raise UserError(
                f"{rows} samples per data-parallel rank are too few: with "
                "model.virtual_pipeline_model_parallel_size the number of micro-batches must be a "
                f"multiple of model.pipeline_model_parallel_size={group}. Raise "
                "model.global_batch_size."
            )
    plan = plan_micro_batches(widths, count, even_tokens=by_tokens, keep_order=keep_order)
    return with_rows_together(plan, together)


def _padded_width(width: int, config: TransformerConfig) -> int:
    """The next width that CP ranks and, with sequence parallelism, TP ranks can split."""
    multiple = width_multiple()
    if config.sequence_parallel:
        context = parallel_state.get_context_parallel_world_size()
        multiple = math.lcm(multiple, context * config.tensor_model_parallel_size)
    return -(-width // multiple) * multiple


def micro_batch_group(model_chunks: Sequence[torch.nn.Module]) -> int:
    """The number of micro-batches must be a multiple of this (above 1 with virtual pipelining)."""
    return parallel_state.get_pipeline_model_parallel_world_size() if len(model_chunks) > 1 else 1


def _check_micro_batches(samples: int, micro_batch_size: int, group: int) -> None:
    """Refuse a number of samples per rank that does not make whole (groups of) micro-batches."""
    if samples % micro_batch_size:
        raise UserError(
            f"{samples} samples per data-parallel rank are not divisible by "
            f"model.micro_batch_size={micro_batch_size}; change model.global_batch_size or "
            "model.micro_batch_size."
        )
    count = samples // micro_batch_size
    if count % group:
        raise UserError(
            f"{samples} samples per data-parallel rank make {count} micro-batch(es) of "
            f"model.micro_batch_size={micro_batch_size}; with "
            "model.virtual_pipeline_model_parallel_size their number must be a multiple of "
            f"model.pipeline_model_parallel_size={group}. Change model.global_batch_size or "
            "model.micro_batch_size."
        )


def _most_of_expert_ranks(count: int) -> int:
    """The largest `count` among the ranks of an expert-parallel group; they call it together."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return count
    most = torch.tensor(count, device=get_device())
    torch.distributed.all_reduce(
        most,
        op=torch.distributed.ReduceOp.MAX,
        group=parallel_state.get_expert_model_parallel_group(),
    )
    return int(most)
