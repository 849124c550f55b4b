# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place that calls Megatron's forward-backward schedule.

A batch is a dict of tensors with one entry per sample of this data-parallel rank; `tokens` (int64
`[B, S]`, right-padded) is required. It is cut into micro-batches. With `lengths`, the tokens of
each sample that matter, samples of similar length share one, and each is as wide as its longest
sample (`passes.py`): entries `[B, S]` and `[B, S-1]` have a column for each position and
are cut with the tokens; what belongs to a sample as a whole has one dimension, or more than two.

The model is called as `model(tokens, position_ids, attention_mask=None, ...)`: the mask is causal,
which is enough with right padding. Rows may hold several samples one behind the other: then the
batch has `packed_position_ids` (int64 `[B, S]`, 0 where a sample begins), and no sample sees
another. Under context parallelism the model gets this rank's share of the positions
(`parallel/collectives.py`) and the other tensors whole; the ranks gather each other's outputs and
then compute the same loss.

A loss function returns this micro-batch's *share* of the loss of the global batch
(`nemo_aligner.core.losses`). Megatron divides by the number of micro-batches and averages
gradients over data-parallel ranks, so the share is multiplied by both: the gradient is that of the
sum of all shares, whatever the split. (Over context-parallel ranks Megatron itself undoes the
average.)
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import NonFiniteError, UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import (
    all_reduce,
    broadcast_tensor_within_pp,
    gathered,
    take_share,
)
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import changed, take_balance_table
from nemo_aligner.training import passes

Batch = dict[str, torch.Tensor]
ModelChunks = Sequence[torch.nn.Module]


def _micro_batches(batch: Batch, plan: passes.Plan) -> Iterator[Batch]:
    """The samples of each micro-batch on the device, cut to the columns that it computes."""
    whole = batch["tokens"].size(1)
    for part in plan:
        rows = torch.tensor(part.rows)
        cut = max(whole - part.width, 0)
        yield {
            key: _without_last(value[rows.to(value.device)], whole, cut).to(get_device())
            for key, value in batch.items()
        }


def _without_last(value: torch.Tensor, whole: int, cut: int) -> torch.Tensor:
    """`value` without its last `cut` columns, if they belong to the `whole` positions."""
    has_positions = value.dim() == 2 and value.size(1) in (whole, whole - 1)
    return value[:, : value.size(1) - cut] if has_positions else value


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
    return model(tokens, position_ids, None, **inputs, **_output_options(model))


