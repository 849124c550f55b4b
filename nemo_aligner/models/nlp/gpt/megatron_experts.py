# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the settings of Megatron Core that come from NeMo's `moe_*` keys, and the
experts themselves.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter

from nemo_aligner.core.errors import ConfigError


def expert_settings(cfg) -> dict:
    """Fields of `TransformerConfig` for a mixture of experts; none for a dense model.

    No token is ever dropped, and the router computes in float32: a policy and its reference, a
    rank and its neighbour, training and decoding must choose the same experts.

    Raises:
        ConfigError: a combination that Megatron Core cannot compute, or not the same at every
            split.
    """
    experts = cfg.get("num_moe_experts", None)
    expert_parallel = cfg.get("expert_model_parallel_size", 1) or 1
    if not experts:
        if expert_parallel > 1:
            raise ConfigError(
                f"model.expert_model_parallel_size={expert_parallel} spreads experts over ranks, "
                "but "
                "model.num_moe_experts is not set; set it, or the size to 1."
            )
        return {}
    top_k = cfg.get("moe_router_topk", 2)
    pre_softmax = bool(cfg.get("moe_router_pre_softmax", False))
    balancing = cfg.get("moe_router_load_balancing_type", "aux_loss")
    dispatcher = cfg.get("moe_token_dispatcher_type", "alltoall")
    tp = cfg.get("tensor_model_parallel_size", 1) or 1
    if experts % expert_parallel:
        raise ConfigError(
            f"model.num_moe_experts={experts} must be a multiple of "
            "model.expert_model_parallel_size="
            f"{expert_parallel}."
        )
    if not 1 <= top_k <= experts:
        raise ConfigError(
            f"model.moe_router_topk={top_k} must be from 1 to model.num_moe_experts={experts}."
        )
    if top_k == 1 and not pre_softmax:
        raise ConfigError(
            "model.moe_router_topk=1 needs model.moe_router_pre_softmax=True: the softmax over "
            "one expert is always "
            "1, so that the router would never learn."
        )
    if balancing not in ("aux_loss", "none"):
        raise ConfigError(
            f"model.moe_router_load_balancing_type={balancing!r} is not supported; use aux_loss "
            "or none."
        )
    if dispatcher != "alltoall":
        raise ConfigError(
            f"model.moe_token_dispatcher_type={dispatcher!r} is not supported: only alltoall lets "
            "every rank have "
            "rows of another number and length, as generation needs."
        )
    if cfg.get("moe_grouped_gemm", False):
        raise ConfigError("model.moe_grouped_gemm=True is not supported; set it to False.")
    if tp > 1 and not cfg.get("sequence_parallel", False):
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.sequence_parallel=True: without it Megatron Core refuses to train."
        )
    if tp > 1 and cfg.get("bias", True):
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.bias=False: "
            "experts that are split over tensor-parallel ranks have no bias."
        )
    aux_loss_coeff = cfg.get("moe_aux_loss_coeff", 0.0) or 0.0
    if balancing == "none" and aux_loss_coeff:
        raise ConfigError(
            f"model.moe_aux_loss_coeff={aux_loss_coeff} has no effect with "
            "model.moe_router_load_balancing_type=none; "
            "set it to 0, or the type to aux_loss."
        )
    return dict(
        num_moe_experts=experts,
        expert_model_parallel_size=expert_parallel,
        moe_router_topk=top_k,
        moe_ffn_hidden_size=cfg.get("moe_ffn_hidden_size", None)
        or cfg.get("ffn_hidden_size", None)
        or 4 * cfg.hidden_size,
        moe_router_pre_softmax=pre_softmax,
        moe_router_load_balancing_type=balancing,
        moe_aux_loss_coeff=aux_loss_coeff,
        moe_z_loss_coeff=cfg.get("moe_z_loss_coeff", None) or None,
        moe_token_dispatcher_type=dispatcher,
        moe_router_dtype="fp32",
        moe_grouped_gemm=False,
    )


class Router(TopKRouter):
    """Megatron Core's choice of the best `moe_router_topk` experts of each token, for machines
    without Transformer Engine.

    Megatron Core's `gating` asks for a name that it imports with Transformer Engine only.
    """

    def gating(self, input):
        """Float32 logits `[s, b, experts]` of the hidden states `[s, b, h]`."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        """Nothing: there is no expert bias here, and Megatron Core would compile the question with
        a C++ compiler.
        """


class Experts(SequentialMLP):
    """Megatron Core's experts, one after the other, with initial weights that do not depend on the
    split over ranks.

    Every rank draws the weights of all experts of its layer and keeps its own. Megatron Core's CPU
    initialization draws for those of the rank alone, which gives the first expert of every rank
    the same weights.
    """

    def __init__(self, num_local_experts, config, submodules, pg_collection=None):
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        super().__init__(
            num_local_experts * ranks, config, submodules, pg_collection=pg_collection
        )
        mine = self.local_experts[rank * num_local_experts : (rank + 1) * num_local_experts]
        self.local_experts = torch.nn.ModuleList(mine)
        self.num_local_experts = num_local_experts
        for expert in mine:
            # Tokens reach an expert through the dispatcher, so its layers have nothing to sum over
            # ranks. Megatron Core leaves the sum out with several ranks only; over one, autograd
            # refuses the bias that is added to it in place.
            expert.linear_fc2.explicit_expert_comm = True
