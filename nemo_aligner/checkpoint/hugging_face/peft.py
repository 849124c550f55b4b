# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters (`checkpoint/adapters.py`) in folders of Hugging Face's PEFT, read and written.

A weight of Megatron Core may be several in Hugging Face (queries, keys, values; gate and up): each
then has an adapter with an A of its own in PEFT, the form "canonical". Where Hugging Face has one
weight too, PEFT has one A: the form "nemo".

A projection without an adapter gets one of zeros, whose gradient is zero too: it stays away, as in
PEFT. One that is zero in all layers is not written. Lower ranks are filled up with rows of zeros.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_aligner.checkpoint.adapters import BASE_SECTION, Base, expanded, is_adapter
from nemo_aligner.checkpoint.folders import replaced_folder
from nemo_aligner.checkpoint.forms import PEFT_CONFIG
from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face import peft_config, writing
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES, expressing
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN, Tensors
from nemo_aligner.checkpoint.stored_weights import (
    LAYERS,
    Slice,
    TensorSource,
    is_gated,
    whole_tensor,
)
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.peft_rules import LORA, TARGET_GROUPS, TARGETS, LoRASettings
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError

WEIGHTS_FILE = "adapter_model.safetensors"
CHECKSUM = "nemo_aligner.base_checksum"  # in the metadata of that file
_PICKLED = "adapter_model.bin"
A, B = "lora_A.weight", "lora_B.weight"
NAME_PREFIX = "base_model.model."  # of all tensors in a folder of PEFT


# --- the modules that each adapter stands for ---


@dataclass(frozen=True)
class Weight:
    """A weight of Megatron Core that can have an adapter, of shape `[rows, columns]`."""

    target: str  # name of `TARGETS`
    rule: hf.Rule  # how it is made of Hugging Face's
    rows: int
    columns: int

    def keys(self, layer: int, numbered: bool) -> list[str]:
        """Keys of A and B of a layer (from 1); `numbered`: of a model whose layers differ."""
        number = f"{layer - 1}." * numbered
        stem = f"{LAYERS}{number}{TARGETS[self.target]}.lora.{layer}."
        return [stem + "a", stem + "b"]


class Modules:
    """The modules with adapters of a model with the complete section `keys`. `places`: weight,
    number of the projection in it and layer (from 0) by the module's name.
    """

    def __init__(self, architecture: hf.Architecture, keys: Mapping[str, Any]):
        self.keys = keys
        self.layout = hf.Layout(architecture, keys)
        sizes = self.layout.sizes()
        experts = bool(keys.get("num_moe_experts"))
        self.weights = {
            target: Weight(target, architecture.layer[path + "."], *sizes[path + "."])
            for target, path in TARGETS.items()
            if not (experts and target in TARGET_GROUPS["mlp"])
        }
        self.layers_differ = experts and len(set(hf.expert_layers(keys))) > 1
        self.separate = len(self.weights["attention_qkv"].rule.names) > 1
        self.places = {
            self.name(weight, index, layer): (weight, index, layer)
            for layer in range(self.layout.layers)
            for weight in self.weights.values()
            for index in range(len(weight.rule.names))
        }

    def name(self, weight: Weight, index: int, layer: int) -> str:
        """The module of the `index`-th projection of a weight in a layer (from 0)."""
        place = hf.Place(weight.rule, "", layer)
        return self.layout.name(weight.rule.names[index], place).removesuffix(".")

    def short_name(self, weight: Weight, index: int) -> str:
        """The end of the module's name that no module without an adapter has."""
        whole = weight.rule.names[index].removesuffix(".")
        last = whole.rpartition(".")[2]
        names = [name for other in self.weights.values() for name in other.rule.names]
        ends = [name.removesuffix(".").rpartition(".")[2] for name in names]
        return last if ends.count(last) == 1 else whole

    def adapted(self, settings: LoRASettings) -> Iterator[tuple[Weight, int]]:
        """The weights with adapters, each with its layers from 1."""
        for target in settings.targets:
            for layer in settings.layers or range(1, self.layout.layers + 1):
                yield self.weights[target], layer

    def rows(self, weight: Weight, index: int) -> int:
        name = weight.rule.names[index]
        runs = weight.rule.runs(weight.rows, self.layout.heads)
        return sum(run.count for run in runs if run.name == name)

    def head(self, kind: str) -> str:
        """Hugging Face's name of the head's `weight` or `bias`."""
        return self.layout.name(self.layout.outside[hf.HEAD].names[0], hf.Place(hf.Rule(()), kind))


