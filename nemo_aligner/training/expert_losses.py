# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses that balance the experts of a mixture of experts, as metrics. Megatron Core adds
their gradients by itself and keeps their values, per layer, in a table of the process. Both are
statistics of the tokens of a micro-batch, padding included.
"""

import torch
from megatron.core.transformer import TransformerConfig

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import take_balance_table


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
