# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters written as a folder of Hugging Face's PEFT.

A projection whose adapters are zero in all layers is left out: it is one that PEFT did not train
(`peft_reading.py`).
"""

import json
import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from nemo_aligner.checkpoint.adapters import Base
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replace_folder
from nemo_aligner.checkpoint.hugging_face import peft_config
from nemo_aligner.checkpoint.hugging_face.architecture import CAUSAL_LM
from nemo_aligner.checkpoint.hugging_face.peft_names import (
    NAME_PREFIX,
    A,
    B,
    Modules,
    Weight,
    modules_of,
)
from nemo_aligner.checkpoint.hugging_face.peft_reading import CHECKSUM, WEIGHTS_FILE
from nemo_aligner.checkpoint.hugging_face.weights import PREFIX
from nemo_aligner.checkpoint.hugging_face.writing import (
    HEAD,
    HEAD_BIAS,
    copy_tokenizer,
    left_out,
    role_of,
)
from nemo_aligner.checkpoint.stored_weights import TensorSource
from nemo_aligner.config.peft_rules import LoRASettings
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.lora import expand_blocks, gated_blocks, qkv_blocks


def write_folder(
    target: Path,
    source: TensorSource,
    section: DictConfig,
    settings: LoRASettings,
    base: Base,
    *,
    dtype: torch.dtype | None = None,
    drop_head_bias: bool = False,
) -> None:
    """Write a folder of PEFT, which appears when it is complete; in one process. After an error
    nothing is left.

    Args:
        source: of the adapters and their head, as `checkpoint/adapters.py` names them.
        base: of the adapters; its path is what the folder names.
        drop_head_bias: leave out the bias of a reward model's head, for which Hugging Face has no
            place.

    Raises:
        UserError: Hugging Face cannot express the model, or the source is damaged.
    """
    modules = modules_of(section)
    role = role_of(modules.keys, source)
    skipped = left_out(role, modules.keys, source, drop_head_bias)
    tensors, targets, wide = _adapters(modules, source, settings)
    heads = [] if role == CAUSAL_LM else [modules.head("").rstrip(".").rpartition(".")[2]]
    for key in (HEAD, HEAD_BIAS):
        shape = source.shapes().get(PREFIX + key)
        if shape is not None and key not in skipped and heads:
            whole = tuple(slice(0, size) for size in shape)
            name = NAME_PREFIX + modules.head(key.rpartition(".")[2])
            tensors[name] = source.read(PREFIX + key, whole)
    config = peft_config.content(
        base=base.path,
        role=role,
        rank=settings.dim,
        alpha=settings.alpha,
        targets=targets,
        wide=wide,
        layers=None if settings.layers is None else [layer - 1 for layer in settings.layers],
        dropout=settings.dropout,
        transposed=any(modules.weights[name].rule.transposed for name in settings.targets),
        heads=heads,
    )
    # Tensors of their own: several modules may share one A here.
    copies = {name: tensor.to(dtype or tensor.dtype).clone() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | ({CHECKSUM: base.checksum} if base.checksum else {})
    folder = target.with_name(target.name + WRITING_SUFFIX)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        save_file(copies, folder / WEIGHTS_FILE, metadata)
        copy_tokenizer(section, folder)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / peft_config.CONFIG_FILE).write_text(text)
        replace_folder(target, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _adapters(
    modules: Modules, source: TensorSource, settings: LoRASettings
) -> tuple[dict[str, Tensor], list[str], dict[str, int]]:
    """The tensors of all adapters by PEFT's names, the names of the modules that have some, and
    those of the modules whose rank is a multiple of the others', with the multiple.
    """
    layers = settings.layers or range(1, modules.layout.layers + 1)
    found: dict[str, dict[str, Tensor]] = {}  # by the module's short name
    wide: dict[str, int] = {}
    for target in settings.targets:
        weight = modules.weights[target]
        names = [modules.short_name(weight, index) for index in range(len(weight.rule.names))]
        found |= {name: {} for name in names}
        for layer in layers:
            pairs = _pairs(modules, weight, settings, *_stored(weight, layer, source))
            for index, (a, b) in enumerate(pairs):
                stem = f"{NAME_PREFIX}{modules.name(weight, index, layer - 1)}."
                found[names[index]] |= {stem + A: a, stem + B: b}
                if len(a) != settings.dim:
                    wide[names[index]] = len(a) // settings.dim
    used = [name for name, each in found.items() if any(bool(t.any()) for t in each.values())]
    used = used or list(found)  # adapters that do nothing are adapters all the same
    tensors = {name: tensor for each in used for name, tensor in found[each].items()}
    return tensors, used, wide


def _stored(weight: Weight, layer: int, source: TensorSource) -> tuple[Tensor, Tensor]:
    """A and B of a layer (from 1) as they are stored."""
    shapes = source.shapes()
    for stem in (weight.key, weight.key_in(layer - 1)):
        keys = [f"{stem}{layer}.{half}" for half in "ab"]
        if all(key in shapes for key in keys):
            a, b = (source.read(k, tuple(slice(0, size) for size in shapes[k])) for k in keys)
            return a, b
    raise UserError(f"the checkpoint lacks {weight.key}{layer}, an adapter; copy it again.")


def _pairs(
    modules: Modules, weight: Weight, settings: LoRASettings, a: Tensor, b: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """A and B of each module of Hugging Face that a weight is made of.

    Args:
        a: `[dim, in]`, or `[blocks * dim, in]`.
        b: `[out, dim]`.
    """
    canonical, count = settings.variant == "canonical", len(weight.rule.names)
    if canonical and modules.is_fused(weight):
        heads = modules.layout.heads
        qkv = weight.target == "attention_qkv"
        blocks = (
            qkv_blocks(heads.groups, heads.queries, heads.size) if qkv else gated_blocks(len(b))
        )
        b = expand_blocks(b, blocks)
    blocks_of_a = a.chunk(count) if canonical else [a] * count
    rows: dict[str, Tensor] = {
        name: b.new_empty(modules.rows(weight, index), b.shape[1])
        for index, name in enumerate(weight.rule.names)
    }
    first = 0
    for run in weight.rule.runs(weight.rows, modules.layout.heads):
        rows[run.name][run.start : run.start + run.count] = b[first : first + run.count]
        first += run.count
    return list(zip(blocks_of_a, rows.values(), strict=True))