def _call_packed(
    model: torch.nn.Module, tokens: torch.Tensor, position_ids: torch.Tensor, pad: int
) -> torch.Tensor:
    """Output `[1, b * width, ...]` for rows `[b, width]` of several samples each, as one row in
    Megatron Core's form `thd`: positions and attention restart where `position_ids` `[b, width -
    pad]` is 0. (Not run on a GPU yet, where Transformer Engine takes this form.)
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
    lengths = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), int(flat.max()) + 1)
    return model(
        tokens.reshape(1, -1),
        flat,
        None,
        packed_seq_params=PackedSeqParams("thd", starts, starts, **lengths),
        **_output_options(model),
    )


def _output_options(model: Any) -> dict[str, bool]:
    """Keep a bf16 language model from copying logits and gradient to float32, in which
    `vocab_parallel` computes for any dtype. The small output of a head is copied.
    """
    while not isinstance(model, Float16Module) and hasattr(model, "module"):
        model = model.module
    language_model = isinstance(model, Float16Module) and hasattr(model.module, "output_layer")
    return {"fp32_output": False} if language_model else {}


def gives_values(model: torch.nn.Module) -> bool:
    """Whether the output of a model chunk is `[b, S]`, from a head with a number per position."""
    head = getattr(unwrap_model(model), "rm_head", None)
    return head is not None and head.output_sequence


def _crop(
    output: torch.Tensor, model: torch.nn.Module, micro_batch: Batch, width: int
) -> torch.Tensor:
    """Remove the added columns from the output `[b, width]` of a head, and make rows of that of
    packed samples. Logits keep them: cutting them off would copy their gradient.
    """
    if "packed_position_ids" in micro_batch:
        return output.view(-1, width, *output.shape[2:])
    return output[:, : micro_batch["tokens"].size(1)] if gives_values(model) else output


def _run_schedule(
    model_chunks: ModelChunks,
    batch: Batch,
    plan: passes.Plan,
    consume: Callable[[torch.Tensor, Batch], Any],
    model_inputs: Iterable[str],
    forward_only: bool,
) -> list[Any]:
    """What `consume(output, micro_batch)` returns on the last stage, in the order of the plan.
    With gradients it is the loss function of Megatron's schedule.
    """
    config = get_model_config(model_chunks[0])
    packed = "packed_position_ids" in batch  # the rows of a micro-batch make one
    shapes = [(part.tokens, 1) if packed else (part.width, len(part.rows)) for part in plan]
    # Stages of a pipeline must know where micro-batches differ in shape.
    pipeline = parallel_state.get_pipeline_model_parallel_world_size() > 1
    exchanged = pipeline and len(set(shapes)) > 1

    # Each virtual pipeline chunk walks over the micro-batches with an iterator of its own.
    def iterator() -> Iterator[tuple[Batch, int]]:
        return zip(_micro_batches(batch, plan), (part.width for part in plan), strict=True)

    def forward_step(
        data_iterator: Iterator[tuple[Batch, int]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        progress.made()
        micro_batch, width = next(data_iterator)
        output = _call_model(model, micro_batch, width, model_inputs)

        def loss_function(output_tensor: torch.Tensor, non_loss_data: bool = False) -> Any:
            return consume(_crop(output_tensor, model, micro_batch, width), micro_batch)

        return output, loss_function

    with changed([(config, "variable_seq_lengths", exchanged)]):
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iterator() for _ in model_chunks]
            if len(model_chunks) > 1
            else iterator(),
            model=model_chunks if len(model_chunks) > 1 else model_chunks[0],
            num_microbatches=len(plan),
            seq_length=shapes[0][0],
            micro_batch_size=shapes[0][1],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return results


def broadcast_from_last_stage(value: Any) -> Any:
    """Return the `value` (any object) of the last pipeline stage on every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    return gathered(value, parallel_state.get_pipeline_model_parallel_group())[-1]


def forward_backward(
    model_chunks: ModelChunks,
    batch: Batch,
    *,
    micro_batch_size: int,
    loss_fn: Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Batch]],
    forward_only: bool = False,
    model_inputs: Iterable[str] = (),
    lengths: torch.Tensor | None = None,
    micro_batch_tokens: int | None = None,
    keep_order: bool = False,
    together: int = 1,
) -> tuple[dict[str, float], Batch]:
    """Forward (and backward) of one global batch; all ranks call it. Returns (metrics, moments),
    summed over micro-batches and data-parallel ranks, equal on every rank: the scalars as numbers,
    the others as float64 tensors on the CPU. With gradients the metrics include the balance losses
    of experts (`passes.py`), which are means.

    `UserError`: `micro_batch_size` does not divide B, or virtual pipelining needs another number
    of micro-batches. `NonFiniteError`: the loss or a gradient is NaN or infinite; on every rank,
    before a weight has changed.

    Args:
        batch: this rank's samples; `tokens` int64 `[B, S]` and what `loss_fn` needs.
        micro_batch_size: samples per forward pass; must divide B.
        loss_fn: `(output, micro_batch) -> (loss, metrics)`, called on the last stage; all are
            partial sums over the global batch, and `loss` is one of the metrics. A metric is a
            scalar, or a tensor of moments (`nemo_aligner.core.metrics`). `output` is what the head
            returns, or `[b, S, V / TP]` logits, as `vocab_parallel` takes them.
        model_inputs: further keys of the batch that are handed to the model by name.
        lengths: int64 `[B]`, how many tokens of each sample the loss depends on, at least 1; None:
            all. With the losses that balance experts nothing is cut and no sample moves.
        micro_batch_tokens: most tokens of a micro-batch, in place of `micro_batch_size`.
        keep_order: micro-batches are consecutive samples.
        together: so many consecutive samples stay in one micro-batch, in their order.
    """
    config = get_model_config(model_chunks[0])
    balanced = passes.has_balance_losses(config)
    plan = passes.plan_of_rank(
        model_chunks,
        batch["tokens"],
        None if balanced else lengths,
        micro_batch_size,
        micro_batch_tokens,
        training=True,
        keep_order=keep_order or balanced,
        together=together,
    )
    _count(passes.FORWARD if forward_only else passes.TRAIN, model_chunks[0], plan, lengths, batch)
    scale = len(plan) * parallel_state.get_data_parallel_world_size()
    totals: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []

    def consume(output: torch.Tensor, micro_batch: Batch) -> tuple[torch.Tensor, Batch] | Batch:
        loss, metrics = loss_fn(output, micro_batch)
        losses.append(loss.detach())
        # The schedule divides the loss in place: sums are copies. Moments need float64.
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value.detach().double()
        return metrics if forward_only else (loss * scale, {})

    if balanced:
        take_balance_table()  # a failed pass, or a direct call of a router, may have filled it
    with torch.set_grad_enabled(not forward_only):
        _run_schedule(model_chunks, batch, plan, consume, model_inputs, forward_only=forward_only)
    metrics, moments = _sum_over_data_parallel(totals)
    if not forward_only:
        check_finite(model_chunks, metrics["loss"], losses, [part.rows for part in plan])
        metrics |= passes.take_balance_losses(config, len(plan))
    return metrics, moments


