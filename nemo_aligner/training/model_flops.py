# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations that a model needs for some tokens, and what a GPU can do at most.

Counted are the matrix products of a whole model for tokens that are no padding, as in appendix B
of PaLM (Chowdhery et al., 2022), but with attention to the positions before a token alone. What is
computed twice (recomputation) or for nothing (padding) does not count, so the share of the peak is
the model FLOP utilisation (MFU). With an attention window it is a little too high.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_aligner.training.expert_losses import expert_layers

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
    """`peak_tflops` of this process's GPU; None without one."""
    return peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def flops_per_token(config: TransformerConfig, outputs: int) -> tuple[int, int]:
    """FLOPs of a forward pass: (of each token, of each pair of a token and a position that it
    attends to, itself among them).

    Args:
        outputs: numbers that the last layer gives for each token, rows of the vocabulary.
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
    """Pairs of a token and a position up to its own, of samples of `lengths` tokens."""
    lengths = lengths.long()
    return int((lengths * (lengths + 1) // 2).sum())


def pass_flops(module: torch.nn.Module, tokens: int, pairs: int, training: bool) -> int:
    """FLOPs of a pass over so many tokens and pairs (see `flops_per_token`).

    Backward takes twice those of forward. Frozen linear layers need no gradient of their weights,
    and the products of adapters do not count.

    Args:
        module: a chunk of the model; its configuration speaks of the whole model.
    """
    (model,) = unwrap_model([module])
    outputs = getattr(model, "outputs_per_token", model.vocab_size)
    per_token, per_pair = flops_per_token(model.config, outputs)
    if not training:
        return tokens * per_token + pairs * per_pair
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return tokens * per_token * (2 if frozen else 3) + pairs * per_pair * 3
