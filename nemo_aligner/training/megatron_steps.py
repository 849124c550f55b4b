# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place that calls Megatron's forward-backward schedule.

A batch is a dict of tensors with one entry per sample of this data-parallel rank; `tokens` (int64
`[B, S]`, right-padded) is required. It is cut into micro-batches of `micro_batch_size` consecutive
samples. The model is called as `model(tokens, position_ids, attention_mask=None, ...)`: the mask
is causal, which is enough with right padding. Rows may hold several samples one behind the other:
then the batch has `packed_position_ids` (int64 `[B, S]`, 0 where a sample begins), and no sample
sees another. Under context parallelism the model gets this rank's
share of the positions (`context_parallel`) and the other tensors of its samples whole; the ranks
gather each other's outputs and then compute the same loss.

Scaling. A loss function returns this micro-batch's *share* of the loss of the global batch (see
`nemo_aligner.core.losses`). Megatron divides by the number of micro-batches and averages gradients
over data-parallel ranks, so the share is multiplied by both: the gradient is that of the sum of
all shares, whatever the split. (Over context-parallel ranks Megatron itself undoes the average:
the gradient of each is the part that passed through it.)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.context_parallel import take_share, width_multiple
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.expert_losses import take_balance_losses
from nemo_aligner.training.finite import check_finite

Batch = dict[str, torch.Tensor]
ModelChunks = Sequence[torch.nn.Module]


def _micro_batches(batch: Batch, micro_batch_size: int) -> Iterator[Batch]:
    size = batch["tokens"].size(0)
    for start in range(0, size, micro_batch_size):
        yield {
            key: value[start : start + micro_batch_size].to(get_device())
            for key, value in batch.items()
        }


