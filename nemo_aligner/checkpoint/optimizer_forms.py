# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that another kind of optimizer can load. Megatron Core has three forms, and
loads each only into the kind of optimizer that saved it:

* fp32 weights: `{"state", "param_groups"}`;
* bf16 weights: `{"optimizer": {"state", "param_groups"}, MAIN_WEIGHTS}`;
* the distributed optimizer: `{"optimizer": {"param_groups"}, "param_state", ...}`.

With experts there are two optimizers, whose states are under 0 and 1.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.megatron_switches import (
    all_weights_named,
    groups_in_order,
    places_without_padding,
)
from nemo_aligner.training.optim import chained_optimizers, is_pytorch_adam, is_sgd

State = dict[Any, Any]

# Megatron Core's key of a bf16 model's fp32 weights.
MAIN_WEIGHTS = "fp32_from_fp16_params"
# The form of the distributed optimizer that loads at another split.
FULLY_RESHARDABLE = "fully_reshardable"
# Prefixes of fp32 weights: the distributed optimizer's, a bf16 model's without it, fp32 weights'.
_MAIN_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, weights: State, is_loading: bool, metadata: dict[str, Any]
) -> State:
    """Megatron Core's sharded state, right for weights of two dtypes and several buckets."""
    parts = chained_optimizers(optimizer)
    with all_weights_named(parts), places_without_padding(parts):
        state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    for part in _parts(state):
        if MAIN_WEIGHTS in part:  # Megatron Core cannot reassemble lists with empty lists in them
            part[MAIN_WEIGHTS] = [group for group in part[MAIN_WEIGHTS] if group]
    return state


def read_main_weights(state: State, stored: set[str]) -> None:
    """Let `state`, to be loaded, read the fp32 weights by their stored names."""
    for tensor in nested_values(state):
        prefix = next(
            (p for p in _MAIN_PREFIXES[:2] if str(getattr(tensor, "key", "")).startswith(p)), None
        )
        if prefix is not None:
            names = [
                other + tensor.key.removeprefix(prefix) for other in (prefix, *_MAIN_PREFIXES)
            ]
            tensor.key = next((name for name in names if name in stored), tensor.key)


def check_same_kind(state: State, stored: set[str]) -> None:
    """`UserError` unless the tensors `stored` are those that `state` asks for."""
    wanted = {str(getattr(tensor, "key", "")) for tensor in nested_values(state)}
    for name, kind in (("exp_avg", "Adam"), ("momentum_buffer", "SGD with momentum")):
        prefix = f"optimizer.state.{name}."
        if any(key.startswith(prefix) for key in wanted) and not any(
            key.startswith(prefix) for key in stored
        ):
            raise UserError(
                f"model.optim asks for {kind}, but the checkpoint was saved with another kind of "
                "optimizer. Resume with its model.optim.name (and momentum), or start anew from "
                "its weights."
            )


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: State) -> None:
    """Load any optimizer's state; settings of the job, such as its learning rate, win."""
    keys = ("max_lr", "min_lr", "betas", "eps")  # those that do not come from the schedule
    groups = optimizer.param_groups
    settings = [{key: group[key] for key in keys if key in group} for group in groups]
    own = chained_optimizers(optimizer)
    parts = [_in_form_of(part, state) for part, state in zip(own, _parts(loaded), strict=True)]
    state = dict(enumerate(parts)) if len(parts) > 1 else parts[0]
    with groups_in_order(own):
        optimizer.load_state_dict(state)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def _parts(state: State) -> list[State]:
    if state and all(isinstance(key, int) for key in state):
        return [state[key] for key in sorted(state)]
    return [state]


def _in_form_of(optimizer: MegatronOptimizer, loaded: State) -> State:
    """The state `loaded` in the form of `optimizer`, with the settings of `optimizer`.

    Of the stored settings the step count alone is taken, which the distributed optimizer and the
    Adam of Transformer Engine or apex keep there, PyTorch's Adam with the parameters. Megatron
    Core 0.19 refuses groups of another learning rate; without the distributed optimizer they list
    the parameters of the first pipeline stage only.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return loaded
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    state, step = _state_and_step(loaded)
    own = optimizer.state_dict()
    groups = (own if "param_groups" in own else own["optimizer"])["param_groups"]
    is_pytorch = is_pytorch_adam(optimizer.optimizer)
    state = {key: value for key, value in state.items() if key != "common_step"}
    if not is_sgd(optimizer) and (is_distributed or not is_pytorch):
        groups = [{**group, "step": float(step) if is_pytorch else int(step)} for group in groups]
    if is_distributed:
        return {
            "optimizer": {"param_groups": groups},
            "param_state": loaded["param_state"],
            "param_state_sharding_type": FULLY_RESHARDABLE,
        }
    if is_pytorch:
        # Megatron Core needs it, but does not write it before a step.
        state["common_step"] = torch.tensor(float(step))
    plain = {"state": state, "param_groups": groups}
    if "param_groups" in own:
        return plain
    main = iter(loaded[MAIN_WEIGHTS])
    return {
        "optimizer": plain,
        MAIN_WEIGHTS: [next(main) if group else [] for group in own[MAIN_WEIGHTS]],
    }


def _state_and_step(loaded: State) -> tuple[State, float]:
    """Adam's states in any form, and the number of steps; 0 if not stored."""
    nested = loaded.get("optimizer", {})
    state = loaded.get("state", nested.get("state", {}))
    if "common_step" in state:
        return state, state["common_step"]
    groups = [*loaded.get("param_groups", []), *nested.get("param_groups", [])]
    return state, next((group["step"] for group in groups if group.get("step")), 0)
