# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters (`checkpoint/adapters.py`) in folders of Hugging Face's PEFT, read and written.

A weight of Megatron Core may be several in Hugging Face (queries, keys, values; gate and up): each
then has an adapter with an A of its own in PEFT, the form "canonical". Where Hugging Face has one
weight too, PEFT has one A: the form "nemo".

A projection without an adapter gets one of zeros, whose gradient is zero too: it stays away, as in
PEFT. One that is zero in all layers is not written. Lower ranks are filled up with rows of zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_aligner.checkpoint import stored_weights
from nemo_aligner.checkpoint.adapters import BASE_SECTION, Base, expanded, is_adapter
from nemo_aligner.checkpoint.folders import replaced_folder
from nemo_aligner.checkpoint.forms import PEFT_CONFIG
from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face import writing
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES, expressing
from nemo_aligner.checkpoint.hugging_face.peft_config import REMEDY, TASKS, read_config
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN, Tensors, head_keys
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource, whole_tensor
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
        stem = f"{stored_weights.LAYERS}{number}{TARGETS[self.target]}.lora.{layer}."
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
        return self.layout.named(weight.rule, "", layer).names[index].removesuffix(".")

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

    def rows(self, weight: Weight) -> dict[str, int]:
        """Rows of B of each projection, by the name in its rule."""
        shapes = weight.rule.shapes((weight.rows,), self.layout.heads)
        return {name: rows for name, (rows,) in shapes.items()}

    def head(self, kind: str) -> str:
        """Hugging Face's name of the head's `weight` or `bias`."""
        return self.layout.named(self.layout.outside[hf.HEAD], kind).names[0]