def _padded_width(width: int, config: TransformerConfig) -> int:
    """The next width that CP ranks and, with sequence parallelism, TP ranks can split."""
    multiple = width_multiple()
    if config.sequence_parallel:
        context = parallel_state.get_context_parallel_world_size()
        multiple = math.lcm(multiple, context * config.tensor_model_parallel_size)
    return -(-width // multiple) * multiple


def _call_model(
    model: torch.nn.Module, micro_batch: Batch, width: int, model_inputs: Iterable[str]
) -> torch.Tensor:
    tokens = micro_batch["tokens"]
    pad = width - tokens.size(1)
    if pad:
        tokens = torch.nn.functional.pad(tokens, (0, pad))
    if "packed_position_ids" in micro_batch:
        return _call_packed(model, tokens, micro_batch["packed_position_ids"], pad)
    # The added columns may lie outside a learned position embedding; their output is not used.
    position_ids = (
        torch.arange(width, device=tokens.device).clamp(max=width - pad - 1).expand_as(tokens)
    )
    tokens, position_ids = take_share(tokens, 1), take_share(position_ids, 1)
    inputs = {key: micro_batch[key] for key in model_inputs}
    output: torch.Tensor = model(tokens, position_ids, None, **inputs, **_output_options(model))
    return output


def _call_packed(
    model: torch.nn.Module, tokens: torch.Tensor, position_ids: torch.Tensor, pad: int
) -> torch.Tensor:
    """Output `[1, b * width, ...]` for rows `[b, width]` of several samples each, which go to the
    model as one row, in Megatron Core's form `thd`: positions and attention restart where
    `position_ids` `[b, width - pad]` is 0.

    On a GPU Transformer Engine takes this form; that has not been run yet.
    """
    if parallel_state.get_context_parallel_world_size() > 1:
        raise UserError(
            "packed sequences cannot be split over context-parallel ranks: set packed_sequence "
            "to False or model.context_parallel_size to 1."
        )
    added = torch.arange(pad, device=tokens.device).expand(tokens.size(0), pad)
    flat = torch.cat([position_ids, added], dim=1).reshape(1, -1)
    ends = torch.tensor([flat.numel()], device=flat.device)
    starts = torch.cat([(flat[0] == 0).nonzero()[:, 0], ends]).to(torch.int32)
    longest = int(flat.max()) + 1
    output: torch.Tensor = model(
        tokens.reshape(1, -1),
        flat,
        None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        **_output_options(model),
    )
    return output


def _output_options(model: Any) -> dict[str, bool]:
    """Options that keep a bf16 language model from copying logits and gradient to float32.

    `vocab_parallel` computes in float32 for logits of any dtype. The small output of a head is
    copied as usual.
    """
    while not isinstance(model, Float16Module) and hasattr(model, "module"):
        model = model.module
    language_model = isinstance(model, Float16Module) and hasattr(model.module, "output_layer")
    return {"fp32_output": False} if language_model else {}


def _crop(output: torch.Tensor, micro_batch: Batch, width: int) -> torch.Tensor:
    """Remove the added columns from the output `[b, width]` of a head, and make rows of that of
    packed samples.

    Logits stay as they are: `vocab_parallel` takes them with padding, and cutting it off would
    copy their gradient.
    """
    if "packed_position_ids" in micro_batch:
        return output.view(-1, width, *output.shape[2:])
    tokens_width = micro_batch["tokens"].size(1)
    if width != tokens_width and output.dim() == 2 and output.size(1) == width:
        return output[:, :tokens_width]
    return output


def _micro_batch_group(model_chunks: ModelChunks) -> int:
    """The number of micro-batches must be a multiple of this (above 1 with virtual pipelining)."""
    return parallel_state.get_pipeline_model_parallel_world_size() if len(model_chunks) > 1 else 1


def _run_schedule(
    model_chunks: ModelChunks,
    batch: Batch,
    micro_batch_size: int,
    consume: Callable[[torch.Tensor, Batch], Any],
    model_inputs: Iterable[str],
    forward_only: bool,
) -> list[Any]:
    """Run the schedule; return what `consume(output, micro_batch)` returns on the last stage.

    With gradients `consume` is the loss function of Megatron's schedule.
    """
    config = get_model_config(model_chunks[0])
    num_microbatches = batch["tokens"].size(0) // micro_batch_size
    width = _padded_width(batch["tokens"].size(1), config)
    packed = "packed_position_ids" in batch  # the rows of a micro-batch make one

    def forward_step(
        data_iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(data_iterator)
        output = _call_model(model, micro_batch, width, model_inputs)

        def loss_function(output_tensor: torch.Tensor, non_loss_data: bool = False) -> Any:
            return consume(_crop(output_tensor, micro_batch, width), micro_batch)

        return output, loss_function

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        # Each virtual pipeline chunk walks over the micro-batches with an iterator of its own.
        data_iterator=[_micro_batches(batch, micro_batch_size) for _ in model_chunks]
        if len(model_chunks) > 1
        else _micro_batches(batch, micro_batch_size),
        model=model_chunks if len(model_chunks) > 1 else model_chunks[0],
        num_microbatches=num_microbatches,
        seq_length=width * micro_batch_size if packed else width,
        micro_batch_size=1 if packed else micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


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


def broadcast_from_last_stage(value: Any) -> Any:
    """Return the `value` (any object) of the last pipeline stage on every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(
        box,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
        device=get_device(),
    )
    return box[0]


def forward_backward(
    model_chunks: ModelChunks,
    batch: Batch,
    *,
    micro_batch_size: int,
    loss_fn: Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Batch]],
    forward_only: bool = False,
    model_inputs: Iterable[str] = (),
) -> tuple[dict[str, float], Batch]:
    """Forward (and backward) of one global batch; all ranks call it.

    Args:
        model_chunks: the model of this pipeline stage (more than one with virtual pipelining).
        batch: this rank's samples; `tokens` int64 `[B, S]` and what `loss_fn` needs.
        micro_batch_size: samples per forward pass; must divide B.
        loss_fn: `(output, micro_batch) -> (loss, metrics)`, called on the last stage; all are
            partial sums over the global batch, and `loss` is one of the metrics. A metric is a
            scalar, or a tensor of moments (`nemo_aligner.core.metrics`). `output` is what the
            model's head returns, or `[b, S, V / TP]` logits of a language model, as
            `vocab_parallel` takes them (in the model's precision, with padding of the positions,
            under context parallelism a share of them).
        model_inputs: further keys of the batch that are handed to the model by name.

    Returns:
        (metrics, moments), summed over micro-batches and data-parallel ranks, equal on every
        rank: the scalars as numbers, the others as float64 tensors on the CPU. With gradients the
        metrics include the balance losses of a mixture of experts (`expert_losses.py`), which are
        means.

    Raises:
        UserError: `micro_batch_size` does not divide B, or virtual pipelining needs another number
            of micro-batches.
        NonFiniteError: the loss or a gradient is NaN or infinite; on every rank, before a weight
            has changed.
    """
    rows = batch["tokens"].size(0)
    _check_micro_batches(rows, micro_batch_size, _micro_batch_group(model_chunks))
    scale = (rows // micro_batch_size) * parallel_state.get_data_parallel_world_size()
    totals: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []

    def consume(output: torch.Tensor, micro_batch: Batch) -> tuple[torch.Tensor, Batch] | Batch:
        loss, metrics = loss_fn(output, micro_batch)
        losses.append(loss.detach())
        # The schedule divides the loss in place, so metrics must be copies: the sums are. The
        # moments of a correlation need float64.
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value.detach().double()
        return metrics if forward_only else (loss * scale, {})

    if forward_only:
        with torch.no_grad():
            _run_schedule(
                model_chunks, batch, micro_batch_size, consume, model_inputs, forward_only=True
            )
    else:
        _run_schedule(
            model_chunks, batch, micro_batch_size, consume, model_inputs, forward_only=False
        )
    metrics, moments = _sum_over_data_parallel(totals)
    if not forward_only:
        check_finite(model_chunks, metrics["loss"], losses, micro_batch_size)
        metrics |= take_balance_losses(get_model_config(model_chunks[0]), rows // micro_batch_size)
    return metrics, moments


def _sum_over_data_parallel(totals: Batch) -> tuple[dict[str, float], Batch]:
    """Sum the last stage's `totals` over data-parallel ranks; all ranks get the result.

    Returns:
        The scalars as numbers, and the other tensors, float64 on the CPU.
    """
    keys = sorted(totals)
    if keys:
        values = torch.cat([totals[key].reshape(-1) for key in keys])
        # Context-parallel ranks have the same numbers.
        if parallel_state.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
        sums = values.cpu().split([totals[key].numel() for key in keys])
        totals = {key: x.reshape(totals[key].shape) for key, x in zip(keys, sums, strict=True)}
    metrics = {key: float(total) for key, total in totals.items() if total.dim() == 0}
    moments = {key: total for key, total in totals.items() if total.dim() > 0}
    result: tuple[dict[str, float], Batch] = broadcast_from_last_stage((metrics, moments))
    return result


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


@torch.no_grad()
def forward_collect(
    model_chunks: ModelChunks,
    batch: Batch,
    *,
    micro_batch_size: int,
    output_fn: Callable[[torch.Tensor, Batch], torch.Tensor],
    model_inputs: Iterable[str] = (),
) -> torch.Tensor:
    """Forward pass of this rank's samples; all ranks call it, with equal shapes in a pipeline.

    Data-parallel ranks may have samples of another number and width. With expert parallelism they
    then make as many passes as the one with the most, because every pass needs the experts of all
    ranks; so all of them must call it equally often.

    Args:
        model_chunks: the model of this pipeline stage.
        batch: this rank's samples; `tokens` int64 `[B, S]` and what `output_fn` needs.
        micro_batch_size: most samples per forward pass; an incomplete micro-batch is filled up
            with repeated samples, whose output is dropped. Virtual pipelining takes fewer samples
            at a time where there are few.
        output_fn: `(output, micro_batch) -> tensor [b, ...]`, called on the last stage.
        model_inputs: further keys of the batch that are handed to the model by name.

    Returns:
        The tensors of all micro-batches, `[B, ...]`, on every pipeline stage.
    """
    rows = batch["tokens"].size(0)
    group = _micro_batch_group(model_chunks)
    micro_batch_size = min(micro_batch_size, -(-rows // group))
    rounds = _most_of_expert_ranks(-(-rows // (micro_batch_size * group)))
    missing = rounds * micro_batch_size * group - rows
    if missing:
        batch = {
            key: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
            for key, value in batch.items()
        }
    outputs = _run_schedule(
        model_chunks,
        batch,
        micro_batch_size,
        output_fn,
        model_inputs,
        forward_only=True,
    )
    is_last = parallel_state.is_pipeline_last_stage()
    collected = torch.cat(outputs)[:rows].contiguous() if is_last else torch.empty(0)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        shape, dtype = broadcast_from_last_stage((collected.shape, collected.dtype))
        if not is_last:
            collected = torch.empty(shape, dtype=dtype, device=get_device())
        torch.distributed.broadcast(
            collected,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return collected
