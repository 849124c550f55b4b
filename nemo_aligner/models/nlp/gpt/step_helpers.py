# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What models of one's own call around a pass, by NeMo-Aligner's functions.

They do what the base class does, whatever the model overrides: a method of a subclass may call the
function of its own name.
"""

from typing import Any

from nemo_aligner.core.interfaces import Optimizer
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training import update


def prepare_for_training_step(ptl_model: MegatronGPTModel, zero_grad: bool = True) -> None:
    """Enter training mode and empty the gradient buffers (which `zero_grad=False` does not
    prevent: Megatron's schedule adds to what is there).
    """
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
    """Set the norm of gradients to which the next step clips, of a model or its optimizer; None or
    <= 0 switches clipping off.
    """
    optimizer: Any = ptl_model
    if isinstance(ptl_model, MegatronGPTModel):
        optimizer = ptl_model._optimizer
    update.clip_gradients(optimizer, clip_val)