def _sum_over_data_parallel(totals: Batch) -> tuple[dict[str, float], Batch]:
    """Sum the last stage's `totals` over data-parallel ranks: (scalars, other tensors) on all."""
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
    return broadcast_from_last_stage((metrics, moments))


@torch.no_grad()
def forward_collect(
    model_chunks: ModelChunks,
    batch: Batch,
    *,
    micro_batch_size: int,
    output_fn: Callable[[torch.Tensor, Batch], torch.Tensor],
    model_inputs: Iterable[str] = (),
    lengths: torch.Tensor | None = None,
    micro_batch_tokens: int | None = None,
    by_position: bool = False,
) -> torch.Tensor:
    """Forward pass of this rank's samples; all ranks call it, with equal shapes in a pipeline.
    Returns the outputs of all samples, `[B, ...]`, on every pipeline stage. Data-parallel ranks
    may have samples of another number and width; with expert parallelism all must call it equally
    often, as each pass needs the experts of all ranks.

    Args:
        micro_batch_size: most samples per forward pass. Expert parallelism and virtual pipelining
            may need more passes, also of repeated samples.
        output_fn: `(output, micro_batch) -> tensor [b, ...]`, called on the last stage.
        batch, model_inputs, lengths, micro_batch_tokens: as of `forward_backward`.
        by_position: dimension 1 of the output is positions, those of the micro-batch's tokens or
            one less; results have the columns of the whole batch, 0 beyond the length of a sample.
    """
    rows, columns = batch["tokens"].shape
    sizes = micro_batch_size, micro_batch_tokens
    plan = passes.plan_of_rank(model_chunks, batch["tokens"], lengths, *sizes, training=False)
    _count(passes.FORWARD, model_chunks[0], plan, lengths, batch)
    outputs = _run_schedule(model_chunks, batch, plan, output_fn, model_inputs, forward_only=True)
    collected = None
    if parallel_state.is_pipeline_last_stage():
        collected = _in_order(outputs, plan, rows, columns if by_position else None)
        if by_position and lengths is not None:
            column = torch.arange(collected.size(1), device=collected.device)
            counts = (lengths - (columns - collected.size(1))).to(collected.device)
            collected[column >= counts.unsqueeze(1)] = 0
    return broadcast_tensor_within_pp(collected)


