# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron Core's distributed optimizer around PyTorch's Adam, which it takes where neither
Transformer Engine nor apex is installed: on a CPU, and on a GPU that has only PyTorch.

Counterparts of the functions that `megatron_adaptation.REPLACED_FOR_NATIVE_ADAM` lists.
"""

import functools
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def is_used() -> bool:
    return megatron.core.optimizer.Adam is torch.optim.AdamW


def _set_optimizer_states(
    self: DistributedOptimizer, model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for key, tensor in tensors.items():
            destination[key].copy_(tensor)


def replacements() -> dict[tuple[str, str], Any]:
    """The counterpart of each entry of `REPLACED_FOR_NATIVE_ADAM`, by (module, name)."""
    load_state_dict = DistributedOptimizer.load_state_dict

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: DistributedOptimizer, state_dict: dict) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer = "megatron.core.optimizer.distrib_optimizer"
    return {
        (
            optimizer,
            "DistributedOptimizer._set_main_param_and_optimizer_states",
        ): _set_optimizer_states,
        (optimizer, "DistributedOptimizer.load_state_dict"): load_with_own_steps,
    }
