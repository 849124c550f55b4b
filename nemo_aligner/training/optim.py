# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer and learning-rate schedule from NeMo's `model.optim` keys, built from Megatron Core's
own parts.

The schedule counts optimizer updates. CosineAnnealing is: linear warm-up over `warmup_steps`
updates, cosine from `lr` to `min_lr` until `max_steps - constant_steps`, then `min_lr` (in a job
too short for that, without the constant phase). The first update already has a rate above zero
(`lr / (warmup + 1)`); NeMo's has exactly zero, which wastes the first rollout.
"""

import warnings

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel import parallel_state

# Megatron Core asks every parameter for its gradient, copies included, in each step.
warnings.filterwarnings(
    "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf Tensor"
)

DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
OPTIMIZERS = (*DISTRIBUTED_OPTIMIZERS, "adamw", "fused_adam", "megatron_fused_adam")
EXPERTS = ".mlp.experts."  # in the names of the experts' weights
CONSTANT_SCHEDULES = ("constant", "WarmupHoldPolicy")
SCHEDULES = ("CosineAnnealing", *CONSTANT_SCHEDULES)


def wrap_with_ddp(model_chunks: list, optim_cfg) -> list:
    """Wrap every chunk in Megatron's DistributedDataParallel and register its gradient hooks; all
    ranks call it.
    """
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if EXPERTS in name:
                # Megatron Core gives experts an optimizer of their own where they are spread over
                # ranks. With one everywhere, a checkpoint has the same form at every
                # expert_model_parallel_size.
                parameter.allreduce = False
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    overlap = bool(optim_cfg.get("overlap_grad_sync", False)) and several
    bucket_mb = optim_cfg.get("bucket_cap_mb", None)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=optim_cfg.name in DISTRIBUTED_OPTIMIZERS,
        # Megatron's check leaves the other ranks in the reduction; ours (training/finite.py)
        # raises on all of them.
        check_for_nan_in_grad=False,
        bucket_size=int(bucket_mb * 2**20 / 4) if bucket_mb else None,
    )
    wrapped = []
    for index, chunk in enumerate(model_chunks):
        config = chunk.config
        # Without overlap a bucket is all weights of one dtype anyway, and each must be
        # communicated by itself: gloo mixes up the bytes of buckets of two dtypes (a bf16 model
        # with an fp32 head) when they are sent as one.
        wrapped.append(
            DistributedDataParallel(
                config, ddp_config, chunk, disable_bucketing=overlap and index > 0
            )
        )
    config = wrapped[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = (
            [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        )
    return wrapped


def chained_optimizers(optimizer) -> list:
    """The optimizers of one job: experts have one of their own."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _start_native_adam(optimizer) -> None:
    """Give every parameter its (zero) Adam state now, where Adam is PyTorch's own.

    Megatron's distributed optimizer reads the state's layout when it loads a checkpoint, before
    any step has made it.
    """
    for part in chained_optimizers(optimizer):
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _parameter_groups(model_chunks: list, config: OptimizerConfig) -> dict:
    """Megatron's own groups (no weight decay on biases and norms), and groups apart for weights of
    another dtype.

    In a group of two dtypes the distributed optimizer saves and loads the states of one weight as
    those of another. The learning rate that makes the groups differ is the common one.
    """
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            parameter.has_own_dtype = parameter.dtype is not config.params_dtype
    return {
        **get_standard_config_overrides(config),
        ParamKey(attr="has_own_dtype"): {"max_lr": config.lr},
    }


def build_optimizer(model_chunks: list, optim_cfg, dtype: torch.dtype):
    """Megatron's optimizer over DDP-wrapped chunks; all ranks call it.

    Raises:
        ConfigError: unknown optimizer name.
    """
    if optim_cfg.name not in OPTIMIZERS:
        raise ConfigError(
            f"model.optim.name={optim_cfg.name!r} is not supported; use one of "
            f"{', '.join(OPTIMIZERS)}."
        )
    betas = optim_cfg.get("betas", (0.9, 0.98))
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim_cfg.lr,
        min_lr=(optim_cfg.get("sched") or {}).get("min_lr", None) or 0.0,
        weight_decay=optim_cfg.get("weight_decay", 0.0),
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=optim_cfg.get("eps", 1e-8),
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=optim_cfg.name in DISTRIBUTED_OPTIMIZERS,
        clip_grad=0.0,  # set per step from the trainer's gradient_clip_val
    )
    optimizer = get_megatron_optimizer(
        config, model_chunks, config_overrides=_parameter_groups(model_chunks, config)
    )
    _start_native_adam(optimizer)
    return optimizer


def build_scheduler(optimizer, optim_cfg, max_steps: int) -> OptimizerParamScheduler:
    """Learning-rate schedule over `max_steps` optimizer updates (see the module docstring).

    Raises:
        ConfigError: unknown schedule, or `min_lr` above `lr`.
    """
    lr, sched = optim_cfg.lr, optim_cfg.get("sched") or {}
    name = sched.get("name", "constant")
    if name not in SCHEDULES:
        raise ConfigError(
            f"model.optim.sched.name={name!r} is not supported; use one of {', '.join(SCHEDULES)}."
        )
    warmup = sched.get("warmup_steps", 0) or 0
    constant = name in CONSTANT_SCHEDULES
    min_lr = lr if constant else (sched.get("min_lr", 0.0) or 0.0)
    if min_lr > lr:
        raise ConfigError(
            f"model.optim.sched.min_lr={min_lr} is above model.optim.lr={lr}; lower min_lr."
        )
    constant_steps = sched.get("constant_steps", 0) or 0
    if not constant and constant_steps and warmup + constant_steps >= max_steps:
        # Otherwise the rate would fall from its peak to min_lr right after the warm-up.
        logging.warning(
            f"model.optim.sched: warmup_steps={warmup} + constant_steps={constant_steps} leave "
            "nothing of the job's "
            f"{max_steps} optimizer updates to anneal over; the constant phase is left out."
        )
        constant_steps = 0
    decay_end = max(max_steps - constant_steps, warmup + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr / (warmup + 1),
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_end,
        lr_decay_style="constant" if constant else "cosine",
        start_wd=optim_cfg.get("weight_decay", 0.0),
        end_wd=optim_cfg.get("weight_decay", 0.0),
        wd_incr_steps=0,
        wd_incr_style="constant",
        # What is running wins over what was saved when a user changes the rate and resumes.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
