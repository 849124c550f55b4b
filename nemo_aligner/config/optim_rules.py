# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules that `model.optim` can name, as tables, and the rules of their keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass(frozen=True)
class OptimizerKind:
    kind: str = "adam"  # Megatron Core's name, "adam" or "sgd"
    distributed: bool = False  # its states are spread over the data-parallel ranks
    decoupled_weight_decay: bool = True  # it acts on the weight (AdamW), not on the gradient


OPTIMIZERS = {
    "distributed_fused_adam": OptimizerKind(distributed=True),
    "mcore_distributed_optim": OptimizerKind(distributed=True),
    "adamw": OptimizerKind(),
    "fused_adam": OptimizerKind(),
    "megatron_fused_adam": OptimizerKind(),
    "adam": OptimizerKind(decoupled_weight_decay=False),
    "sgd": OptimizerKind(kind="sgd", decoupled_weight_decay=False),
}
DISTRIBUTED_OPTIMIZERS = tuple(name for name, kind in OPTIMIZERS.items() if kind.distributed)
# Names of NeMo that are refused, and why.
OTHER_OPTIMIZERS = dict.fromkeys(
    "adadelta adafactor adagrad adamax adan lamb novograd rmsprop rprop".split(),
    "Megatron Core has Adam and SGD only",
)

_WARMUP = ("warmup_steps", "warmup_ratio")
_HOLD = (*_WARMUP, "hold_steps", "hold_ratio", "min_lr")


@dataclass(frozen=True)
class ScheduleKind:
    keys: tuple[str, ...]  # of `model.optim.sched` that it reads
    required: tuple[str, ...] = ()  # those of them that must be given and not 0


# Built by Megatron Core; the others are classes of NeMo's registry.
CONSTANT_SCHEDULES = ("constant", "WarmupPolicy", "WarmupHoldPolicy")
OWN_SCHEDULES = ("CosineAnnealing", *CONSTANT_SCHEDULES)
SCHEDULES = {
    "constant": ScheduleKind(_WARMUP),
    "CosineAnnealing": ScheduleKind((*_WARMUP, "constant_steps", "constant_ratio", "min_lr")),
    "WarmupPolicy": ScheduleKind(_WARMUP),
    "WarmupHoldPolicy": ScheduleKind((*_WARMUP, "hold_steps", "hold_ratio")),
    "WarmupAnnealing": ScheduleKind((*_WARMUP, "min_lr")),
    "InverseSquareRootAnnealing": ScheduleKind((*_WARMUP, "min_lr")),
    "SquareAnnealing": ScheduleKind((*_WARMUP, "min_lr")),
    "SquareRootAnnealing": ScheduleKind((*_WARMUP, "min_lr")),
    "PolynomialDecayAnnealing": ScheduleKind((*_WARMUP, "min_lr", "power", "cycle")),
    "PolynomialHoldDecayAnnealing": ScheduleKind((*_HOLD, "power", "cycle")),
    "WarmupHoldAnnealLinear": ScheduleKind(_HOLD),
    "WarmupHoldAnnealOneMinusSquareRoot": ScheduleKind(_HOLD),
    "NoamAnnealing": ScheduleKind((*_WARMUP, "min_lr", "d_model"), required=("d_model",)),
    "NoamHoldAnnealing": ScheduleKind((*_HOLD, "decay_rate")),
    "T5InverseSquareRootAnnealing": ScheduleKind(
        ("constant_steps", "min_lr"), required=("constant_steps",)
    ),
    "StepLR": ScheduleKind(("step_size", "gamma"), required=("step_size",)),
}
OTHER_SCHEDULES = {
    "ReduceLROnPlateau": "it follows a validation metric, and a resumed job would not be exact",
    "ExponentialLR": "NeMo counts epochs for it, and a schedule counts updates here",
    "CyclicLR": "it changes the optimizer's momentum too",
}
SCHEDULE_KEYS = tuple(sorted({key for kind in SCHEDULES.values() for key in kind.keys}))
_COUNTS = ("warmup_steps", "hold_steps", "constant_steps", "step_size")
_RATIOS = ("warmup_ratio", "hold_ratio", "constant_ratio")


def check_optim(optim: Mapping[str, Any]) -> None:
    """`ConfigError`: an unknown name, a missing key, a value that cannot work; null: default."""
    v = Values({"model": {"optim": optim}})
    known: tuple[tuple[str, Mapping, Mapping], ...] = (
        ("model.optim.name", OPTIMIZERS, OTHER_OPTIMIZERS),
        ("model.optim.sched.name", SCHEDULES, OTHER_SCHEDULES),
    )
    for key, names, others in known:
        name = v.get(key)
        if name is not None and str(name) not in names:
            reason = f" ({others[str(name)]})" if str(name) in others else ""
            raise ConfigError(
                f"{key}={name!r} is not supported{reason}; use one of {', '.join(names)}."
            )
    v.number("model.optim.momentum", 0, 1)
    if v.has("model.optim.sched.name"):
        _check_schedule(v, SCHEDULES[v.get("model.optim.sched.name")])


def unread_keys(sched: Mapping[str, Any]) -> list[str]:
    """Keys of other schedules that `sched` sets and that its own does not read."""
    read = SCHEDULES[sched["name"]].keys
    return [key for key in SCHEDULE_KEYS if key not in read and sched.get(key)]


def steps_of(sched: Mapping[str, Any], phase: str, max_steps: int) -> int:
    """Updates of a phase, "warmup", "hold" or "constant": of `<phase>_steps`, or the share
    `<phase>_ratio` of `max_steps`, rounded down as in NeMo.
    """
    ratio = sched.get(f"{phase}_ratio")
    return int(ratio * max_steps) if ratio else int(sched.get(f"{phase}_steps") or 0)


def _check_schedule(v: Values, kind: ScheduleKind) -> None:
    prefix = "model.optim.sched."
    sched = v.get(prefix[:-1])
    for key in kind.required:
        if not sched.get(key):
            raise v.error(prefix + key, f"must be above 0; {sched['name']} needs it.")
    for key in kind.keys:
        steps = key.replace("_ratio", "_steps")
        if key in _COUNTS:
            v.whole(prefix + key, 0)
        elif key != "cycle":
            v.number(prefix + key, 0, 1 if key in _RATIOS else math.inf)
        if key in _RATIOS and sched.get(key) and sched.get(steps):
            raise v.error(
                prefix + key,
                f"and {prefix}{steps}={sched[steps]} say the same thing twice; set one to null.",
            )
    if "min_lr" in kind.keys:
        v.at_most(prefix + "min_lr", "model.optim.lr")
