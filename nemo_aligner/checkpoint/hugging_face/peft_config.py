# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`adapter_config.json` of a folder of Hugging Face's PEFT. Which layers have adapters, and of
which rank, the tensors say; by what their output is multiplied, the configuration.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.forms import PEFT_CONFIG
from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face.reading import read_json
from nemo_aligner.config.values import is_number

TASKS = {hf.CAUSAL_LM: "CAUSAL_LM", hf.PER_SAMPLE: "SEQ_CLS", hf.PER_TOKEN: "TOKEN_CLS"}
_ROLES = {name: role for role, name in TASKS.items()} | {None: hf.CAUSAL_LM}
# Heads of `modules_to_save`, by Hugging Face's names
HEADS = ("score", "classifier")
# Keys that do not change what is computed from the tensors, and those that are read.
_KNOWN = frozenset(
    """auto_mapping corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out
    inference_mode layers_pattern loftq_config lora_ga_config megatron_config megatron_core
    peft_version qalora_group_size revision runtime_config velora_config

    alpha_pattern base_model_name_or_path bias init_lora_weights layers_to_transform lora_alpha
    lora_dropout modules_to_save peft_type r rank_pattern target_modules task_type
    use_rslora""".split()
)
# Keys that must have no value, and what a value means.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA, which changes the weights of the base",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "routing between adapters",
    "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "a bias in B",
    "trainable_token_indices": "trained embeddings",
    "target_parameters": "adapters of parameters, such as stacked experts",
    "layer_replication": "replicated layers",
}
# Initial values that leave the base as it is; others subtract from its weights.
_INITIAL_VALUES = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
REMEDY = (
    "Merge them in PEFT (model.merge_and_unload(), then save_pretrained) and name that folder as "
    "the model."
)


@dataclass(frozen=True)
class AdapterConfig:
    """What `adapter_config.json` says about the tensors beside it."""

    base: str | None  # name or path of the base; None: not given
    role: str  # of `TASKS`, what the model is for
    rank: int
    rank_pattern: Mapping[str, int]
    alpha: float
    alpha_pattern: Mapping[str, float]
    root_of_rank: bool
    dropout: float  # probability that a number of an adapter's input is dropped in training
    targets: Sequence[str]  # names of modules with adapters, if they are listed
    layers: Sequence[int] | None  # numbers from 0 of the layers with adapters; None: all

    def rank_for(self, module: str) -> int:
        """Rows of a module's A, by its name in Hugging Face."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def alpha_for(self, module: str) -> float:
        """Alpha: a module's adapter is multiplied by `alpha / rank`."""
        alpha = float(_matching(self.alpha_pattern, module, self.alpha))
        return alpha * math.sqrt(self.rank_for(module)) if self.root_of_rank else alpha

    def base_here(self) -> Path | None:
        """The base; None: none is named, or it is not on this machine."""
        path = None if self.base is None else Path(self.base).expanduser()
        return None if path is None or not path.exists() else path.absolute()


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that ends a module's name."""
    found = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module))
    return next(found, default)


def read_config(path: Path) -> AdapterConfig:
    """Of the folder `path`; `UserError`: damaged, or (`Unsupported`) not computed here."""
    given = read_json(path / PEFT_CONFIG)
    for fault in _faults(given):
        raise hf.Unsupported(f"{path / PEFT_CONFIG}: {fault}")
    targets = given.get("target_modules")
    return AdapterConfig(
        base=given.get("base_model_name_or_path") or None,
        role=_ROLES[given.get("task_type")],
        rank=given["r"],
        rank_pattern=given.get("rank_pattern") or {},
        alpha=float(given["lora_alpha"]),
        alpha_pattern=given.get("alpha_pattern") or {},
        root_of_rank=bool(given.get("use_rslora")),
        dropout=float(given.get("lora_dropout") or 0),
        targets=targets if isinstance(targets, list) else (),
        layers=_listed(given.get("layers_to_transform")) or None,
    )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _faults(given: Mapping[str, Any]) -> Iterator[str]:
    """What is not LoRA as it is computed here, then values that cannot be."""
    asks: dict[str, str] = {}  # key -> what its value is or asks for
    if given.get("peft_type") != "LORA":
        asks["peft_type"] = "is not supported; what is: LORA"
    for key, meaning in _REFUSED.items():
        if given.get(key):
            asks[key] = f"asks for {meaning}, which is not supported"
    if given.get("bias") not in (None, "none"):
        asks["bias"] = "trained biases of the base, which is not supported"
    if given.get("init_lora_weights", True) not in _INITIAL_VALUES:
        asks["init_lora_weights"] = "changes the weights of the base, which is not supported"
    if given.get("task_type") not in list(_ROLES):
        asks["task_type"] = f"is not supported; what is: {', '.join(TASKS.values())}"
    if others := [n for n in _listed(given.get("modules_to_save")) if n not in HEADS]:
        heads = f"which is not supported; what is: heads ({', '.join(HEADS)})"
        asks["modules_to_save"] = f"trained the whole of {others[0]!r}, {heads}"
    for key, value in given.items():
        if value and key not in _KNOWN | _REFUSED.keys():
            asks[key] = "is not known here; the adapters may compute something else"
    for key, why in asks.items():
        yield f"{key}={given.get(key)!r} {why}. {REMEDY}"
    numbers: dict[str, Any] = {"r": given.get("r"), "lora_alpha": given.get("lora_alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = given.get(name) or {}
        if not isinstance(patterns, Mapping):
            yield f"{name}={patterns!r} is not an object of patterns."
        for pattern, value in patterns.items():
            try:
                re.compile(pattern)
            except re.error:
                yield f"{name} has no pattern in {pattern!r}."
            numbers[f"{name}.{pattern}"] = value
    for key, value in numbers.items():
        is_rank = key.startswith("r")
        if not is_number(value) or value <= 0 or (is_rank and not isinstance(value, int)):
            yield f"{key}={value!r} is not a number above 0."
    dropout = given.get("lora_dropout") or 0
    if not is_number(dropout) or not 0 <= dropout < 1:
        yield f"lora_dropout={dropout!r} is not a number from 0 to below 1."
    for layer in _listed(given.get("layers_to_transform")):
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            yield f"layers_to_transform names {layer!r}, not the number of a layer."
    base = given.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        yield f"base_model_name_or_path={base!r} is not a name or a path."