def modules_of(section: DictConfig, names: Sequence[str] = ()) -> Modules:
    """The modules of a model; `Unsupported`: no architecture can express it. `names`, of modules
    with adapters, decide between architectures if the model came from none.
    """
    given = json.dumps(plain_dict(section, resolve=True), sort_keys=True, default=str)
    return _modules_of(given, tuple(names))


@functools.lru_cache(maxsize=8)  # the start of a job asks several times, and defaults take a while
def _modules_of(section: str, names: tuple[str, ...]) -> Modules:
    keys = plain_dict(complete_model(json.loads(section)), resolve=True)
    kind = (keys.get(ORIGIN) or {}).get("model_type")
    if kind in ARCHITECTURES:
        return Modules(ARCHITECTURES[kind], keys)
    found = []
    for architecture, _config in expressing(keys):
        found.append(Modules(architecture, keys))
        if set(names) <= found[-1].places.keys():
            return found[-1]
    return found[0]


# --- reading ---


def base_path(path: Path) -> Path:
    """The base that a folder of PEFT names; `UserError`: none, or none on this machine."""
    name = peft_config.read(path).base
    if name is not None and Path(name).expanduser().exists():
        return Path(name).expanduser().absolute()
    raise UserError(
        f"{path} holds adapters, but their base, base_model_name_or_path={name!r} in "
        f"{PEFT_CONFIG}, is not on this machine. Set it to the folder of the base "
        "there, give the base with --base (nemo-aligner convert hf-to-nemo or "
        "merge-lora), or start the job from the base with model.peft.restore_from_path naming the "
        "adapters."
    )


def adapter_section(path: Path, model: DictConfig) -> DictConfig:
    """The section `model` of the adapters in a folder, from that of their base; `UserError`: the
    folder is damaged or does not fit the model.
    """
    tensors = PeftTensors(path, model)
    section = OmegaConf.create(plain_dict(model, resolve=True))
    section.update(tensors.head_keys())
    name = tensors.config.base
    local = name is not None and Path(name).expanduser().exists()
    base = str(Path(str(name)).expanduser().absolute()) if local else name
    section[BASE_SECTION] = Base(base, base_checksum(path)).to_config()
    section.peft = {"peft_scheme": LORA, "lora_tuning": tensors.settings.to_config()}
    return section


def base_checksum(path: Path) -> str | None:
    """Checksum of the base, which only folders of this package hold."""
    with safe_open(path / WEIGHTS_FILE, framework="pt") as opened:
        return (opened.metadata() or {}).get(CHECKSUM)


def file_tensors(path: Path) -> Tensors:
    """The tensors in a folder of PEFT by name; `UserError`: missing, broken, pickled."""
    if (path / WEIGHTS_FILE).is_file():
        return Tensors(path, WEIGHTS_FILE)
    if (path / _PICKLED).is_file():
        raise UserError(
            f"{path} holds pickled adapters ({_PICKLED}), which can run code and are not read. "
            "Write safetensors where you trust it: PeftModel.from_pretrained(BASE, FOLDER)"
            ".save_pretrained(NEW_FOLDER)."
        )
    raise UserError(f"{path} holds no {WEIGHTS_FILE}; copy it again.")


@dataclass(frozen=True)
class _Adapter:
    stem: str  # its name in the file but for `A` and `B`
    rank: int
    alpha: float  # `alpha / rank` is what its output is multiplied by


