# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a pass through a model computes: which samples share a micro-batch and how wide it is,
planned from their lengths alone, with little padding; how many tokens and FLOPs that were, and how
fast; and the losses that balance the experts of a mixture of experts, as metrics.

`megatron_steps.py` carries a plan out and counts; trainers read the counts once per step. Widths
must suit sequence and context parallelism, numbers virtual pipelining and all expert-parallel
ranks.

FLOPs are those of the matrix products of a whole model for tokens that are no padding, as in
appendix B of PaLM (Chowdhery et al., 2022), but with attention to earlier positions alone. What is
computed twice (recomputation) or for nothing (padding) does not count: the share of the peak is
the model FLOP utilisation (MFU). With an attention window it is a little too high.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce, all_reduce_dict, largest, width_multiple
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import take_balance_table
from nemo_aligner.training.loggers import named


@dataclass(frozen=True)
class MicroBatch:
    rows: tuple[int, ...]  # their places in the batch
    width: int  # columns that are computed of each

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.width


def plan_micro_batches(
    lengths: Sequence[int], count: int, *, even_tokens: bool = False, keep_order: bool = False
) -> list[MicroBatch]:
    """Share samples out to `count` micro-batches, the longest first: what needs most memory runs
    first. Where there are fewer samples, the last micro-batches are copies of the shortest one.
    With `even_tokens`, which excludes `keep_order`, the largest number of computed tokens is the
    least possible; otherwise the numbers of samples are even.
    """
    order = list(range(len(lengths)))
    if not keep_order:
        order.sort(key=lambda row: -lengths[row])  # stable: equal lengths stay in order
    widths = [lengths[row] for row in order]
    real = min(count, len(order))
    if even_tokens:
        sizes = _sizes_of_even_tokens(widths, real)
    else:  # they differ by 1 at most, the smaller ones first
        ends = [len(order) * number // real for number in range(real + 1)]
        sizes = [end - start for start, end in zip(ends, ends[1:])]
    plan, start = [], 0
    for size in sizes:
        rows = tuple(order[start : start + size])
        plan.append(MicroBatch(rows, max(widths[start : start + size])))
        start += size
    copy = MicroBatch(plan[-1].rows[-1:], widths[-1])
    return plan + [copy] * (count - real)


def with_rows_together(plan: Sequence[MicroBatch], together: int) -> list[MicroBatch]:
    """A plan for samples from a plan for groups of `together` consecutive samples."""

    def rows(part: MicroBatch) -> tuple[int, ...]:
        return tuple(row * together + place for row in part.rows for place in range(together))

    return [MicroBatch(rows(part), part.width) for part in plan]


def sizes_within(widths: Sequence[int], tokens: int) -> list[int]:
    """Sizes of consecutive groups, each as large as it may be (a single sample at least) without
    computing more than so many `tokens`; `widths` descend.
    """
    sizes: list[int] = []
    widest = 0  # of the last group
    for width in widths:
        if sizes and (sizes[-1] + 1) * widest <= tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            widest = width
    return sizes


def _sizes_of_even_tokens(widths: Sequence[int], count: int) -> list[int]:
    """Sizes of `count` consecutive groups with the least maximum of tokens; `widths` descend."""
    limits = range(widths[0], widths[0] * len(widths) + 1)
    enough = bisect.bisect_left(
        limits, True, key=lambda tokens: len(sizes_within(widths, tokens)) <= count
    )
    sizes = sizes_within(widths, limits[enough])
    while len(sizes) < count:  # fewer do it too: halve the largest
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        largest = max(
            (number for number, size in enumerate(sizes) if size > 1),
            key=lambda number: sizes[number] * widths[starts[number]],
        )
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    return sizes


# -------------------------------------------------------------------- the micro-batches of a rank

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
    """The micro-batches of this rank's samples, of which `tokens` int64 `[B, S]` has the shape;
    all ranks call it, those of a model-parallel group with equal arguments. `training`: no sample
    may be in two micro-batches. Other arguments as of `megatron_steps.forward_backward`.
    `UserError`: in training, the samples do not make whole micro-batches, or virtual pipelining
    needs another number of them.
    """
    config = get_model_config(model_chunks[0])
    rows, columns = tokens.shape
    group = micro_batch_group(model_chunks)
    by_tokens = None if keep_order else micro_batch_tokens
    if training and by_tokens is None:
        _check_micro_batches(rows, micro_batch_size, group)
    if lengths is None:
        lengths = torch.full((rows,), columns)
    longest = lengths.reshape(-1, together).amax(1).clamp(max=columns)
    multiple = width_multiple()
    if config.sequence_parallel:  # TP ranks split it too
        context = parallel_state.get_context_parallel_world_size()
        multiple = math.lcm(multiple, context * config.tensor_model_parallel_size)
    widths = [-(-width // multiple) * multiple for width in longest.tolist()]
    if by_tokens is None:
        count = -(-rows // micro_batch_size)
    else:
        count = len(sizes_within(sorted(widths, reverse=True), by_tokens // together))
    count = -(-count // group) * group
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        count = largest(count, parallel_state.get_expert_model_parallel_group())
    if training and count > len(widths):  # then they cannot be as small as they should
        count = len(widths) // group * group
        if not count:
            raise UserError(
                f"{rows} samples per data-parallel rank are too few: with "
                "model.virtual_pipeline_model_parallel_size the number of micro-batches must be a "
                f"multiple of model.pipeline_model_parallel_size={group}. Raise "
                "model.global_batch_size."
            )
    even_tokens = by_tokens is not None
    plan = plan_micro_batches(widths, count, even_tokens=even_tokens, keep_order=keep_order)
    return with_rows_together(plan, together)


def micro_batch_group(model_chunks: Sequence[torch.nn.Module]) -> int:
    """The number of micro-batches must be a multiple of this (above 1 with virtual pipelining)."""
    return parallel_state.get_pipeline_model_parallel_world_size() if len(model_chunks) > 1 else 1


def _check_micro_batches(samples: int, micro_batch_size: int, group: int) -> None:
    size = f"model.micro_batch_size={micro_batch_size}"
    remedy = "change it or model.global_batch_size."
    if samples % micro_batch_size:
        raise UserError(
            f"{samples} samples per data-parallel rank are not divisible by {size}; {remedy}"
        )
    if samples // micro_batch_size % group:
        raise UserError(
            f"{samples} samples per data-parallel rank with {size} make no multiple of "
            f"model.pipeline_model_parallel_size={group} micro-batches, as "
            f"model.virtual_pipeline_model_parallel_size needs it; {remedy}"
        )


FORWARD = "forward"  # without gradient: log-probs, scores, validation
TRAIN = "train"

# Of each phase: samples, their tokens, tokens that were computed, and FLOPs of the former.
_counts = {FORWARD: [0, 0, 0, 0], TRAIN: [0, 0, 0, 0]}


def count_tokens(phase: str, samples: int, real: int, computed: int, flops: int) -> None:
    """Add a pass over `samples`: `real` tokens, all tokens, and FLOPs for the former."""
    for index, number in enumerate((samples, real, computed, flops)):
        _counts[phase][index] += number


def forget_token_counts() -> None:
    """Start at 0: whatever this process computed before does not belong to the next step."""
    for phase in _counts:
        _counts[phase] = [0, 0, 0, 0]


def token_metrics(
    names: Mapping[str, str],
    seconds: Mapping[str, float],
    speeds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Counts since the last call, as metrics, over all data-parallel ranks; all ranks call it with
    the `names` of the phases, and the `seconds` that those took, by name.

    Of each phase that computed something, in the family `tokens/`: `<name>_computed`, tokens, and
    `<name>_real_fraction`, equal on every rank; and, if it has seconds, in `speed/`, after other
    `speeds`, its speed per rank of the job, by this rank's: `<name>_tokens_per_s` (no padding),
    `<name>_samples_per_s`, `<name>_tflops` and, on a known GPU, `<name>_mfu`. On a GPU also the
    largest `memory_peak_gb` since the last call.
    """
    counts = torch.tensor([_counts[phase] for phase in names], dtype=torch.float64)
    forget_token_counts()
    counts = counts.to(get_device())
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    peak = peak_of_this_card()
    tokens, speeds = {}, {**(speeds or {})}
    found = zip(names.values(), counts.tolist(), strict=True)
    for name, (samples, real, computed, flops) in found:
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
    if torch.cuda.is_available():
        memory = {"memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        speeds |= all_reduce_dict(memory, op=torch.distributed.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
    return named("tokens/", tokens) | named("speed/", speeds)


def in_short(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `token_metrics` that a progress bar shows."""
    shown = {
        "speed/generate_tokens_per_s": "generated_tokens_per_s",
        "speed/train_tokens_per_s": "tokens_per_s",
        "speed/train_mfu": "mfu",
    }
    return {shown[name]: speed for name, speed in metrics.items() if name in shown}


# ---------------------------------------------------------------------- floating-point operations

# Dense bf16 TFLOP/s of a card by a part of its name, the more special name first (data sheets).
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(card: str) -> float | None:
    """Dense bf16 TFLOP/s of the card with this name; None: not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in card), None)


def peak_of_this_card() -> float | None:
    return peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def attended_pairs(lengths: Tensor) -> int:
    lengths = lengths.long()
    return int((lengths * (lengths + 1) // 2).sum())


def pass_flops(module: torch.nn.Module, tokens: int, pairs: int, training: bool) -> int:
    """FLOPs of a pass over so many tokens, and pairs of a token and a position that it attends to,
    itself among them, through the model of which `module` is a chunk. Frozen linear layers need no
    gradient of their weights, and the products of adapters do not count.
    """
    (model,) = unwrap_model([module])
    config, outputs = model.config, getattr(model, "outputs_per_token", model.vocab_size)
    hidden, layers, gates = config.hidden_size, config.num_layers, 1 + config.gated_linear_unit
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    attention = hidden * (queries + 2 * keys) + queries * hidden
    dense = hidden * config.ffn_hidden_size * (gates + 1)
    experts = config.num_moe_experts or 0
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
    width += config.moe_shared_expert_intermediate_size or 0
    routed = hidden * (width * (gates + 1) + experts)
    sparse = sum(expert_layers(config)) if experts else 0
    weights = layers * attention + (layers - sparse) * dense + sparse * routed + hidden * outputs
    of_tokens, of_pairs = tokens * 2 * weights, pairs * 4 * layers * queries
    if not training:
        return of_tokens + of_pairs
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return of_tokens * (2 if frozen else 3) + of_pairs * 3


# --------------------------------------------------------------------- losses that balance experts
# Megatron Core adds their gradients by itself and keeps their values, per layer, in a table of the
# process. Both are statistics of the tokens of a micro-batch, padding included.


def has_balance_losses(config: TransformerConfig) -> bool:
    """Whether training adds such losses; they depend on which tokens share a micro-batch."""
    return bool(config.num_moe_experts and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff))


def take_balance_losses(config: TransformerConfig, num_microbatches: int) -> dict[str, float]:
    """Read and clear the balance losses, without their coefficients, of the last forward-backward
    pass, which had `num_microbatches` on this rank; all ranks call it.

    Returns means over layers with experts, micro-batches and data-parallel ranks, equal on every
    rank: `moe_load_balancing_loss` (1 where every expert gets equally many tokens with equal
    probability) and `moe_z_loss` (mean squared log-sum-exp of the router's logits), each only if
    its coefficient is set.
    """
    if not has_balance_losses(config):
        return {}
    # Of a split sequence a rank has a part of the first loss, and its own mean for the second.
    shares = config.tensor_model_parallel_size * config.context_parallel_size
    wanted = {"load_balancing_loss": 1} if config.moe_aux_loss_coeff else {}
    wanted |= {"z_loss": shares} if config.moe_z_loss_coeff else {}
    table = take_balance_table()
    # A pipeline stage may have no layer with experts.
    zero = torch.zeros(1, device=get_device())
    sums = all_reduce(torch.stack([table.get(name, zero).double().sum() for name in wanted]))
    count = sum(expert_layers(config)) * num_microbatches
    count *= parallel_state.get_data_parallel_world_size()
    return {
        f"moe_{name}": float(value) / (count * wanted[name])
        for name, value in zip(wanted, sums, strict=True)
    }


def expert_layers(config: TransformerConfig) -> list[bool]:
    """Of each layer of a whole model with experts, whether it has some."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, list):
        return [bool(one) for one in pattern]
    return [layer % pattern == 0 for layer in range(config.num_layers)]
