# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face folder by the names of Megatron Core.

`Layout` knows the names in both directions; `FolderWeights` reads the parts of tensors that a rank
needs, through it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hugging_face.architecture import Architecture, expert_layers
from nemo_aligner.checkpoint.hugging_face.folder import Tensors
from nemo_aligner.checkpoint.hugging_face.rows import Heads, Rule, Run, whole
from nemo_aligner.checkpoint.stored_weights import Slice
from nemo_aligner.core.errors import UserError

PREFIX = "model."  # of all names in a sharded state dict
LAYERS = "decoder.layers."
HEAD = "rm_head."
WITH_EXPERTS = ("mlp.router.", "mlp.experts.", "mlp.shared_experts.", "pre_mlp_layernorm.")
WITH_MLP = ("mlp.linear_",)
_COMPARED_ROWS = 512  # of a tied output layer that is stored all the same
KINDS = ("weight", "bias")
EXPERTS = ".experts.experts."
# Buffers that some versions of transformers stored.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Place:
    """Where a tensor of Megatron Core, or one layer or expert of it, comes from."""

    rule: Rule  # how it is made
    kind: str  # `weight` or `bias`
    # layer, expert: numbers, for names with a place for them
    layer: int | None = None
    expert: int | None = None


class Layout:
    """The names of the weights of one model, in both forms.

    Args:
        keys: of the section `model`: sizes of the attention, numbers of layers and experts, and
            whether the head gives one number per token.
    """

    def __init__(self, architecture: Architecture, keys: Mapping[str, Any]):
        self.names = architecture.names
        self.outside = dict(self.names.outside)
        if keys.get("output_sequence"):
            self.outside[HEAD] = whole(self.names.token_head)
        heads = int(keys["num_attention_heads"])
        groups = int(keys.get("num_query_groups") or heads)
        size = keys.get("kv_channels") or int(keys["hidden_size"]) // heads
        self.heads = Heads(groups, heads // groups, int(size))
        self.layers = int(keys["num_layers"])
        self.experts = int(keys.get("num_moe_experts") or 0)

    def rules(self) -> Iterator[tuple[str, Rule, bool]]:
        """Names but for `weight` or `bias`, with their rules, and whether they are a layer's."""
        for name, rule in self.outside.items():
            yield PREFIX + name, rule, False
        for name, rule in self.names.layer.items():
            yield PREFIX + LAYERS + name, rule, True

    def numbered_axes(self, key: str) -> int:
        """How many of the first dimensions of a tensor count layers and experts."""
        name = key.removeprefix(PREFIX)
        if not name.startswith(LAYERS):
            return 0
        numbered = name.removeprefix(LAYERS).partition(".")[0].isdigit()
        return (0 if numbered else 1) + (1 if EXPERTS in name else 0)

    def place(self, key: str, index: tuple[int, ...] = ()) -> Place | None:
        """The place of the tensor `key` of a checkpoint; None: it has none.

        Args:
            key: a global name, of layers with or without their number.
            index: number of the layer (if it is not in the name) and of the expert.
        """
        name = key.removeprefix(PREFIX)
        layer = None
        table: Mapping[str, Rule] = self.outside
        if name.startswith(LAYERS):
            table = self.names.layer
            name = name.removeprefix(LAYERS)
            number, _, rest = name.partition(".")
            if number.isdigit():
                layer, name = int(number), rest
            elif index:
                layer, index = index[0], index[1:]
        for kind in KINDS:
            stem = name.removesuffix(kind)
            if stem != name and stem in table:
                return Place(table[stem], kind, layer, index[0] if index else None)
        return None

    def name(self, template: str, place: Place) -> str:
        if template.startswith("/"):
            return template[1:] + place.kind
        layer = self.names.layers if place.layer is not None else ""
        name = self.names.base + layer + template + place.kind
        return name.format(layer=place.layer, expert=place.expert)

    def runs(self, place: Place, rows: int) -> list[Run]:
        return [
            Run(self.name(run.name, place), run.start, run.count)
            for run in place.rule.runs(rows, self.heads)
        ]


class FolderWeights:
    """A `TensorSource` of the weights in a Hugging Face folder.

    Args:
        keys: of the section `model`, complete.
        has_head: the model is a reward model or a critic.

    Raises:
        UserError: a file is damaged, lacks a weight of the model, has one of another shape, or
            one that has no place in the model.
    """

    def __init__(
        self, path: Path, architecture: Architecture, keys: Mapping[str, Any], has_head: bool
    ):
        self.path, self.keys = path, keys
        self.layout = Layout(architecture, keys)
        self.tensors = Tensors(path)
        self._with_base = {
            self._full_name(name): name for name in self.tensors.shapes()
        }  # full name -> name in the files
        self._used: set[str] = set()
        self._shapes = self._megatron_shapes()
        tied = bool(keys.get("share_embeddings_and_output_weights"))
        left = [name for name in self._with_base if name not in self._used]
        left = [
            name
            for name in left
            if not name.endswith(_BUFFERS) and not (tied and name == "lm_head.weight")
        ]
        if left:
            raise UserError(
                f"{path} holds {len(left)} weight(s) that have no place in a model of "
                f"{architecture.class_name}, such as {left[0]!r}; the model would compute "
                "something else."
            )
        self._check_complete(has_head, tied)
        self._check_shapes()
        if tied:
            self._check_tied()
            self._shapes.pop(PREFIX + "output_layer.weight", None)

    def _check_complete(self, has_head: bool, tied: bool) -> None:
        """Raise `UserError` if a weight is missing that every model of these keys has."""
        absent = {HEAD} if not has_head else set()
        if has_head or tied:
            absent.add("output_layer.")
        needed = [name for name in self.layout.outside if name not in absent]
        places = [(name, Place(self.layout.outside[name], "weight")) for name in needed]
        experts = expert_layers(self.keys) if self.layout.experts else [0] * self.layout.layers
        for layer in range(self.layout.layers):
            left_out = WITH_MLP if experts[layer] else WITH_EXPERTS
            for name, rule in self.layout.names.layer.items():
                if not name.startswith(left_out) and not self._does_not_apply(name, layer):
                    expert = 0 if "{expert}" in rule.names[0] else None
                    places.append((name, Place(rule, "weight", layer, expert)))
        for _, place in places:
            if self._shape(place) is None:
                raise self._lacks(place)

    def _lacks(self, place: Place) -> UserError:
        return UserError(
            f"{self.path} lacks {self.layout.name(place.rule.names[0], place)!r}, or has it in "
            "another shape than a model with the keys of its config.json; copy it again."
        )

    def _does_not_apply(self, name: str, layer: int) -> bool:
        rule = self.layout.names.layer[name]
        return rule.beside is not None and self._shape(Place(rule, "weight", layer)) is None

    def _check_shapes(self) -> None:
        """Raise `UserError` if a matrix has other sizes than `config.json` says."""
        keys, heads = self.keys, self.layout.heads
        hidden = int(keys["hidden_size"])
        attention = heads.groups * heads.queries * heads.size
        experts = int(keys.get("moe_ffn_hidden_size") or 0)
        expected = {
            "embedding.word_embeddings.weight": (int(keys["override_vocab_size"]), hidden),
            "output_layer.weight": (int(keys["override_vocab_size"]), hidden),
            "self_attention.linear_qkv.weight": (None, hidden),
            "self_attention.linear_proj.weight": (hidden, attention),
            "mlp.linear_fc1.weight": (None, hidden),
            "mlp.linear_fc2.weight": (hidden, int(keys["ffn_hidden_size"])),
            "mlp.experts.experts.linear_fc2.weight": (hidden, experts),
        }
        for key, shape in self._shapes.items():
            for name, sizes in expected.items():
                differs = any(size not in (None, have) for size, have in zip(sizes, shape[-2:]))
                if key.endswith(f".{name}") and differs:
                    raise UserError(
                        f"{self.path}: {key} would have the shape {shape[-2:]}, but config.json "
                        f"asks for {tuple('any' if size is None else size for size in sizes)}; "
                        "they belong to different models."
                    )

    def _check_tied(self) -> None:
        """Raise `UserError` if an output layer is stored that is not the table it is tied to."""
        key, table = PREFIX + "output_layer.weight", PREFIX + "embedding.word_embeddings.weight"
        if key not in self._shapes:
            return
        rows = self._shapes[key][0]
        for start in (0, max(rows - _COMPARED_ROWS, 0)):
            part: Slice = (slice(start, min(start + _COMPARED_ROWS, rows)), slice(None))
            if not torch.equal(self.read(key, part), self.read(table, part)):
                raise UserError(
                    f"{self.path} has an lm_head.weight that differs from its embeddings, but "
                    "config.json says tie_word_embeddings=true; set it to false there if the "
                    "output layer counts."
                )

    def _full_name(self, name: str) -> str:
        """A name as a model with a head has it: folders of base models lack the prefix."""
        base = self.layout.names.base
        heads = tuple(
            rule.names[0][1:]
            for rule in self.layout.outside.values()
            if rule.names[0].startswith("/")
        )
        return name if name.startswith((base, *heads)) else base + name

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _megatron_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes by Megatron Core's names. Weights of layers have their number in front,
        those of experts that of the expert too; each layer's weights are there by its number as
        well, which is how models have them whose layers differ.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for stem, rule, in_layer in self.layout.rules():
            experts = self.layout.experts if any("{expert}" in name for name in rule.names) else 0
            for kind in KINDS:
                if kind == "bias" and not self._has_bias(stem):
                    continue
                if not in_layer:
                    shape = self._shape(Place(rule, kind))
                    if shape is not None:
                        shapes[stem + kind] = shape
                    continue
                found = {}
                for layer in range(self.layout.layers):
                    shape = self._shape(Place(rule, kind, layer, 0 if experts else None))
                    if shape is not None:
                        found[layer] = ((experts,) if experts else ()) + shape
                    for expert in range(1, experts):
                        place = Place(rule, kind, layer, expert)
                        if self._shape(place) != shape:
                            raise self._lacks(place)
                if len(found) == self.layout.layers:
                    shapes[stem + kind] = (len(found), *found[0])
                name = stem.removeprefix(PREFIX + LAYERS) + kind
                for layer, shape in found.items():
                    shapes[f"{PREFIX}{LAYERS}{layer}.{name}"] = shape
        return shapes

    def _has_bias(self, stem: str) -> bool:
        if stem.endswith(HEAD):
            return True
        if stem.endswith("norm_") or "layernorm" in stem:
            return str(self.keys["normalization"]).lower().startswith("layernorm")
        qkv = self.keys.get("add_qkv_bias") and stem.endswith("linear_qkv.")
        return bool(qkv or (self.keys["bias"] and "linear_" in stem))

    def _shape(self, place: Place) -> tuple[int, ...] | None:
        """Shape of the tensor at `place`; None: the folder has none of its parts."""
        if place.rule.beside is not None:
            beside = self.layout.name(place.rule.beside, dataclasses.replace(place, kind=""))
            if beside not in self._with_base:
                return None
        names = [self.layout.name(template, place) for template in place.rule.names]
        there = [name for name in names if name in self._with_base]
        if not there:
            return None
        if len(there) < len(names):
            raise UserError(
                f"{self.path} has {there[0]!r} but not "
                f"{next(name for name in names if name not in there)!r}; copy it again."
            )
        self._used |= set(names)
        shapes = [self._stored_shape(name, place) for name in names]
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise UserError(
                f"{self.path}: {', '.join(names)} have the shapes {shapes}, which do not fit "
                "together; copy it again."
            )
        rows = sum(shape[0] for shape in shapes)
        for name, shape in zip(names, shapes, strict=True):
            runs = [run for run in self.layout.runs(place, rows) if run.name == name]
            if sum(run.count for run in runs) != shape[0]:
                raise UserError(
                    f"{self.path}: {name} of shape {shape} does not fit the sizes in its "
                    f"config.json, which ask for {sum(run.count for run in runs)} rows."
                )
        return (rows, *shapes[0][1:])

    def _stored_shape(self, name: str, place: Place) -> tuple[int, ...]:
        """Shape of a tensor of Hugging Face, transposed if it is stored so."""
        shape = self.tensors.shapes()[self._with_base[name]]
        return shape[::-1] if place.rule.transposed else shape

    def read(self, key: str, part: Slice) -> Tensor:
        index = tuple(axis for axis in part if isinstance(axis, int))
        rows, *columns = (axis for axis in part if isinstance(axis, slice))
        place = self.layout.place(key, index)
        assert place is not None, key
        total = self._shapes[key][len(index)]
        pieces, first = [], 0
        for run in self.layout.runs(place, total):
            start, stop = max(rows.start, first), min(rows.stop, first + run.count)
            if start < stop:
                shift = run.start - first
                wanted = (slice(start + shift, stop + shift), *columns)
                index_in_file = wanted[::-1] if place.rule.transposed else wanted
                piece = self.tensors.part(self._with_base[run.name], index_in_file)
                pieces.append(piece.T if place.rule.transposed and columns else piece)
            first += run.count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