def modules_of(section: DictConfig, names: Sequence[str] = ()) -> Modules:
    """The modules of a model; `Unsupported`: no architecture can express it. `names`, of modules
    with adapters, decide between architectures if the model came from none.
    """
    keys = plain_dict(complete_model(section), resolve=True)
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
    config = read_config(path)
    if (found := config.base_here()) is not None:
        return found
    raise UserError(
        f"{path} holds adapters, but their base, base_model_name_or_path={config.base!r} in "
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
    here = tensors.config.base_here()
    base = Base(tensors.config.base if here is None else str(here), base_checksum(path))
    section[BASE_SECTION] = base.to_config()
    section.peft = {"peft_scheme": LORA, "lora_tuning": tensors.settings.to_config()}
    return section


def base_checksum(path: Path) -> str | None:
    """Checksum of the base, which only folders of this package hold."""
    with safe_open(path / WEIGHTS_FILE, framework="pt") as opened:
        return (opened.metadata() or {}).get(CHECKSUM)


def file_tensors(path: Path) -> Tensors:
    """The tensors in a folder of PEFT by name; `UserError`: missing, broken, pickled."""
    if (path / WEIGHTS_FILE).is_file():
        return Tensors(path, [WEIGHTS_FILE])
    if (path / _PICKLED).is_file():
        raise UserError(
            f"{path} holds pickled adapters ({_PICKLED}), which can run code and are not read. "
            "Write safetensors where you trust it: PeftModel.from_pretrained(BASE, FOLDER)"
            ".save_pretrained(NEW_FOLDER)."
        )
    raise UserError(f"{path} holds no {WEIGHTS_FILE}; copy it again.")


class PeftTensors:
    """A `TensorSource` of the adapters in a folder of PEFT, and of their head; `UserError`: a file
    is damaged, or a tensor does not fit the base, whose section is `model`.
    """

    def __init__(self, path: Path, model: DictConfig):
        self.path, self.place = path, path / WEIGHTS_FILE
        self.config = read_config(path)
        self.file = file_tensors(path)
        first = [name for name in self.file.shapes() if name.endswith("." + A)]
        names = [name.removeprefix(NAME_PREFIX).removesuffix("." + A) for name in first]
        if self.config.role != hf.CAUSAL_LM:  # its head's name depends on it
            role = {"output_sequence": self.config.role == hf.PER_TOKEN}
            model = OmegaConf.merge(model, role)
        self.modules = modules_of(model, names)
        self._has_head = "reward_model_type" in model
        self._heads = self._find_heads()
        self._found = self._find_adapters()
        self._check_complete()
        self.settings = self._settings()
        self.dtype = stored_weights.stored_dtype(self.file, first[0])
        self._shapes = {key: self.file.shapes()[name] for key, name in self._heads.items()}
        self._places: dict[str, tuple[Weight, int]] = {}
        for weight, layer in self.modules.adapted(self.settings):
            a, b = weight.keys(layer, self.modules.layers_differ)
            self._shapes[a] = (self._blocks(weight) * self.settings.dim, weight.columns)
            self._shapes[b] = (weight.rows, self.settings.dim)
            self._places |= dict.fromkeys((a, b), (weight, layer - 1))

    def _find_heads(self) -> dict[str, str]:
        if self.config.role == hf.CAUSAL_LM:
            return {}
        names = {hf.HEAD_KEY + kind: NAME_PREFIX + self.modules.head(kind) for kind in hf.KINDS}
        found = {key: name for key, name in names.items() if name in self.file.shapes()}
        if not found and not self._has_head:
            raise UserError(
                f"{self.path} says task_type={TASKS[self.config.role]} but holds no "
                f"{names[hf.HEAD_KEY + 'weight']!r}, and its base has no head either; train it "
                "with modules_to_save naming the head."
            )
        for name in found.values():
            shape, hidden = self.file.shapes()[name], int(self.modules.keys["hidden_size"])
            if shape[1:] not in ((hidden,), ()) or not shape:
                raise UserError(
                    f"{self.place}: {name} of shape {shape} is no head of a model "
                    f"of width {hidden}; it belongs to another model."
                )
        return found

    def head_keys(self) -> dict[str, Any]:
        name = self._heads.get(hf.HEAD_KEY + "weight")
        if name is None:
            return {}
        keys = head_keys(self.file.shapes()[name][0], self.config.role == hf.PER_TOKEN)
        return {"output_sequence": keys["output_sequence"]} if self._has_head else keys

    def _find_adapters(self) -> dict[str, None]:
        """The modules with adapters, in order."""
        found: dict[str, None] = {}
        shapes = self.file.shapes()
        for name in shapes:
            if name in self._heads.values():
                continue
            module = name.removeprefix(NAME_PREFIX).removesuffix("." + A).removesuffix("." + B)
            if not name.startswith(NAME_PREFIX) or module not in self.modules.places:
                places = self.modules.places.values()
                there = sorted({self.modules.short_name(w, index) for w, index, _ in places})
                layout = self.modules.layout
                raise hf.Unsupported(
                    f"{self.place} holds {name!r}, which has no place in a model of "
                    f"{layout.architecture.model_type} with {layout.layers} layers; adapters are "
                    f"those (lora_A, lora_B) of {', '.join(there)}. {REMEDY}"
                )
            found[module] = None
            weight, index, _layer = self.modules.places[module]
            stem = f"{NAME_PREFIX}{module}."
            for one, other in ((A, B), (B, A)):
                if stem + one not in shapes:
                    raise UserError(
                        f"{self.place} holds {stem + other!r} but not {stem + one!r}; copy it "
                        "again."
                    )
            a, b, rank = shapes[stem + A], shapes[stem + B], self.config.rank_for(module)
            rows = self.modules.rows(weight)[weight.rule.names[index]]
            if a != (rank, weight.columns) or b != (rows, rank):
                raise UserError(
                    f"{self.place}: {stem}lora_A and lora_B have the shapes {a} and {b}, but with "
                    f"the rank {rank} of {PEFT_CONFIG} and the base's weight of shape ({rows}, "
                    f"{weight.columns}) they would have ({rank}, {weight.columns}) and ({rows}, "
                    f"{rank}); they belong to another model."
                )
        if not found:
            raise UserError(f"{self.place} holds no adapters.")
        return found

    def _check_complete(self) -> None:
        """`UserError` if a listed module lacks adapters in a layer."""
        count = self.modules.layout.layers
        layers = range(count) if self.config.layers is None else self.config.layers
        for weight, index in dict.fromkeys(self.modules.places[m][:2] for m in self._found):
            whole = "." + weight.rule.names[index].removesuffix(".")
            listed = any(whole.endswith("." + str(name)) for name in self.config.targets)
            for layer in layers if listed else ():
                module = self.modules.name(weight, index, layer)
                if module not in self._found:
                    raise UserError(
                        f"{self.place} lacks the adapter of {module!r}, which "
                        f"target_modules in {PEFT_CONFIG} lists; copy it again, or it was trained "
                        f"on a model with another number of layers than {count}."
                    )

    def _settings(self) -> LoRASettings:
        config = self.config
        rank, alpha = max((config.rank_for(each), config.alpha_for(each)) for each in self._found)
        places = [self.modules.places[module] for module in self._found]
        targets = {weight.target for weight, _index, _layer in places}
        layers = sorted({layer + 1 for _weight, _index, layer in places})
        return LoRASettings(
            targets=tuple(target for target in TARGETS if target in targets),
            dim=rank,
            alpha=alpha,
            dropout=config.dropout,
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
        is_a, names, dim = key.endswith(".a"), weight.rule.names, self.settings.dim
        stored: dict[str, Tensor] = {}
        for index, name in enumerate(names):
            module = self.modules.name(weight, index, layer)
            if module in self._found:
                whole = f"{NAME_PREFIX}{module}.{A if is_a else B}"
                stored[name] = whole_tensor(self.file, whole)
                scale = self.config.alpha_for(module) / self.config.rank_for(module)
                factor = scale / self.settings.scale  # all adapters have one scale here
                if not is_a and factor != 1:
                    stored[name] = stored[name].float() * factor
        if is_a:  # [blocks * dim, columns]
            result = torch.zeros(self._blocks(weight), dim, weight.columns, dtype=self.dtype)
            for block, name in zip(result, (*names, names[-1])):
                if name in stored:
                    block[: len(stored[name])] = stored[name]
            return result.flatten(0, 1)[part]
        result = torch.zeros(weight.rows, dim, dtype=self.dtype)  # in the order of Megatron Core
        runs = weight.rule.runs(weight.rows, self.modules.layout.heads)
        for run, theirs, own in hf.within(runs, slice(0, weight.rows)):
            if run.name in stored:
                values = stored[run.name][theirs]
                result[own, : values.shape[1]] = values
        return result[part]

    def _blocks(self, weight: Weight) -> int:
        """The number of A's of an adapter here: GLM has one for gate and partner, but one each for
        queries, keys and values.
        """
        gated = weight.target == "mlp_fc1" and stored_weights.is_gated(self.modules.keys)
        return 2 if gated and self.modules.separate else len(weight.rule.names)


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
    layers, alpha = settings.layers, settings.alpha
    alpha = int(alpha) if float(alpha).is_integer() else alpha
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[role],
        "base_model_name_or_path": base.path,
        "r": settings.dim,
        "lora_alpha": alpha,
        "rank_pattern": {name: times * settings.dim for name, times in wide.items()},
        "alpha_pattern": {name: times * alpha for name, times in wide.items()},
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
        # [dim or blocks * dim, in], [out, dim]
        a, b = (whole_tensor(source, key) for key in stored)
        canonical, count = settings.variant == "canonical", len(weight.rule.names)
        if canonical and count == 1:  # several projections may be one module
            b = expanded(b, TARGETS[weight.target] + ".", modules.keys)
        blocks_of_a = a.chunk(count) if canonical else [a] * count
        rows = {name: b.new_empty(n, b.shape[1]) for name, n in modules.rows(weight).items()}
        hf.spread(weight.rule.runs(weight.rows, modules.layout.heads), b, rows)
        for index, (own_a, own_b) in enumerate(zip(blocks_of_a, rows.values(), strict=True)):
            name = modules.short_name(weight, index)
            stem = f"{NAME_PREFIX}{modules.name(weight, index, layer - 1)}."
            found.setdefault(name, {}).update({stem + A: own_a, stem + B: own_b})
            if len(own_a) != settings.dim:
                wide[name] = len(own_a) // settings.dim
    used = [name for name, each in found.items() if any(bool(t.any()) for t in each.values())]
    used = used or list(found)  # adapters that do nothing are adapters all the same
    tensors = {name: tensor for each in used for name, tensor in found[each].items()}
    return tensors, used, wide
