# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer update: clip, check, step, advance the learning rate."""

import math

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.training.optim import chained_optimizers


def clip_gradients(optimizer: MegatronOptimizer, clip_val: float | None) -> None:
    """Set the norm to which `optimizer.step()` clips gradients; None or <= 0: no clipping."""
    for part in chained_optimizers(optimizer):
        part.config.clip_grad = float(clip_val or 0.0) if (clip_val or 0.0) > 0 else 0.0


def optimizer_step(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, clip_val: float | None
) -> float | None:
    """Clip to `clip_val`, update the weights and the learning rate; all ranks call it.

    Returns:
        The gradient norm before clipping, or None when clipping is off.

    Raises:
        NonFiniteError: the gradient norm is NaN or infinite, or the optimizer refused the step.
    """
    clip_gradients(optimizer, clip_val)
    succeeded, grad_norm, _num_zeros = optimizer.step()
    if not succeeded or (grad_norm is not None and not math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"the gradient norm is {grad_norm}: the update would destroy the weights. Lower "
            "model.optim.lr or check the data."
        )
    scheduler.step(increment=1)
    return grad_norm if (clip_val or 0.0) > 0 else None


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Current learning rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])
