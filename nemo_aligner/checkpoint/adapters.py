# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hold adapters (and heads) instead of all weights.

Their section `lora_base` names the checkpoint of the base and its checksum; `peft` describes the
adapters. Keys: `<key of the linear layer>lora.<number of the layer, from 1>.a` and `.b`, such as
`model.decoder.layers.self_attention.linear_qkv.lora.1.a`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.checkpoint.stored_weights import (
    ADAPTER,
    EitherName,
    Slice,
    TensorSource,
    heads_of,
    is_gated,
    is_stacked,
    numbered,
    pieces,
    sharded_tensors,
    unnumbered,
    whole_tensor,
)
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.peft_rules import TARGETS, LoRASettings
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core import lora
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.collectives import gathered

BASE_SECTION = "lora_base"
_HEAD, _OUTPUT_LAYER = "model.rm_head.weight", "model.output_layer.weight"
# The weights that the checksum of a base reads.
_CHECKED = tuple(f"{path}.weight" for path in TARGETS.values())


@dataclass(frozen=True)
class Base:
    """The model that adapters belong to."""

    path: str | None  # of its checkpoint; None: of a model with random weights
    # Of its weights (`checksum_of_source`); None: not recorded, in folders of PEFT of others.
    checksum: str | None

    def to_config(self) -> dict[str, Any]:
        return {"restore_from_path": self.path, "checksum": self.checksum}


def is_adapter(key: str) -> bool:
    """Whether a tensor, by its key or its name in a state dict, is an adapter's."""
    return ADAPTER in key


def base_in(config: DictConfig) -> Base | None:
    """The base that a configuration names; None: it holds all weights."""
    section = config.get(BASE_SECTION)
    if section is None:
        return None
    checksum = section.get("checksum")
    return Base(section.get("restore_from_path"), None if checksum is None else str(checksum))


def settings_in(config: DictConfig) -> LoRASettings:
    peft = complete(config.get("peft"), "gpt_ppo_actor", "model.peft")
    return LoRASettings.from_config(plain_dict(peft.lora_tuning))


# --- checksum of the base ---


def checksum_of_source(source: TensorSource) -> str:
    """Hexadecimal checksum of the rows `checked_rows` of weights that can have adapters."""
    total = 0
    for key, index in pieces(source):
        if key.endswith(_CHECKED) and not is_adapter(key):
            rows, columns = source.shapes()[key][-2:]
            # Whole: reading a part of a stored weight may read all of it each time.
            values = source.read(key, (*index, slice(0, rows), slice(0, columns)))
            total += _checksum(key, (*index, 0, 0), values, rows)
    return _digits(total)


def checksum_of_model(sharded: Mapping[str, Mapping[str, Any]]) -> str:
    """`checksum_of_source` of a model in memory; all ranks call it."""
    parts = [p for chunk in sharded.values() for e in chunk.values() for p in sharded_tensors(e)]
    total = sum(
        _checksum(part.key, part.global_offset, part.data, part.global_shape[-2])
        for part in parts
        if part.key.endswith(_CHECKED) and is_main_replica(part.replica_id)
    )
    return _digits(sum(gathered(total)))


def _checksum(key: str, offset: Sequence[int], values: Any, rows: int) -> int:
    """That of a part `[row, column]` of a weight of `rows` that begins at `offset`: layer if the
    weight is that of all, row, column.
    """
    name, number = unnumbered(key)
    *layers, first_row, column = offset
    layer = layers[0] if number is None else number
    return sum(
        lora.base_checksum(name, values[row - first_row], layer, row, column)
        for row in lora.checked_rows(rows)
        if first_row <= row < first_row + len(values)
    )


def _digits(total: int) -> str:
    return f"{total % 2**64:016x}"


