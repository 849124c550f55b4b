# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer and learning-rate schedule from NeMo's `model.optim` keys, with Megatron Core's parts;
and one update by them.

The schedule counts optimizer updates. CosineAnnealing is: linear warm-up over `warmup_steps`
updates, cosine from `lr` to `min_lr` until `max_steps - constant_steps`, then `min_lr` (in a job
too short for that, without the constant phase). The first update already has a rate above zero
(`lr / (warmup + 1)`), unlike in NeMo with `constant_steps`. Other annealing schedules are classes
of NeMo's registry (`NemoSchedule`). Names and rules are in `config/optim_rules.py`.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

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
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.config import optim_rules
from nemo_aligner.config.inert_keys import to_plain
from nemo_aligner.config.megatron_fields import OPTIM_REFUSED, core_errors, passed_fields
from nemo_aligner.core.errors import ConfigError, NonFiniteError
from nemo_aligner.core.types import Optimizer, Scheduler
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device

# Megatron Core asks every parameter for its gradient, copies included, in each step.
warnings.filterwarnings(
    "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf Tensor"
)

EXPERTS = ".mlp.experts."  # in the names of the experts' weights
# Rates of NeMo's schedules that are computed, and so checked, when a schedule is built.
CHECKED_RATES = 20_000


def wrap_with_ddp(
    model_chunks: Sequence[Any], optim_cfg: DictConfig
) -> list[DistributedDataParallel]:
    """Wrap every chunk in Megatron's DistributedDataParallel, with hooks; all ranks call it.
    `ConfigError`: an unknown name or unusable value (`check_optim`).
    """
    optim_rules.check_optim(optim_cfg)
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if EXPERTS in name:
                # Megatron Core gives experts an optimizer of their own only if they are spread.
                # With one everywhere, checkpoints have one form at all expert_model_parallel_size.
                parameter.allreduce = False
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    overlap = bool(optim_cfg.overlap_grad_sync) and several
    bucket_mb = optim_cfg.bucket_cap_mb
    ddp_config = _with_given_fields(
        DistributedDataParallelConfig,
        optim_cfg,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=optim_rules.OPTIMIZERS[optim_cfg.name].distributed,
        # Megatron's check raises on one rank alone; training/megatron_steps.py on all of them.
        check_for_nan_in_grad=False,
        bucket_size=int(bucket_mb * 2**20 / 4) if bucket_mb else None,
    )
    # Without overlap a bucket is all weights of one dtype anyway. Each is communicated by itself:
    # gloo mixes up the bytes of buckets of two dtypes (a bf16 model with an fp32 head).
    wrapped = [
        DistributedDataParallel(
            chunk.config, ddp_config, chunk, disable_bucketing=overlap and n > 0
        )
        for n, chunk in enumerate(model_chunks)
    ]
    config = wrapped[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        each = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = each if len(each) > 1 else each[0]
    return wrapped


def _with_given_fields(config_class: type, optim_cfg: DictConfig, **settings: Any) -> Any:
    """Megatron Core's configuration of `settings` and its own fields among
    `model.optim.mcore_customization_config`; `ConfigError`: one cannot be given.
    """
    section = to_plain(optim_cfg.get("mcore_customization_config")) or {}
    classes = (DistributedDataParallelConfig, OptimizerConfig)
    names = {each: {field.name for field in dataclasses.fields(each)} for each in classes}
    given = {
        f"model.optim.mcore_customization_config.{name}": value
        for name, value in section.items()
        if name in names[config_class] or not any(name in known for known in names.values())
    }
    own_keys = {f"model.optim.{name}" for name in optim_cfg}
    built = config_class(**settings)
    passed = passed_fields(given, built, settings, own_keys, OPTIM_REFUSED)
    with core_errors(passed):
        return config_class(**settings, **passed)


def chained_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of one model: experts have their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_sgd(optimizer: MegatronOptimizer) -> bool:
    """Whether one of the `chained_optimizers` is SGD."""
    return str(optimizer.config.optimizer) == "sgd"


def is_pytorch_adam(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether it is PyTorch's own Adam: `AdamW` is a kind of `Adam` from 2.7 on only."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _start_states(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its (zero) state of Adam or SGD with momentum now, for a checkpoint
    before the first step. Megatron Core makes none for SGD, and no step count of PyTorch's Adam,
    which updates a weight in one pass on a CPU, also after a load.
    """
    fused = get_device().type == "cpu"

    def set_fused(inner: torch.optim.Optimizer) -> None:
        for group in inner.param_groups:
            group["fused"] = fused

    for part in chained_optimizers(optimizer):
        inner = part.optimizer
        if is_sgd(part):
            part.init_state_fn = _start_momentum
        if inner is None:
            continue
        if not is_pytorch_adam(inner):  # SGD, or Transformer Engine's or apex's Adam
            part.init_state_fn(inner, part.config)
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        set_fused(inner)
        inner.register_load_state_dict_post_hook(set_fused)


def _start_momentum(inner: torch.optim.Optimizer, _config: OptimizerConfig) -> None:
    """Give SGD with momentum the buffer 0, which changes nothing of its first step."""
    for group in inner.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def build_optimizer(
    model_chunks: Sequence[DistributedDataParallel], optim_cfg: DictConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Of chunks of `wrap_with_ddp`, with weights of `dtype`; all ranks call it; its errors."""
    optim_rules.check_optim(optim_cfg)
    kind = optim_rules.OPTIMIZERS[optim_cfg.name]
    config = _with_given_fields(
        OptimizerConfig,
        optim_cfg,
        optimizer=kind.kind,
        lr=optim_cfg.lr,
        min_lr=optim_cfg.sched.min_lr,
        weight_decay=optim_cfg.weight_decay,
        adam_beta1=optim_cfg.betas[0],
        adam_beta2=optim_cfg.betas[1],
        adam_eps=optim_cfg.eps,
        decoupled_weight_decay=kind.decoupled_weight_decay,
        sgd_momentum=optim_cfg.momentum,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=kind.distributed,
        clip_grad=0.0,  # set per step from the trainer's gradient_clip_val
    )
    # Megatron's own groups (no weight decay on biases and norms), split by dtype: the distributed
    # optimizer confuses states in a group of two. A rate equal to the common one tells them apart.
    for chunk in model_chunks:
        parameter: Any  # gets an attribute that `ParamKey` reads
        for parameter in chunk.parameters():
            parameter.has_own_dtype = parameter.dtype is not config.params_dtype
    groups = get_standard_config_overrides(config)
    groups[ParamKey(attr="has_own_dtype")] = {"max_lr": config.lr}
    optimizer = get_megatron_optimizer(config, model_chunks, config_overrides=groups)
    _start_states(optimizer)
    return optimizer


class NemoSchedule(OptimizerParamScheduler):
    """Learning rates of a schedule class of NeMo's registry, which counts updates; `options` are
    its keyword arguments, without None. The rate after n updates depends on n alone.
    `ConfigError`: the class refuses its arguments, or gives a rate that is not finite.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        name: str,
        lr: float,
        weight_decay: float,
        options: dict[str, Any],
        max_steps: int,
    ):
        from nemo.core.optim.lr_scheduler import get_scheduler  # here: it takes seconds

        self.name, self.options = name, options
        # NeMo's classes drive an optimizer of PyTorch; this one has nothing to update.
        self._driven = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=lr)
        self._rates: list[float] = []
        try:
            self._schedule = get_scheduler(name, max_steps=max_steps, **options)(self._driven)
        except (ValueError, TypeError, ArithmeticError, AssertionError) as error:
            raise self._refusal(str(error)) from error
        self._rate(min(max_steps, CHECKED_RATES))
        super().__init__(
            optimizer,
            init_lr=lr,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=max(max_steps, 1),
            lr_decay_style="constant",
            **_constant_weight_decay(weight_decay),
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The rate of the next update, for all parameter groups."""
        return self._rate(self.num_steps)

    def _rate(self, updates: int) -> float:
        """Computed in order, once."""
        while len(self._rates) <= updates:
            try:
                if self._rates:
                    self._driven.step()
                    self._schedule.step()
                rate = float(self._driven.param_groups[0]["lr"])
            except (ValueError, TypeError, ArithmeticError) as error:
                raise self._refusal(str(error)) from error
            if not 0 <= rate < math.inf:
                raise self._refusal(f"the rate after {len(self._rates)} updates is {rate}")
            self._rates.append(rate)
        return self._rates[updates]

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"model.optim.sched.name={self.name} cannot work with {self.options}: {reason}. "
            "Change these keys of model.optim.sched."
        )


def _constant_weight_decay(weight_decay: float) -> dict[str, Any]:
    return {
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
        # When a user changes the rate and resumes, the configuration wins over the checkpoint.
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": True,
    }


def build_scheduler(
    optimizer: MegatronOptimizer, optim_cfg: DictConfig, max_steps: int
) -> OptimizerParamScheduler:
    """Over `max_steps` updates (see the module docstring); errors as of `wrap_with_ddp`."""
    optim_rules.check_optim(optim_cfg)
    lr, sched = optim_cfg.lr, optim_cfg.sched
    unread = optim_rules.unread_keys(sched)
    if unread:
        logging.warning(
            f"model.optim.sched.name={sched.name} does not read "
            f"{', '.join(f'model.optim.sched.{key}={sched[key]}' for key in unread)}."
        )
    if sched.name in optim_rules.OWN_SCHEDULES:
        return _own_schedule(optimizer, optim_cfg, max_steps)
    if (optim_cfg.get("mcore_customization_config") or {}).get("decoupled_lr") is not None:
        raise ConfigError(
            "model.optim.mcore_customization_config.decoupled_lr is not read by model.optim.sched."
            f"name={sched.name}, which has one rate; use one of "
            f"{', '.join(optim_rules.OWN_SCHEDULES)}."
        )
    options = {
        # Steps of 0 and a share stand for each other: NeMo refuses two numbers.
        key: sched[key]
        for key in optim_rules.SCHEDULES[sched.name].keys
        if sched.get(key) is not None and not (key.endswith("_steps") and not sched[key])
    }
    return NemoSchedule(optimizer, sched.name, lr, optim_cfg.weight_decay, options, max_steps)


def _own_schedule(
    optimizer: MegatronOptimizer, optim_cfg: DictConfig, max_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then a constant rate or the cosine."""
    lr, sched = optim_cfg.lr, optim_cfg.sched
    warmup = optim_rules.steps_of(sched, "warmup", max_steps)
    constant = sched.name in optim_rules.CONSTANT_SCHEDULES
    constant_steps = optim_rules.steps_of(sched, "constant", max_steps)
    if not constant and constant_steps and warmup + constant_steps >= max_steps:
        # Otherwise the rate would fall from its peak to min_lr right after the warm-up.
        logging.warning(
            f"model.optim.sched: warmup_steps={warmup} + constant_steps={constant_steps} leave "
            f"none of the job's {max_steps} updates for annealing; the constant phase is left out."
        )
        constant_steps = 0
    decay_end = max(max_steps - constant_steps, warmup + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr / (warmup + 1),
        max_lr=lr,
        min_lr=lr if constant else sched.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_end,
        lr_decay_style="constant" if constant else "cosine",
        **_constant_weight_decay(optim_cfg.weight_decay),
    )


# ------------------------------------------------------------------------------------- one update


def clip_gradients(optimizer: Optimizer, clip_val: float | None) -> None:
    """Set the gradient norm to which the next step clips; None or <= 0: it does not."""
    for part in chained_optimizers(optimizer):
        part.config.clip_grad = max(float(clip_val or 0.0), 0.0)


def optimizer_step(
    optimizer: Optimizer, scheduler: Scheduler, clip_val: float | None
) -> float | None:
    """Clip to `clip_val`, update the weights and the learning rate; all ranks call it. Returns the
    norm before clipping, or None when clipping is off. `NonFiniteError`: the norm is NaN or
    infinite, or the optimizer refused the step.
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


def learning_rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def train_on_batch(
    model: Any,
    optimizer: Optimizer,
    scheduler: Scheduler,
    batch: Any,
    clip_val: float | None,
) -> dict[str, Any]:
    """One optimizer update of a `SupervisedInterface` on a global batch, of which each rank has
    its share; all ranks call it. Returns the model's metrics, `loss`, `lr` (that of this update)
    and, with clipping, `grad_norm`. `NonFiniteError`: loss or gradient is NaN or
    infinite; no weight has changed.
    """
    optimizer.zero_grad()
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch=batch, forward_only=False)
    model.finish_training_step()
    report = {**metrics, "loss": float(loss), "lr": learning_rate(optimizer)}
    grad_norm = optimizer_step(optimizer, scheduler, clip_val)
    return report if grad_norm is None else report | {"grad_norm": float(grad_norm)}
