# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer update: clip, check, step, advance the learning rate."""

import math
from typing import Any

from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.core.interfaces import Optimizer, Scheduler, Trainable
from nemo_aligner.training.optim import chained_optimizers


def clip_gradients(optimizer: Optimizer, clip_val: float | None) -> None:
    """Set the gradient norm to which the next step clips; None or <= 0: it does not."""
    for part in chained_optimizers(optimizer):
        part.config.clip_grad = float(clip_val or 0.0) if (clip_val or 0.0) > 0 else 0.0


def optimizer_step(
    optimizer: Optimizer, scheduler: Scheduler, clip_val: float | None
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
            "model.optim.lr or check "
            "the data."
        )
    scheduler.step(increment=1)
    return grad_norm if (clip_val or 0.0) > 0 else None


def learning_rate(optimizer: Optimizer) -> float:
    """Current learning rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])


def train_on_batch(
    model: Trainable,
    optimizer: Optimizer,
    scheduler: Scheduler,
    batch: Any,
    clip_val: float | None,
) -> dict[str, Any]:
    """One optimizer update on a global batch, of which each rank has its share; all ranks call it.

    Returns:
        The model's metrics, `loss`, `lr` (that of this update) and, with clipping, `grad_norm`.

    Raises:
        NonFiniteError: loss or gradient is NaN or infinite; no weight has changed.
    """
    optimizer.zero_grad()
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch=batch, forward_only=False)
    model.finish_training_step()
    report = {**metrics, "loss": float(loss), "lr": learning_rate(optimizer)}
    grad_norm = optimizer_step(optimizer, scheduler, clip_val)
    return report if grad_norm is None else report | {"grad_norm": float(grad_norm)}
