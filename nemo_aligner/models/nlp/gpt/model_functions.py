# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What NeMo-Aligner's functions do with a model: weights in host memory (copies, swaps, names),
and steps of a loop of one's own. Copies of a `MegatronGPTModel` cover every chunk of a pipeline
stage, without the prefix of a precision wrapper: `megatron_amp_O2` makes no difference. Steps do
what the base class does: a method of a subclass may call the function of its own name.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.types import Optimizer
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training import optim


def retrieve_model_state_dict_in_cpu(model: Any, megatron_amp_O2: bool = True) -> dict[str, Any]:
    """A copy of the model's weights in host memory; arguments as of `copy_model_states_to_cpu`."""
    return copy_model_states_to_cpu(model, None, megatron_amp_O2)


@torch.no_grad()
def copy_model_states_to_cpu(
    model: Any,
    cpu_dict: dict[str, Any] | None = None,
    megatron_amp_O2: bool = True,
    sync: bool = True,
    alias_non_tensor: bool = False,
) -> dict[str, Any]:
    """Copy the model's weights to host memory, over an earlier copy `cpu_dict` if there is one.

    Args:
        model: `MegatronGPTModel`, which always waits for the copies, or another module.
        megatron_amp_O2: another module's weights get NeMo's names (`convert_to_amp_o2_format`).
        alias_non_tensor: do not copy what is not a tensor.
    """
    if isinstance(model, MegatronGPTModel):
        return model.weights_to_cpu(into=cpu_dict)
    into = {} if cpu_dict is None else cpu_dict
    pin = torch.cuda.is_available()
    for name, item in model.state_dict().items():
        if isinstance(item, Tensor):
            if name not in into:
                into[name] = torch.empty_like(item, device="cpu", pin_memory=pin)
            into[name].copy_(item, non_blocking=True)
        else:
            into[name] = item if alias_non_tensor else copy.deepcopy(item)
    if sync and torch.cuda.is_available():
        torch.cuda.synchronize()
    return convert_to_amp_o2_format(into) if megatron_amp_O2 else into


def swap_dict(
    resident_model: MegatronGPTModel,
    cpu_weights: dict[str, Tensor],
    offload_onto_cpu: bool = True,
    megatron_amp_O2: bool = True,
) -> dict[str, Any]:
    """Put weights from `retrieve_model_state_dict_in_cpu` into the model; returns a copy of those
    that were there, or nothing without `offload_onto_cpu`.
    """
    previous: dict[str, Any] = {}
    if offload_onto_cpu:
        previous = retrieve_model_state_dict_in_cpu(resident_model, megatron_amp_O2)
    resident_model.load_cpu_weights(cpu_weights)
    return previous


@contextmanager
def cpu_weight_swap(
    resident_model: MegatronGPTModel, cpu_weights: dict[str, Tensor], megatron_amp_O2: bool = True
) -> Iterator[None]:
    """Inside, the model computes with `cpu_weights`; afterwards with its own again."""
    with resident_model.swapped_weights(cpu_weights):
        yield


def convert_to_amp_o2_format(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with `model.` in names made `model.module.`, as under NeMo's wrapper."""
    return {
        name if "model.module." in name else name.replace("model.", "model.module.", 1): value
        for name, value in state_dict.items()
    }


@contextmanager
def adapter_control(model: Any) -> Iterator[None]:
    """Inside, the model computes without its adapters; `UserError`: it cannot switch them off."""
    if not getattr(model, "use_peft", False):
        yield  # it has none
        return
    disabled = getattr(model, "adapters_disabled", None)
    if disabled is None:
        raise UserError(f"{type(model).__name__} cannot switch its adapters off.")
    with disabled():
        yield


def prepare_for_training_step(ptl_model: MegatronGPTModel, zero_grad: bool = True) -> None:
    """Enter training mode and empty the gradient buffers, with `zero_grad=False` too."""
    MegatronGPTModel.prepare_for_training_step(ptl_model)


def prepare_for_validation_step(ptl_model: MegatronGPTModel) -> None:
    MegatronGPTModel.prepare_for_validation_step(ptl_model)


def finish_validation_step(ptl_model: MegatronGPTModel) -> None:
    MegatronGPTModel.finish_validation_step(ptl_model)


def set_train(ptl_model: MegatronGPTModel) -> None:
    MegatronGPTModel.set_train(ptl_model)


def set_eval(ptl_model: MegatronGPTModel) -> None:
    MegatronGPTModel.set_eval(ptl_model)


def set_sync_funcs(ptl_model: MegatronGPTModel, forward_only: bool) -> None:
    """Do nothing: `wrap_with_ddp` has set Megatron's functions for overlapped communication."""


def grad_reductions(ptl_model: MegatronGPTModel) -> None:
    """Do nothing: Megatron's schedule reduces the gradients over ranks."""


def clip_gradients(ptl_model: MegatronGPTModel | Optimizer, clip_val: float | None) -> None:
    """Set the norm of gradients to which the next step clips; None or <= 0: no clipping."""
    optimizer: Any = ptl_model
    if isinstance(ptl_model, MegatronGPTModel):
        optimizer = ptl_model._optimizer
    optim.clip_gradients(optimizer, clip_val)
