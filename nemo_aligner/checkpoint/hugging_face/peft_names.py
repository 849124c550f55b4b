# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model of Hugging Face get the adapters of one linear layer of Megatron Core.

A weight of Megatron Core that is three (queries, keys, values) or two (gate and up projection) in
Hugging Face has an adapter for each of these in PEFT, with an A of its own: the form "canonical".
Where Hugging Face stores them as one weight too, PEFT has one A: the form "nemo".
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.checkpoint.hugging_face.architecture import (
    Architecture,
    Unsupported,
    expert_layers,
    hugging_face_config,
)
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN
from nemo_aligner.checkpoint.hugging_face.rows import Rule
from nemo_aligner.checkpoint.hugging_face.weights import LAYERS, PREFIX, Layout, Place
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.peft_rules import TARGET_GROUPS, TARGETS
from nemo_aligner.config.values import plain_dict

A, B = "lora_A.weight", "lora_B.weight"
NAME_PREFIX = "base_model.model."  # of all tensors in a folder of PEFT
HEAD = "rm_head."


@dataclass(frozen=True)
class Weight:
    """A weight of Megatron Core's that can have an adapter."""

    target: str  # name of `TARGETS`
    rule: Rule  # how it is made of Hugging Face's
    # rows, columns: its shape
    rows: int
    columns: int

    @property
    def key(self) -> str:
        """The key of its layers' adapters, up to the number of the layer."""
        return f"{PREFIX}{LAYERS}{TARGETS[self.target]}.lora."

    def key_in(self, layer: int) -> str:
        """The same in a model whose layers differ, which go by their numbers (from 0)."""
        return f"{PREFIX}{LAYERS}{layer}.{TARGETS[self.target]}.lora."


class Modules:
    """The modules with adapters of one model, with the complete section `model` in `keys`."""

    def __init__(self, architecture: Architecture, keys: Mapping[str, Any]):
        self.architecture, self.keys = architecture, keys
        self.layout = Layout(architecture, keys)
        heads, hidden = self.layout.heads, int(keys["hidden_size"])
        queries = heads.groups * heads.queries * heads.size
        ffn = int(keys["ffn_hidden_size"] or 4 * hidden)
        self.gated = str(keys["activation"]).lower().endswith("glu")
        shapes = {
            "attention_qkv": (queries + 2 * heads.groups * heads.size, hidden),
            "attention_dense": (hidden, queries),
            "mlp_fc1": (ffn * (2 if self.gated else 1), hidden),
            "mlp_fc2": (hidden, ffn),
        }
        experts = bool(keys.get("num_moe_experts"))
        self.weights = {
            target: Weight(target, architecture.names.layer[path + "."], *shapes[target])
            for target, path in TARGETS.items()
            if not (experts and target in TARGET_GROUPS["mlp"])
        }
        # Their layers go by their numbers (Megatron Core).
        self.layers_differ = experts and len(set(expert_layers(keys))) > 1

    @property
    def separate(self) -> bool:
        """Whether Hugging Face has a weight for each projection."""
        return len(self.weights["attention_qkv"].rule.names) > 1

    def is_fused(self, weight: Weight) -> bool:
        """Whether both sides have several projections in this weight."""
        several = weight.target == "attention_qkv" or (weight.target == "mlp_fc1" and self.gated)
        return several and len(weight.rule.names) == 1

    def name(self, weight: Weight, index: int, layer: int) -> str:
        """The module with the `index`-th projection of a weight in a layer (from 0)."""
        place = Place(weight.rule, "", layer)
        return self.layout.name(weight.rule.names[index], place).removesuffix(".")

    def short_name(self, weight: Weight, index: int) -> str:
        """The end of the module's name that no module without an adapter has."""
        whole = weight.rule.names[index].removesuffix(".")
        last = whole.rpartition(".")[2]
        ends = [
            name.removesuffix(".").rpartition(".")[2]
            for other in self.weights.values()
            for name in other.rule.names
        ]
        return last if ends.count(last) == 1 else whole

    def rows(self, weight: Weight, index: int) -> int:
        name = weight.rule.names[index]
        runs = weight.rule.runs(weight.rows, self.layout.heads)
        return sum(run.count for run in runs if run.name == name)

    def head(self, kind: str) -> str:
        """The name of the head's `weight` or `bias` in Hugging Face."""
        return self.layout.name(self.layout.outside[HEAD].names[0], Place(Rule(()), kind))


def modules_of(section: DictConfig, names: Sequence[str] | None = None) -> Modules:
    """The modules of a model.

    Args:
        names: of modules with adapters, which decide between the architectures that can express a
            model that did not come from Hugging Face; None: the first one of them.

    Raises:
        Unsupported: no architecture of Hugging Face can express the model.
    """
    given = json.dumps(plain_dict(section, resolve=True), sort_keys=True, default=str)
    return _modules_of(given, None if names is None else tuple(names))


@functools.lru_cache(maxsize=8)  # the start of a job asks several times, and defaults take a while
def _modules_of(section: str, names: tuple[str, ...] | None) -> Modules:
    keys = plain_dict(complete_model(json.loads(section)), resolve=True)
    kind = (keys.get(ORIGIN) or {}).get("model_type")
    if kind in ARCHITECTURES:
        return Modules(ARCHITECTURES[kind], keys)
    found = []
    for architecture in ARCHITECTURES.values():
        try:
            hugging_face_config(architecture, keys)
        except Unsupported:
            continue
        found.append(Modules(architecture, keys))
        if names is None or set(names) <= set(all_names(found[-1])):
            return found[-1]
    if not found:
        raise Unsupported(
            "no architecture of Hugging Face can express the model, so it has no adapters of PEFT."
        )
    return found[0]


def all_names(modules: Modules) -> dict[str, tuple[Weight, int, int]]:
    """Each module that can have an adapter: its weight, the projection's number, the layer."""
    return {
        modules.name(weight, index, layer): (weight, index, layer)
        for layer in range(modules.layout.layers)
        for weight in modules.weights.values()
        for index in range(len(weight.rule.names))
    }