class PeftTensors:
    """A `TensorSource` of the adapters in a folder of PEFT, and of their head; `UserError`: a file
    is damaged, or a tensor does not fit the base, whose section is `model`.
    """

    def __init__(self, path: Path, model: DictConfig):
        self.path = path
        self.config = peft_config.read(path)
        self.file = file_tensors(path)
        stems = [name.removesuffix(A) for name in self.file.shapes() if name.endswith(A)]
        names = [stem.removeprefix(NAME_PREFIX).removesuffix(".") for stem in stems]
        if self.config.role != hf.CAUSAL_LM:  # its head's name depends on it
            role = {"output_sequence": self.config.role == hf.PER_TOKEN}
            model = OmegaConf.merge(model, role)
        self.modules = modules_of(model, names)
        self._has_head = "reward_model_type" in model
        self._heads = self._find_heads()
        self._found = self._find_adapters()
        self._rank, self._alpha = max((each.rank, each.alpha) for each in self._found.values())
        self._check_complete()
        self.settings = self._settings()
        self._shapes = {key: self.file.shapes()[name] for key, name in self._heads.items()}
        self._places: dict[str, tuple[Weight, int]] = {}
        for weight, layer in self.modules.adapted(self.settings):
            a, b = weight.keys(layer, self.modules.layers_differ)
            self._shapes[a] = (self._blocks(weight) * self._rank, weight.columns)
            self._shapes[b] = (weight.rows, self._rank)
            self._places |= dict.fromkeys((a, b), (weight, layer - 1))
        self.dtype = self.file.read(stems[0] + A, (slice(0, 1), slice(0, 1))).dtype

    def _find_heads(self) -> dict[str, str]:
        if self.config.role == hf.CAUSAL_LM:
            return {}
        names = {hf.HEAD_KEY + kind: NAME_PREFIX + self.modules.head(kind) for kind in hf.KINDS}
        found = {key: name for key, name in names.items() if name in self.file.shapes()}
        if not found and not self._has_head:
            name = NAME_PREFIX + self.modules.head("weight")
            raise UserError(
                f"{self.path} says task_type={peft_config.TASKS[self.config.role]} but holds no "
                f"{name!r}, and its base has no head either; train it with modules_to_save "
                "naming the head."
            )
        for name in found.values():
            shape, hidden = self.file.shapes()[name], int(self.modules.keys["hidden_size"])
            if shape[1:] not in ((hidden,), ()) or not shape:
                raise UserError(
                    f"{self.path / WEIGHTS_FILE}: {name} of shape {shape} is no head of a model "
                    f"of width {hidden}; it belongs to another model."
                )
        return found

    def head_keys(self) -> dict[str, Any]:
        name = self._heads.get(hf.HEAD_KEY + "weight")
        if name is None:
            return {}
        keys: dict[str, Any] = {"output_sequence": self.config.role == hf.PER_TOKEN}
        if not self._has_head:
            numbers = self.file.shapes()[name][0]
            kind = "regression" if numbers > 1 else "binary_ranking"
            keys |= {"reward_model_type": kind, "regression": {"num_attributes": numbers}}
        return keys

    def _find_adapters(self) -> dict[tuple[str, int, int], _Adapter]:
        """By target, layer (from 0) and number of the projection in the weight."""
        found: dict[tuple[str, int, int], _Adapter] = {}
        for name in self.file.shapes():
            if name in self._heads.values():
                continue
            module = name.removeprefix(NAME_PREFIX).removesuffix("." + A).removesuffix("." + B)
            if not name.startswith(NAME_PREFIX) or module not in self.modules.places:
                raise self._no_place(name)
            weight, index, layer = self.modules.places[module]
            stem = f"{NAME_PREFIX}{module}."
            rank = self._checked_rank(module, stem, weight, index)
            alpha = self.config.alpha_for(module, rank)
            found[weight.target, layer, index] = _Adapter(stem, rank, alpha)
        if not found:
            raise UserError(f"{self.path / WEIGHTS_FILE} holds no adapters.")
        return found

    def _no_place(self, name: str) -> UserError:
        there = sorted({self.modules.short_name(w, i) for w, i, _ in self.modules.places.values()})
        layout = self.modules.layout
        return hf.Unsupported(
            f"{self.path / WEIGHTS_FILE} holds {name!r}, which has no place in a model of "
            f"{layout.architecture.class_name} with {layout.layers} layers; "
            f"adapters are those (lora_A, lora_B) of {', '.join(there)}. {peft_config.REMEDY}"
        )

    def _checked_rank(self, module: str, stem: str, weight: Weight, index: int) -> int:
        shapes = self.file.shapes()
        for one, other in ((A, B), (B, A)):
            if stem + one not in shapes:
                raise UserError(
                    f"{self.path / WEIGHTS_FILE} holds {stem + other!r} but not "
                    f"{stem + one!r}; copy it again."
                )
        a, b = shapes[stem + A], shapes[stem + B]
        rows, rank = self.modules.rows(weight, index), self.config.rank_for(module)
        if a != (rank, weight.columns) or b != (rows, rank):
            raise UserError(
                f"{self.path / WEIGHTS_FILE}: {stem}lora_A and lora_B have the shapes {a} and "
                f"{b}, but with the rank {rank} of {PEFT_CONFIG} and the base's "
                f"weight of shape ({rows}, {weight.columns}) they would have "
                f"({rank}, {weight.columns}) and ({rows}, {rank}); they belong to another model."
            )
        return rank

    def _check_complete(self) -> None:
        """`UserError` if a listed module lacks adapters in a layer."""
        count = self.modules.layout.layers
        layers = range(count) if self.config.layers is None else self.config.layers
        for target, index in sorted({(target, index) for target, _layer, index in self._found}):
            weight = self.modules.weights[target]
            whole = "." + weight.rule.names[index].removesuffix(".")
            listed = any(whole.endswith("." + str(name)) for name in self.config.targets)
            for layer in layers if listed else ():
                if (target, layer, index) not in self._found:
                    raise UserError(
                        f"{self.path / WEIGHTS_FILE} lacks the adapter of "
                        f"{self.modules.name(weight, index, layer)!r}, which target_modules in "
                        f"{PEFT_CONFIG} lists; copy it again, or it was trained on a "
                        f"model with another number of layers than {count}."
                    )

    def _settings(self) -> LoRASettings:
        targets = {target for target, _layer, _index in self._found}
        layers = sorted({layer + 1 for _target, layer, _index in self._found})
        return LoRASettings(
            targets=tuple(target for target in TARGETS if target in targets),
            dim=self._rank,
            alpha=self._alpha,
            dropout=self.config.dropout,
            dropout_position="pre",
            column_init_method="kaiming",
            row_init_method="zero",
            layers=None if len(layers) == self.modules.layout.layers else tuple(layers),
            weight_tying=False,
            variant="canonical" if self.modules.separate else "nemo",
        )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, key: str, part: Slice) -> Tensor:
        if not is_adapter(key):
            return self.file.read(self._heads[key], part)
        weight, layer = self._places[key]
        rows, columns = (slice(a, a + 1) if isinstance(a, int) else a for a in part)
        if key.endswith(".a"):
            values = self._a(weight, layer, columns)[rows]
        else:
            values = self._b(weight, layer, rows)[:, columns]
        return values[tuple(0 if isinstance(a, int) else slice(None) for a in part)]

    def _blocks(self, weight: Weight) -> int:
        """The number of A's of an adapter here: GLM has one for gate and partner, but one each for
        queries, keys and values.
        """
        gated = weight.target == "mlp_fc1" and is_gated(self.modules.keys)
        return 2 if gated and self.modules.separate else len(weight.rule.names)

    def _a(self, weight: Weight, layer: int, columns: slice) -> Tensor:
        """`[blocks * dim, columns]`."""
        width = columns.stop - columns.start
        result = torch.zeros(self._blocks(weight), self._rank, width, dtype=self.dtype)
        for index, block in enumerate(result):
            index = min(index, len(weight.rule.names) - 1)
            adapter = self._found.get((weight.target, layer, index))
            if adapter is not None:
                wanted = (slice(0, adapter.rank), columns)
                block[: adapter.rank] = self.file.read(adapter.stem + A, wanted)
        return result.flatten(0, 1)

    def _b(self, weight: Weight, layer: int, rows: slice) -> Tensor:
        """`[rows, dim]`, in the order of Megatron Core."""
        result = torch.zeros(rows.stop - rows.start, self._rank, dtype=self.dtype)
        runs = weight.rule.runs(weight.rows, self.modules.layout.heads)
        for run, theirs, own in hf.within(runs, rows):
            index = list(weight.rule.names).index(run.name)
            adapter = self._found.get((weight.target, layer, index))
            if adapter is not None:
                values = self.file.read(adapter.stem + B, (theirs, slice(0, adapter.rank)))
                factor = adapter.alpha / adapter.rank / self.settings.scale
                if factor != 1:  # all adapters have one scale here
                    values = values.float() * factor
                result[own, : adapter.rank] = values
        return result


