# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: Megatron Core's settings from NeMo's `moe_*` keys, and the experts."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.models.nlp.gpt.layer_patterns import layer_pattern
from nemo_aligner.training.expert_losses import expert_layers


def expert_settings(cfg: DictConfig) -> dict[str, Any]:
    """Fields of `TransformerConfig` for a mixture of experts; none for a dense model.

    No token is ever dropped, and the router computes in float32: a policy and its reference, two
    ranks, training and decoding must choose the same experts.

    Raises:
        ConfigError: a combination that Megatron Core cannot compute, or that gives other results
            at another split.
    """
    if not cfg.num_moe_experts:
        if cfg.expert_model_parallel_size > 1:
            raise ConfigError(
                f"model.expert_model_parallel_size={cfg.expert_model_parallel_size} spreads "
                "experts over ranks, but model.num_moe_experts is not set; set it, or the size "
                "to 1."
            )
        return {}
    _check_experts(cfg)
    _check_shared_experts(cfg)
    _check_router(cfg)
    return dict(
        num_moe_experts=cfg.num_moe_experts,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        moe_router_topk=cfg.moe_router_topk,
        moe_ffn_hidden_size=cfg.moe_ffn_hidden_size,
        moe_layer_freq=_layers_with_experts(cfg),
        moe_shared_expert_intermediate_size=cfg.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=bool(cfg.moe_shared_expert_gate),
        moe_router_pre_softmax=bool(cfg.moe_router_pre_softmax),
        moe_router_load_balancing_type=cfg.moe_router_load_balancing_type,
        moe_aux_loss_coeff=cfg.moe_aux_loss_coeff,
        moe_z_loss_coeff=cfg.moe_z_loss_coeff or None,
        moe_token_dispatcher_type=cfg.moe_token_dispatcher_type,
        moe_router_dtype="fp32",
        moe_grouped_gemm=False,
    )


def _layers_with_experts(cfg: DictConfig) -> int | list[int]:
    """`model.moe_layer_freq`; a list of ones is 1, for checkpoints name mixed layers otherwise."""
    pattern = layer_pattern(cfg, "moe_layer_freq", 1, "experts")
    return 1 if pattern == [1] * cfg.num_layers else pattern


def check_expert_stages(config: TransformerConfig) -> None:
    """Check that every pipeline stage has a layer with experts, if the model has experts.

    The optimizer of a stage without them has another form, in which no checkpoint of another split
    could be loaded.

    Raises:
        ConfigError: a stage has none.
    """
    if not config.num_moe_experts:
        return
    has_experts = expert_layers(config)
    chunks: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size:
        chunks = list(range(config.virtual_pipeline_model_parallel_size))
    for stage in range(config.pipeline_model_parallel_size):
        layers = []
        for chunk in chunks:
            first = get_transformer_layer_offset(config, chunk, stage)
            layers += has_experts[first : first + get_num_layers_to_build(config, chunk, stage)]
        if not any(layers):
            raise ConfigError(
                f"no layer of pipeline stage {stage} has experts with model.moe_layer_freq="
                f"{config.moe_layer_freq}; use fewer than "
                f"model.pipeline_model_parallel_size={config.pipeline_model_parallel_size} "
                "stages, or stages of other sizes (num_layers_in_first_pipeline_stage)."
            )


def _check_shared_experts(cfg: DictConfig) -> None:
    """Raise `ConfigError` for shared experts that cannot be computed."""
    size = cfg.moe_shared_expert_intermediate_size
    if size is not None and cfg.bias:
        raise ConfigError(
            f"model.moe_shared_expert_intermediate_size={size} needs model.bias=False: shared "
            "experts have no bias in Megatron Core."
        )
    if cfg.moe_shared_expert_gate and size is None:
        raise ConfigError(
            "model.moe_shared_expert_gate=True weights the output of shared experts, but "
            "model.moe_shared_expert_intermediate_size is not set; set it, or the gate to False."
        )


def _check_experts(cfg: DictConfig) -> None:
    """Raise `ConfigError` for experts that cannot be computed or split."""
    experts, tp = cfg.num_moe_experts, cfg.tensor_model_parallel_size
    if experts % cfg.expert_model_parallel_size:
        raise ConfigError(
            f"model.num_moe_experts={experts} must be a multiple of "
            f"model.expert_model_parallel_size={cfg.expert_model_parallel_size}."
        )
    if cfg.moe_token_dispatcher_type != "alltoall":
        raise ConfigError(
            f"model.moe_token_dispatcher_type={cfg.moe_token_dispatcher_type!r} is not supported: "
            "only alltoall lets ranks have samples of different number and length, as generation "
            "needs."
        )
    if tp > 1 and not cfg.sequence_parallel:
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.sequence_parallel=True: without it Megatron Core refuses to train."
        )
    if tp > 1 and cfg.bias:
        raise ConfigError(
            f"model.num_moe_experts={experts} with model.tensor_model_parallel_size={tp} needs "
            "model.bias=False: experts that are split over tensor-parallel ranks have no bias."
        )


def _check_router(cfg: DictConfig) -> None:
    """Raise `ConfigError` for a router that cannot choose, learn or be balanced."""
    top_k, balancing = cfg.moe_router_topk, cfg.moe_router_load_balancing_type
    if not 1 <= top_k <= cfg.num_moe_experts:
        raise ConfigError(
            f"model.moe_router_topk={top_k} must be from 1 to "
            f"model.num_moe_experts={cfg.num_moe_experts}."
        )
    if top_k == 1 and not cfg.moe_router_pre_softmax:
        raise ConfigError(
            "model.moe_router_topk=1 needs model.moe_router_pre_softmax=True: the softmax over "
            "one expert is always 1, so the router would never learn."
        )
    if balancing not in ("aux_loss", "none"):
        raise ConfigError(
            f"model.moe_router_load_balancing_type={balancing!r} is not supported; use aux_loss "
            "or none."
        )
    if balancing == "none" and cfg.moe_aux_loss_coeff:
        raise ConfigError(
            f"model.moe_aux_loss_coeff={cfg.moe_aux_loss_coeff} has no effect with "
            "model.moe_router_load_balancing_type=none; set it to 0, or the type to aux_loss."
        )


class Router(TopKRouter):
    """Megatron Core's router, which chooses the best `moe_router_topk` experts of each token, for
    machines without Transformer Engine.

    Megatron Core's `gating` uses a name that it imports only with Transformer Engine.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Float32 logits `[s, b, experts]` of the hidden states `[s, b, h]`."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: there is no expert bias, and Megatron Core's would need a C++ compiler."""


class Experts(SequentialMLP):
    """Megatron Core's sequential experts, with initial weights that do not depend on the split
    over ranks.

    Every rank draws the weights of all experts of its layer and keeps its own. Megatron Core's CPU
    initialization draws only those of the rank, so the first expert of every rank would get the
    same weights.
    """

    local_experts: Any

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,  # since 0.19 the name of the module
    ):
        assert pg_collection is not None, "Megatron Core passes its groups"
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        super().__init__(
            num_local_experts * ranks, config, submodules, pg_collection=pg_collection, **more
        )
        mine: Any = self.local_experts[rank * num_local_experts : (rank + 1) * num_local_experts]
        self.local_experts = torch.nn.ModuleList(mine)
        self.num_local_experts = num_local_experts
        for expert in mine:
            # Tokens reach an expert through the dispatcher, so its layers have nothing to sum over
            # ranks. Megatron Core leaves the sum out only with several ranks; with one, autograd
            # rejects the bias that is added to the sum in place.
            expert.linear_fc2.explicit_expert_comm = True
