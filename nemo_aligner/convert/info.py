# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, without loading it."""

import json
import math
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint import nemo_archive
from nemo_aligner.checkpoint.stored_weights import stored_dtype
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.config.values import plain_dict


def collect(source: Path) -> dict[str, Any]:
    """Keys, parameters and tensors of a checkpoint of any form that loads.

    Raises:
        UserError: the checkpoint is damaged, or its form does not load.
    """
    source = nemo_archive.check_restore_path(source, key="PATH")
    keys = plain_dict(nemo_archive.read_config(source))
    with nemo_archive.stored_tensors(source) as weights:
        shapes = dict(weights.shapes())
        # A folder's layers are there by their numbers too.
        shapes = {key: shape for key, shape in shapes.items() if not _numbered(key, shapes)}
        dtypes = {key: str(stored_dtype(weights, key)).removeprefix("torch.") for key in shapes}
    return {
        "path": str(source),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "keys": {
            key: keys[key]
            for key in ARCHITECTURE_KEYS
            if keys.get(key) is not None and not key.endswith("_parallel_size")
        },
        "tokenizer": keys.get("tokenizer"),
        "tensors": {
            key: {"shape": list(shape), "dtype": dtypes[key]} for key, shape in shapes.items()
        },
    }


def _numbered(key: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the tensor is there without the number of its layer as well."""
    before, _, after = key.partition("decoder.layers.")
    number, _, name = after.partition(".")
    return number.isdigit() and f"{before}decoder.layers.{name}" in shapes


def show(source: Path, as_json: bool = False) -> None:
    """Print what `collect` finds."""
    found = collect(source)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['path']}\n{found['parameters']:,} parameters\n\nkeys of model")
    for key, value in found["keys"].items():
        print(f"  {key}: {value}")
    print(f"\ntokenizer\n  {found['tokenizer']}\n\ntensors (the first dimension counts layers)")
    for key, tensor in found["tensors"].items():
        print(f"  {key}  {tensor['shape']}  {tensor['dtype']}")