# --- writing ---


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
    """Write a folder of PEFT, which is there when complete, or not at all; in one process.

    Args:
        source: of the adapters and their head, as `checkpoint/adapters.py` names them.
        base: its path is what the folder names.
        drop_head_bias: leave out the bias of a reward model's head, which has no place there.

    Raises:
        UserError: Hugging Face cannot express the model, or the source is damaged.
    """
    modules = modules_of(section)
    role, skipped = writing.role_of(modules.keys, source, drop_head_bias)
    tensors, targets, wide = _adapters(modules, source, settings)
    heads = [] if role == hf.CAUSAL_LM else [modules.head("").rstrip(".").rpartition(".")[2]]
    for kind in hf.KINDS if heads else ():
        if hf.HEAD_KEY + kind in source.shapes() and hf.HEAD + kind not in skipped:
            tensors[NAME_PREFIX + modules.head(kind)] = whole_tensor(source, hf.HEAD_KEY + kind)
    layers = settings.layers

    def alpha(times: int) -> float:
        value = times * settings.alpha
        return int(value) if float(value).is_integer() else value

    config = {
        "peft_type": "LORA",
        "task_type": peft_config.TASKS[role],
        "base_model_name_or_path": base.path,
        "r": settings.dim,
        "lora_alpha": alpha(1),
        "rank_pattern": {name: times * settings.dim for name, times in wide.items()},
        "alpha_pattern": {name: alpha(times) for name, times in wide.items()},
        "use_rslora": False,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "layers_to_transform": None if layers is None else [layer - 1 for layer in layers],
        "layers_pattern": None,
        "fan_in_fan_out": any(modules.weights[t].rule.transposed for t in settings.targets),
        "modules_to_save": heads or None,
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    # Copies: several modules may share one A here.
    copies = {name: tensor.to(dtype or tensor.dtype).clone() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | ({CHECKSUM: base.checksum} if base.checksum else {})
    with replaced_folder(target) as folder:
        save_file(copies, folder / WEIGHTS_FILE, metadata)
        writing.copy_tokenizer(section, folder)
        writing.write_json(folder / PEFT_CONFIG, config)


def _adapters(
    modules: Modules, source: TensorSource, settings: LoRASettings
) -> tuple[dict[str, Tensor], list[str], dict[str, int]]:
    """Tensors by PEFT's names, modules with some, and those whose rank is a multiple, with it."""
    found: dict[str, dict[str, Tensor]] = {}  # by the module's short name
    wide: dict[str, int] = {}
    for weight, layer in modules.adapted(settings):
        keys = [weight.keys(layer, numbered) for numbered in (False, True)]
        stored = next((each for each in keys if {*each} <= source.shapes().keys()), None)
        if stored is None:
            raise UserError(f"the checkpoint lacks {keys[0][0]}, an adapter; copy it again.")
        pairs = _pairs(modules, weight, settings, *(whole_tensor(source, k) for k in stored))
        for index, (a, b) in enumerate(pairs):
            name = modules.short_name(weight, index)
            stem = f"{NAME_PREFIX}{modules.name(weight, index, layer - 1)}."
            found.setdefault(name, {}).update({stem + A: a, stem + B: b})
            if len(a) != settings.dim:
                wide[name] = len(a) // settings.dim
    used = [name for name, each in found.items() if any(bool(t.any()) for t in each.values())]
    used = used or list(found)  # adapters that do nothing are adapters all the same
    tensors = {name: tensor for each in used for name, tensor in found[each].items()}
    return tensors, used, wide


def _pairs(
    modules: Modules, weight: Weight, settings: LoRASettings, a: Tensor, b: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """A and B of each module of a weight, from `[dim or blocks * dim, in]` and `[out, dim]`."""
    canonical, count = settings.variant == "canonical", len(weight.rule.names)
    if canonical and count == 1:  # several projections may be one module
        b = expanded(b, TARGETS[weight.target] + ".", modules.keys)
    blocks_of_a = a.chunk(count) if canonical else [a] * count
    rows = {
        name: b.new_empty(modules.rows(weight, index), b.shape[1])
        for index, name in enumerate(weight.rule.names)
    }
    hf.spread(weight.rule.runs(weight.rows, modules.layout.heads), b, rows)
    return list(zip(blocks_of_a, rows.values(), strict=True))
