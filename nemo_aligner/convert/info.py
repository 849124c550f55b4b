# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, without loading it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint import adapters
from nemo_aligner.checkpoint.hugging_face import peft, peft_config
from nemo_aligner.checkpoint.sources import PeftFolder, open_source
from nemo_aligner.checkpoint.stored_weights import TensorSource, distinct, stored_dtype
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.config.values import plain_dict


def collect(path: Path) -> dict[str, Any]:
    """Keys, parameters and tensors of a checkpoint; `UserError`: it is damaged, or unreadable."""
    source = open_source(path, "PATH")
    if isinstance(source, PeftFolder):
        return _collect_peft(Path(source))
    config = source.stored_config()
    keys = plain_dict(config)
    base = adapters.base_in(config)
    found: dict[str, Any] = {"path": str(source)}
    if base is not None:
        found["adapters"] = _described(
            adapters.settings_in(config).to_config(), base.path, base.checksum
        )
    with source.own_tensors() as weights:
        found |= _tensors(weights)
    return found | {
        "keys": {
            key: keys[key]
            for key in ARCHITECTURE_KEYS
            if keys.get(key) is not None and not key.endswith("_parallel_size")
        },
        "tokenizer": keys.get("tokenizer"),
    }


def _tensors(weights: TensorSource) -> dict[str, Any]:
    shapes = {key: weights.shapes()[key] for key in distinct(weights.shapes())}
    dtypes = {key: str(stored_dtype(weights, key)).removeprefix("torch.") for key in shapes}
    return {
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "tensors": {
            key: {"shape": list(shape), "dtype": dtypes[key]} for key, shape in shapes.items()
        },
    }


def _described(
    tuning: Mapping[str, Any], base: str | None, checksum: str | None
) -> dict[str, Any]:
    names = "target_modules adapter_dim alpha variant layer_selection".split()
    known = {name: tuning[name] for name in names if name in tuning}
    return known | {"base": base, "base_checksum": checksum}


def _collect_peft(source: Path) -> dict[str, Any]:
    """A folder of PEFT does not hold the keys of its model; its base is not read."""
    config, tensors = peft_config.read(source), peft.file_tensors(source)
    layers = config.layers
    tuning = {
        "target_modules": list(config.targets),
        "adapter_dim": config.rank,
        "alpha": config.alpha,
        "layer_selection": None if layers is None else [layer + 1 for layer in layers],
    }
    return {
        "path": str(source),
        "adapters": _described(tuning, config.base, peft.base_checksum(source)),
        **_tensors(tensors),
        "keys": {},
        "tokenizer": None,
    }


def show(source: Path, as_json: bool = False) -> None:
    found = collect(source)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['path']}\n{found['parameters']:,} parameters")
    if "adapters" in found:
        print("\nadapters (LoRA)")
        for key, value in found["adapters"].items():
            print(f"  {key}: {value}")
    print("\nkeys of model")
    for key, value in found["keys"].items():
        print(f"  {key}: {value}")
    print(f"\ntokenizer\n  {found['tokenizer']}\n\ntensors (the first dimension counts layers)")
    for key, tensor in found["tensors"].items():
        print(f"  {key}  {tensor['shape']}  {tensor['dtype']}")
