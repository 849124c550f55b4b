# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder as a checkpoint: its files, its section `model`, its weights by Megatron
Core's names. No code and no pickle of a folder is run.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_aligner.checkpoint import stored_weights
from nemo_aligner.checkpoint.forms import HF_CONFIG, HF_WEIGHTS
from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES, REFUSED
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError

GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE, INDEX_FILE = HF_WEIGHTS
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, else `UserError`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object; copy it again.")
    return content


class Tensors:
    """A `TensorSource` of safetensors `files` in a folder, by their names. `listed`: the file of
    each tensor by the index, if there is one.
    """

    def __init__(self, path: Path, files: Iterable[str], listed: Mapping[str, str] | None = None):
        self.path = path
        self.files: dict[str, str] = {}
        self._open: tuple[str, Any] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        for each in files:
            opened = self._opened(each)
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_slice(name)
                if tensor.get_dtype() not in DTYPES.values():
                    raise UserError(
                        f"{path / each} holds {name} of the type {tensor.get_dtype()}; what is "
                        f"read: {', '.join(DTYPES.values())}. Name a folder that is not quantized."
                    )
                if listed is None or listed.get(name) == each:  # else it does not count
                    self.files[name] = each
                    self._shapes[name] = tuple(tensor.get_shape())
        if listed and (absent := sorted(listed.keys() - self._shapes.keys())):
            raise UserError(
                f"{path} lacks {absent[0]!r}, which its {INDEX_FILE} lists in "
                f"{listed[absent[0]]}; copy the folder again."
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, key: str, part: Slice) -> Tensor:
        file = self.files[key]
        try:
            return stored_weights.checked(
                self._opened(file).get_slice(key)[part], key, self.path / file
            )
        except SafetensorError as error:
            raise self._damaged(file, error) from error

    def _opened(self, file: str) -> Any:
        # One at a time: what was read stays in memory until the file is closed. A layer lies in
        # one or two files.
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                self._open = file, safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._open[1]

    def _damaged(self, file: str, error: Exception) -> UserError:
        return UserError(f"{self.path / file} is damaged or incomplete ({error}); copy it again.")


def _tensors(path: Path) -> Tensors:
    if (path / INDEX_FILE).is_file():
        files = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise UserError(f"{path / INDEX_FILE} has no weight_map; copy it again.")
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise UserError(
                    f"{path / INDEX_FILE} names {file!r}, which is not in the folder; do not use "
                    "this folder."
                )
            if not (path / file).is_file():
                raise UserError(
                    f"{path} lacks the file {file} of its {INDEX_FILE}; copy it again."
                )
        return Tensors(path, dict.fromkeys(files.values()), files)
    if (path / WEIGHTS_FILE).is_file():
        return Tensors(path, [WEIGHTS_FILE])
    if any((path / name).is_file() for name in _PICKLED):
        raise UserError(
            f"{path} holds pickled weights only, which can run code and are not read. Write "
            "safetensors where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)."
        )
    raise UserError(f"{path} holds no {WEIGHTS_FILE} and no {INDEX_FILE}; copy it again.")