def _count(
    phase: str,
    model: torch.nn.Module,
    plan: passes.Plan,
    lengths: torch.Tensor | None,
    batch: Batch,
) -> None:
    rows, width = batch["tokens"].shape
    lengths = torch.full((rows,), width) if lengths is None else lengths
    real = int(lengths.sum())
    if "packed_position_ids" in batch:
        pairs = int((batch["packed_position_ids"] + 1).sum())
    else:
        pairs = passes.attended_pairs(lengths)
    flops = passes.pass_flops(model, real, pairs, training=phase == passes.TRAIN)
    passes.count_tokens(phase, rows, real, sum(part.tokens for part in plan), flops)


def _in_order(
    outputs: Sequence[torch.Tensor], plan: passes.Plan, rows: int, columns: int | None
) -> torch.Tensor:
    """`[rows, ...]` in the order of the batch, from `[b, ...]` of each micro-batch. Positions of
    outputs are filled up to `columns`, less what they lack of a micro-batch's; None: equal shapes.
    """
    shape = list(outputs[0].shape)
    shape[0] = rows
    if columns is not None:
        shape[1] += columns - min(plan[0].width, columns)
    collected = outputs[0].new_zeros(shape)
    for part, output in zip(plan, outputs, strict=True):
        places = torch.tensor(part.rows, device=output.device)
        if columns is None:
            collected[places] = output
        else:
            collected[places, : output.size(1)] = output
    return collected


REMEDY = (
    "No weight was changed. Look at the last values of loss and grad_norm in metrics.jsonl and at "
    "the data of this step; lower model.optim.lr, clip gradients (trainer.*.gradient_clip_val), "
    "and resume from the last good checkpoint."
)
NAMED_TENSORS = 3  # weights with wrong gradients that the message names


@contextlib.contextmanager
def naming_step(step: str) -> Iterator[None]:
    """Put `step`, for example "update 12 of PPO step 3", in front of a `NonFiniteError`."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{step}: {error}").with_traceback(error.__traceback__) from None


def check_finite(
    model_chunks: Sequence[torch.nn.Module],
    loss: float,
    shares: Sequence[torch.Tensor],
    rows: Sequence[Sequence[int]],
) -> None:
    """Refuse a loss or a gradient that is NaN or infinite; all ranks call it after the reductions.
    `NonFiniteError`, on every rank: names the samples or the weights.

    Args:
        model_chunks: of this stage; gradients only of those that are wrapped for training.
        loss: of the global batch.
        shares: scalars, this rank's part of the loss by micro-batch; empty except on the last
            stage.
        rows: places of the samples of each micro-batch in the share of this rank.
    """
    found = [not math.isfinite(loss), not _gradients_are_finite(model_chunks)]
    wrong = torch.tensor(found, dtype=torch.int32, device=get_device())
    all_reduce(wrong, op=dist.ReduceOp.MAX)
    if not wrong.any():
        return
    bad_loss, bad_gradient = wrong.tolist()
    rank, place = parallel_state.get_data_parallel_rank(), ""
    first = next((part for share, part in zip(shares, rows) if not share.isfinite()), None)
    if first is not None:
        samples = f"sample{'s' * (len(first) > 1)} {', '.join(map(str, sorted(first)))}"
        place = f"first in {samples} of the share of data-parallel rank {rank}"
    weights = [
        name.removeprefix("module.").removeprefix("module.")
        for chunk in model_chunks
        if isinstance(chunk, DistributedDataParallel)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.isfinite().all()
    ]
    by_rank = gathered((place, weights))
    places = [place for place, _ in by_rank if place]
    names = sorted({name for _, names in by_rank for name in names})
    parts = []
    if bad_loss:
        where = f" ({'; '.join(dict.fromkeys(places))})" if places else ""
        parts.append(f"the loss is {loss}{where}")
    if bad_gradient:
        more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
        parts.append(f"the gradient of {', '.join(names[:NAMED_TENSORS])}{more} is not finite")
    raise NonFiniteError(f"{' and '.join(parts)}. {REMEDY}")


def _gradients_are_finite(model_chunks: Sequence[torch.nn.Module]) -> bool:
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                # A finite norm proves finite elements and is cheap; others may have overflowed.
                norm = torch.linalg.vector_norm(buffer.grad_data)
                if not norm.isfinite() and not buffer.grad_data.isfinite().all():
                    return False
    return True
