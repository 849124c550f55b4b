# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens the passes of this process computed, how many were no padding, and how fast;
and the losses that balance the experts of a mixture of experts, as metrics.

`megatron_steps.py` counts, trainers read the counts once per step and log them.

FLOPs are those of the matrix products of a whole model for tokens that are no padding, as in
appendix B of PaLM (Chowdhery et al., 2022), but with attention to earlier positions alone. What is
computed twice (recomputation) or for nothing (padding) does not count: the share of the peak is
the model FLOP utilisation (MFU). With an attention window it is a little too high.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce, all_reduce_dict
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import take_balance_table
from nemo_aligner.training.loggers import named

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


def take_token_counts(
    names: Mapping[str, str], seconds: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Counts since the last call, as metrics, over all data-parallel ranks; all ranks call it with
    the `names` of the phases, and the `seconds` that those took, by name.

    Of each phase that computed something: `<name>_computed`, tokens, and `<name>_real_fraction`,
    equal on every rank; and, if it has seconds, its speed per rank of the job, by this rank's:
    `<name>_tokens_per_s` (no padding), `<name>_samples_per_s`, `<name>_tflops` and, on a known
    GPU, `<name>_mfu`.
    """
    counts = torch.tensor([_counts[phase] for phase in names], dtype=torch.float64)
    forget_token_counts()
    counts = counts.to(get_device())
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    peak = peak_of_this_card()
    tokens, speeds = {}, {}
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
    return tokens, speeds


def token_metrics(
    names: Mapping[str, str],
    seconds: Mapping[str, float],
    speeds: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """`take_token_counts` as the families `tokens/` and `speed/`, the latter with other `speeds`
    and on a GPU the largest `memory_peak_gb` since the last call; all ranks call it.
    """
    tokens, counted = take_token_counts(names, seconds)
    speeds = {**speeds, **counted}
    if torch.cuda.is_available():
        peak = {"memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        speeds |= all_reduce_dict(peak, op=torch.distributed.ReduceOp.MAX)
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


def flops_per_token(config: TransformerConfig, outputs: int) -> tuple[int, int]:
    """FLOPs of a forward pass: (of each token, of each pair of a token and a position that it
    attends to, itself among them). `outputs`: numbers that the last layer gives for each token.
    """
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
    return 2 * weights, 4 * layers * queries


def attended_pairs(lengths: Tensor) -> int:
    lengths = lengths.long()
    return int((lengths * (lengths + 1) // 2).sum())


def pass_flops(module: torch.nn.Module, tokens: int, pairs: int, training: bool) -> int:
    """FLOPs of a pass over so many tokens and pairs (see `flops_per_token`) through the model of
    which `module` is a chunk. Frozen linear layers need no gradient of their weights, and the
    products of adapters do not count.
    """
    (model,) = unwrap_model([module])
    outputs = getattr(model, "outputs_per_token", model.vocab_size)
    per_token, per_pair = flops_per_token(model.config, outputs)
    if not training:
        return tokens * per_token + pairs * per_pair
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return tokens * per_token * (2 if frozen else 3) + pairs * per_pair * 3


# --------------------------------------------------------------------- losses that balance experts
# Megatron Core adds their gradients by itself and keeps their values, per layer, in a table of the
# process. Both are statistics of the tokens of a micro-batch, padding included.


def has_balance_losses(config: TransformerConfig) -> bool:
    """Whether training adds such losses; they depend on which tokens share a micro-batch."""
    coefficients = (config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
    return bool(config.num_moe_experts) and any(coefficients)


def forget_balance_losses() -> None:
    """Empty the table before a pass: a failed one, or a direct call of a router, may have filled
    it.
    """
    take_balance_table()


def take_balance_losses(config: TransformerConfig, num_microbatches: int) -> dict[str, float]:
    """Read and clear the balance losses, without their coefficients, of the last forward-backward
    pass, which had `num_microbatches` on this rank; all ranks call it.

    Returns means over layers with experts, micro-batches and data-parallel ranks, equal on every
    rank: `moe_load_balancing_loss` (1 where every expert gets equally many tokens with equal
    probability) and `moe_z_loss` (mean squared log-sum-exp of the router's logits), each only if
    its coefficient is set.
    """
    # Of a split sequence a rank has a part of the first loss, and its own mean for the second.
    wanted = {}
    if config.num_moe_experts and config.moe_aux_loss_coeff:
        wanted["load_balancing_loss"] = 1
    if config.num_moe_experts and config.moe_z_loss_coeff:
        wanted["z_loss"] = config.tensor_model_parallel_size * config.context_parallel_size
    if not wanted:
        return {}
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