_WITH_EXPERTS = ("mlp.router.", "mlp.experts.", "mlp.shared_experts.", "pre_mlp_layernorm.")
_WITH_MLP = ("mlp.linear_",)
_COMPARED_ROWS = 512  # of a tied output layer that is stored all the same
# Buffers that some versions of transformers stored.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class FolderWeights:
    """A `TensorSource` of the weights in a folder, with layers by number; `UserError`: a file is
    damaged, or lacks or has weights other than those of the complete `keys`.
    """

    def __init__(
        self, path: Path, architecture: hf.Architecture, keys: Mapping[str, Any], has_head: bool
    ):
        self.path, self.keys = path, keys
        self.layout = hf.Layout(architecture, keys)
        self.tensors = _tensors(path)
        # Whole name -> name in the files: folders of base models lack the prefix.
        heads = (rule.names[0] for rule in self.layout.outside.values())
        whole = (architecture.base, *(name[1:] for name in heads if name.startswith("/")))
        self._names = {
            name if name.startswith(whole) else architecture.base + name: name
            for name in self.tensors.shapes()
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        tied = bool(keys.get("share_embeddings_and_output_weights"))
        absent = ("output_layer.",) * (has_head or tied) + (hf.HEAD,) * (not has_head)
        used, lacking = self._find(absent)
        unused = self._names.keys() - used - {*("lm_head.weight",) * tied}
        left = sorted(name for name in unused if not name.endswith(_BUFFERS))
        if left:
            raise UserError(
                f"{path} holds {len(left)} weight(s) that have no place in a model of "
                f"{architecture.model_type}, such as {left[0]!r}; the model would compute "
                "something else."
            )
        if lacking:
            raise UserError(
                f"{path} lacks {lacking[0]!r} of a model with the keys of its config.json; copy "
                "it again."
            )
        if not tied or hf.TABLES[1] not in self._shapes:
            return
        rows = self._shapes[hf.TABLES[1]][0]
        for start in (0, max(rows - _COMPARED_ROWS, 0)):
            part: Slice = (slice(start, min(start + _COMPARED_ROWS, rows)), slice(None))
            table, output_layer = (self.read(key, part) for key in hf.TABLES)
            if not torch.equal(table, output_layer):
                raise UserError(
                    f"{path} has an lm_head.weight that differs from its embeddings, but "
                    "config.json says tie_word_embeddings=true; set it to false there if the "
                    "output layer counts."
                )
        del self._shapes[hf.TABLES[1]]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _find(self, absent: tuple[str, ...]) -> tuple[set[str], list[str]]:
        """Note the shapes by Megatron Core's names, with layers by number and experts in front.
        Returns the names of Hugging Face that are used, and those that the folder lacks, but for
        the weights `absent` outside the layers.
        """
        used, lacking = set[str](), list[str]()
        layout, sizes = self.layout, self.layout.sizes()
        has_experts = hf.expert_layers(self.keys) if layout.experts else [0] * layout.layers
        for stem, rule in layout.rules.items():
            in_layer = stem.startswith(stored_weights.LAYERS)
            name = stem.removeprefix(stored_weights.LAYERS if in_layer else hf.PREFIX)
            experts = layout.experts if "{expert}" in rule.names[0] else 0
            kinds = [kind for kind in hf.KINDS if kind == "weight" or self._has_bias(stem)]
            layers = range(layout.layers) if in_layer else (None,)
            for kind, layer in itertools.product(kinds, layers):
                if layer is not None and name.startswith(
                    _WITH_MLP if has_experts[layer] else _WITH_EXPERTS
                ):
                    continue
                each = [layout.named(rule, kind, layer, n) for n in range(experts) or (None,)]
                axes = 2 if kind == "weight" else 1
                found = [self._shape(one, sizes.get(name, ())[:axes]) for one in each]
                needed = kind == "weight" and not name.startswith(absent)
                for one, shape in zip(each, found, strict=True):
                    if shape is not None:
                        used |= {*one.names}
                    elif needed or any(found):
                        lacking.append(one.names[0])
                if found[0] is not None:
                    key = stem if layer is None else stored_weights.numbered(stem, layer)
                    self._shapes[key + kind] = ((experts,) if experts else ()) + found[0]
        return used, lacking

    def _has_bias(self, stem: str) -> bool:
        if stem.endswith(hf.HEAD):
            return True
        if stem.endswith("norm_") or "layernorm" in stem:
            layernorm = str(self.keys["normalization"]).lower().startswith("layernorm")
            return layernorm and bool(self.keys["layernorm_bias"])
        qkv = self.keys.get("add_qkv_bias") and stem.endswith("linear_qkv.")
        return bool(qkv or (self.keys["bias"] and "linear_" in stem))

    def _shape(self, rule: hf.Rule, size: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of the weight, `size` if that is known; None: the folder has no part of it."""
        shapes = self.tensors.shapes()
        stored = {name: shapes[self._names[name]] for name in rule.names if name in self._names}
        if not stored:
            return None
        absent = [name for name in rule.names if name not in stored]
        if absent:
            raise UserError(
                f"{self.path} has {next(iter(stored))!r} but not {absent[0]!r}; copy it again."
            )
        rows = sum(each[0] for each in stored.values() if each)
        shape = size or (rows, *stored[rule.names[0]][1:])
        for name, wanted in rule.shapes(shape, self.layout.heads).items():
            if stored[name] != wanted:
                raise UserError(
                    f"{self.path}: {name} has the shape {stored[name]}, but the sizes in its "
                    f"config.json ask for {wanted}; they belong to different models."
                )
        return shape

    def read(self, key: str, part: Slice) -> Tensor:
        index = tuple(axis for axis in part if isinstance(axis, int))
        rows, *columns = (axis for axis in part if isinstance(axis, slice))
        rule = self.layout.rule(key, index)
        assert rule is not None, key
        runs = rule.runs(self._shapes[key][len(index)], self.layout.heads)
        pieces = []
        for run, theirs, _own in hf.within(runs, rows):
            wanted = (theirs, *columns)
            index_in_file = wanted[::-1] if rule.transposed else wanted
            piece = self.tensors.read(self._names[run.name], index_in_file)
            pieces.append(piece.T if rule.transposed and columns else piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


# Key of `model` with the content of `config.json`, and, under `GENERATION`, of
# `generation_config.json`; what training does not change is written back.
ORIGIN, GENERATION = "hugging_face", "generation_config"
_NOT_KEPT = ("auto_map", "num_labels")  # names code, which does not travel; follows from labels
FILES_OF_TOKENIZERS = tuple(
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt".split()
)


def model_section(path: Path) -> DictConfig:
    """The section `model` for a folder; `UserError`: damaged, or it cannot be computed here."""
    given = read_json(path / HF_CONFIG)
    kind = given.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UserError(f"{path / HF_CONFIG} has no model_type; it is not a model's.")
    if kind not in ARCHITECTURES:
        why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise hf.Unsupported(
            f"{path}: the architecture {kind!r} is not supported{why}; what is: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    if given.get("quantization_config"):
        raise hf.Unsupported(
            f"{path} holds quantized weights (quantization_config), which are not supported; name "
            "a folder with float weights."
        )
    try:
        config, defaults = hf.as_class_reads(given), hf.as_class_reads({"model_type": kind})
        keys = hf.model_keys(ARCHITECTURES[kind], config, defaults)
    except hf.Unsupported as error:
        raise hf.Unsupported(f"{path}: {error}") from error
    keys["encoder_seq_length"] = keys["max_position_embeddings"]
    classes = " ".join(config.get("architectures") or ())
    if classes.endswith((hf.PER_SAMPLE, hf.PER_TOKEN)):
        keys |= head_keys(len(config.get("id2label") or (0, 1)), classes.endswith(hf.PER_TOKEN))
        if not keys["output_sequence"]:
            # transformers reads a reward at the last token other than this one.
            keys["pad_token_id"] = config.get("pad_token_id")
    if any((path / name).is_file() for name in FILES_OF_TOKENIZERS):
        keys["tokenizer"] = {"library": "huggingface", "type": str(path)}
    origin = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    if (path / GENERATION_FILE).is_file():
        origin[GENERATION] = read_json(path / GENERATION_FILE)
    ends = end_token_ids(origin)
    if ends:
        keys.setdefault("tokenizer", {})["end_token_ids"] = ends
    keys[ORIGIN] = origin
    return OmegaConf.create(keys)


def head_keys(numbers: int, per_token: bool) -> dict[str, Any]:
    """Keys of a reward model, whose head gives numbers per sample, or of a critic (per token)."""
    return {
        "reward_model_type": "regression" if numbers > 1 else "binary_ranking",
        "regression": {"num_attributes": numbers},
        "output_sequence": per_token,
    }


def end_token_ids(origin: Mapping[str, Any]) -> list[int]:
    """The ids that end a response by the value of `ORIGIN`: of `generation_config.json`, else of
    `config.json`. `UserError`: they are no ids.
    """
    found = (origin.get(GENERATION) or {}).get("eos_token_id")
    found = origin.get("eos_token_id") if found is None else found
    ids = [] if found is None else list(found) if isinstance(found, Sequence) else [found]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise UserError(
            f"eos_token_id={found!r} of {GENERATION_FILE} or config.json must be an id or a list "
            "of ids; correct the file."
        )
    return ids


def vocab_rows(section: DictConfig, ids: Callable[[], int]) -> int:
    """Rows of the tables without padding: `ids()` unless `ORIGIN` or the section says them."""
    origin = section.get(ORIGIN) or {}
    rows = origin["vocab_size"] if "vocab_size" in origin else section.get("override_vocab_size")
    return int(rows or ids())


def weights(path: Path) -> TensorSource:
    """The weights of a folder; `UserError`: a file is missing or damaged, or one does not fit."""
    section = model_section(path)
    architecture = ARCHITECTURES[section[ORIGIN]["model_type"]]
    keys = plain_dict(complete_model(section), resolve=True)
    return stored_weights.EitherName(
        FolderWeights(path, architecture, keys, "reward_model_type" in section)
    )