def check_base(expected: Base, found: str, what: str, where: str) -> None:
    """`UserError` if adapters (`what`) name another base than `found`, the checksum `where`."""
    if expected.checksum not in (None, found):
        raise UserError(
            f"{what} are adapters of another base: they were trained on "
            f"{expected.path or 'random weights'} (checksum {expected.checksum}), but {where} has "
            f"the checksum {found}. Start from the base that they belong to."
        )


# --- merging ---


def merged(
    base: TensorSource, adapters: TensorSource, settings: LoRASettings, config: Mapping[str, Any]
) -> TensorSource:
    """A base with adapters merged in, and their heads; `UserError`: they do not fit. Sums are
    computed in float64 and have the dtype of the base.
    """
    return EitherName(_MergedTensors(EitherName(base), adapters, settings, config))


@dataclass(eq=False)
class _MergedTensors:
    """The source that `merged` returns, with layers by number."""

    base: TensorSource
    adapters: TensorSource
    settings: LoRASettings
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        stored = self.adapters.shapes()
        self._own = {key: stored[key] for key in stored if not is_adapter(key)}
        # Stem of a linear layer as for all layers -> numbers of adapted layers -> their keys but
        # for `a` or `b`. Where layers differ, keys have the layers' numbers from 0 too.
        self._adapted: dict[str, dict[int, str]] = {}
        for key in filter(is_adapter, stored):
            stem, _, rest = key.partition(ADAPTER)
            layers = self._adapted.setdefault(unnumbered(stem + ".")[0], {})
            layers[int(rest.partition(".")[0])] = key[:-1]
        self._check()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = self.base.shapes()
        shapes = {key: stored[key] for key in stored if not is_stacked(key)} | self._own
        if _HEAD in self._own:
            shapes.pop(_OUTPUT_LAYER, None)  # the base is a language model, the result is not
        return shapes

    def read(self, key: str, part: Slice) -> Tensor:
        if key in self._own:
            return self.adapters.read(key, part)
        values = self.base.read(key, part)
        name, number = unnumbered(key)
        stem = name.removesuffix("weight")
        adapter = self._adapted.get(stem, {}).get(-1 if number is None else number + 1)
        if adapter is None or stem == name:
            return values
        rows, columns = part
        a_rows = slice(0, self.adapters.shapes()[adapter + "a"][0])
        a = self.adapters.read(adapter + "a", (a_rows, columns))
        b = whole_tensor(self.adapters, adapter + "b")
        if self.settings.variant == "canonical":
            b = expanded(b, stem, self.config)
        # In float64 parts merge as the whole does, at any split and on any machine: the checksum
        # of adapters on adapters depends on it.
        change = lora.delta(a, b[rows], self.settings.scale, torch.float64)
        return (values.double() + change).to(values.dtype)

    def _check(self) -> None:
        stored, shapes = self.base.shapes(), self.adapters.shapes()
        for stem, layers in self._adapted.items():
            weight = stored.get(numbered(stem + "weight", min(layers) - 1))
            if weight is None:
                raise UserError(f"the base has no {stem}weight, to which the adapters belong.")
            for layer, key in layers.items():
                a, b = (shapes[key + name] for name in "ab")
                if a[1] != weight[-1] or b[0] != weight[-2]:
                    raise UserError(
                        f"the adapter of {stem}weight in layer {layer} is for a weight of shape "
                        f"({b[0]}, {a[1]}), but that of the base is {tuple(weight[-2:])}: it was "
                        "trained on another architecture."
                    )


def expanded(b: Tensor, path: str, model: Mapping[str, Any]) -> Tensor:
    """B of a "canonical" adapter of the linear layer `path`, `[out, dim]`, with a column for each
    row of A. `model`: its configuration.
    """
    if path.endswith("linear_qkv."):
        heads = heads_of(model)
        blocks = lora.qkv_blocks(heads.groups, heads.queries, heads.size)
    elif path.endswith("linear_fc1.") and is_gated(model):
        blocks = lora.gated_blocks(len(b))
    else:
        return b
    return lora.expand_blocks(b, blocks)
