# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `model.peft`: which layers get LoRA adapters, and of which form (docs/models.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.keys.model import PolicyPeft
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError

PEFT = "model.peft."
TUNING = PEFT + "lora_tuning."
NONE, LORA = "none", "lora"

# NeMo's names of the linear layers that can have an adapter -> their place in a transformer layer.
TARGETS = {
    "attention_qkv": "self_attention.linear_qkv",
    "attention_dense": "self_attention.linear_proj",
    "mlp_fc1": "mlp.linear_fc1",
    "mlp_fc2": "mlp.linear_fc2",
}
# Those that are split along their rows (Megatron's column-parallel ones).
SPLIT_BY_ROWS = ("attention_qkv", "mlp_fc1")
TARGET_GROUPS = {
    "attention": ("attention_qkv", "attention_dense"),
    "mlp": ("mlp_fc1", "mlp_fc2"),
    "all": tuple(TARGETS),
}
KEYS = {
    "targets": "target_modules",
    "dim": "adapter_dim",
    "dropout": "adapter_dropout",
    "layers": "layer_selection",
}
# Weights of adapters do not depend on them: a job that goes on may change them.
FREE_KEYS = ("adapter_dropout", "dropout_position", "column_init_method", "row_init_method")


@dataclass(frozen=True)
class LoRASettings:
    targets: tuple[str, ...]  # names of `TARGETS`, in its order
    dim: int  # rank of each adapter
    alpha: float  # the output of an adapter is multiplied by `alpha / dim`
    dropout: float  # probability that a number is dropped in training
    # "pre": of the input of the adapter, as in PEFT; "post": of its output, as in NeMo
    dropout_position: str
    column_init_method: str
    row_init_method: str
    layers: tuple[int, ...] | None  # numbers from 1 of the layers with adapters; None: all
    weight_tying: bool  # all layers share the adapters of the first one
    # "nemo": one A for queries, keys and values (and one for gate and up projection); "canonical":
    # one for each, as in PEFT
    variant: str

    @property
    def scale(self) -> float:
        return self.alpha / self.dim

    @classmethod
    def from_config(cls, tuning: Mapping[str, Any]) -> "LoRASettings":
        """Of a complete, checked section `model.peft.lora_tuning`."""
        given = {each.name: tuning[KEYS.get(each.name, each.name)] for each in fields(cls)}
        layers, alpha = given["layers"], given["alpha"]
        given |= {
            "targets": _targets(given["targets"]),
            "alpha": float(given["dim"] if alpha is None else alpha),
            "dropout": float(given["dropout"]),
            "layers": None if layers is None else tuple(sorted(layers)),
        }
        return cls(**given)

    def to_config(self) -> dict[str, Any]:
        own = {
            KEYS.get(name, name): list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }
        return own | {"position_embedding_strategy": None}


def _targets(names: str | Sequence[str]) -> tuple[str, ...]:
    """The names of `TARGETS` that `target_modules` stands for; `ConfigError` if it is none."""
    choices = ", ".join((*TARGETS, *TARGET_GROUPS))
    if not isinstance(names, str | Sequence) or not names:
        raise ConfigError(f"{TUNING}target_modules={names!r} must be a list of {choices}.")
    found: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        if name not in TARGETS and name not in TARGET_GROUPS:
            raise ConfigError(
                f"{TUNING}target_modules={names}: {name!r} does not exist; use {choices}."
            )
        found |= set(TARGET_GROUPS.get(name, (name,)))
    return tuple(name for name in TARGETS if name in found)


def trains_adapters(tree: Mapping[str, Any]) -> bool:
    return Values(tree).get(PEFT + "peft_scheme", NONE) != NONE


_SOURCE_RULES = """
BASE.checkpoint_dir=null or BASE.checkpoint_name=null & BASE.checkpoint_dir!=null or
    BASE.checkpoint_name!=null | , but BASE needs both checkpoint_dir and checkpoint_name
PEFT.restore_from_path & BASE.checkpoint_dir | and {} name two bases; set only one
PEFT.restore_from_path or BASE.checkpoint_dir & PEFT.peft_scheme=null|none | names adapters, but
    PEFT.peft_scheme=none trains none; set it to lora, or start from the adapters as checkpoint
"""
_LORA_RULES = """
LORA.adapter_dropout=1 | drops everything; use less
LORA.column_init_method=zero & LORA.row_init_method=zero | and {} are both zero: such adapters have
    no gradient; leave one of them at its default
LORA.position_embedding_strategy!=null | is not available; set it to null
LORA.weight_tying & model.pipeline_model_parallel_size>1 | shares adapters between layers, which
    must then be on one pipeline stage; {} is more
"""


def check_peft(v: Values) -> None:
    """Refuse adapters that cannot be built; keys of `model` that are absent are not checked."""
    v.choice(PEFT + "peft_scheme", (LORA, NONE))
    path = v.get(PEFT + "restore_from_path")
    if path is not None and (not isinstance(path, str) or not path):
        raise v.error(PEFT + "restore_from_path", "is not a path.")
    names = {"PEFT": PEFT[:-1], "LORA": TUNING[:-1], "BASE": PEFT + "restore_from_ckpt"}
    v.refuse(_SOURCE_RULES, **names)
    if v.get(PEFT + "peft_scheme", NONE) == NONE:
        return
    for key in Configuration("", {PEFT[:-1]: PolicyPeft}).keys.values():
        key.check(v)
    v.refuse(_LORA_RULES, **names)
    targets = _targets(v.get(TUNING + "target_modules", ("attention_qkv",)))
    if inside := [name for name in targets if name in TARGET_GROUPS["mlp"]]:
        v.refuse(
            f"""model.num_moe_experts | has experts as MLPs, which have no adapters, but
            {TUNING}target_modules names {", ".join(inside)}; use attention"""
        )
    _check_layers(v)


def _check_layers(v: Values) -> None:
    key, count = TUNING + "layer_selection", v.get("model.num_layers", math.inf)
    layers = v.get(key)
    if layers is None:
        return
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise v.error(key, "must be a list of layer numbers, or null for all.")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer <= count:
            last = f" to {count}" if count < math.inf else ""
            raise v.error(
                key, f"has {layer!r}, which is not the number of a layer; give some from 1{last}."
            )
    if len(set(layers)) < len(layers):
        raise v.error(key, "names a layer twice.")
