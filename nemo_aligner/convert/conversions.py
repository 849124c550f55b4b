# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between Hugging Face, PEFT and `.nemo`, adapters merged with their base, and to
Megatron-LM; one tensor in memory at a time. And what a checkpoint holds.
"""

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.checkpoint import (
    adapters,
    dist_ckpt,
    forms,
    megatron,
    megatron_keys,
    nemo_archive,
    stored_weights,
)
from nemo_aligner.checkpoint.dist_ckpt import Chunk
from nemo_aligner.checkpoint.file_references import OUTSIDE
from nemo_aligner.checkpoint.folders import replaced_folder
from nemo_aligner.checkpoint.hugging_face import peft, reading, writing
from nemo_aligner.checkpoint.hugging_face.architecture import TABLES
from nemo_aligner.checkpoint.sources import Source, open_source
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.parallel_rules import pad_vocab_size
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

_CONFIG_FILES = (forms.HF_CONFIG, forms.CONFIG_FILE, forms.PEFT_CONFIG, forms.TRACKER)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    dtype: str = "as-stored"  # or fp32, bf16, fp16: of the weights that are written
    overwrite: bool = False  # replace what stands at the target
    progress: bool = True  # show a progress bar
    base: Path | None = None  # where the base of adapters lies; None: where they say
    tokenizer: Path | None = None  # Hugging Face folder or SentencePiece model; None: the source's
    drop_head_bias: bool = False  # of a reward model, for which Hugging Face has no place
    # `model_type` to write; None: that of the folder it came from, else the first that can be
    architecture: str | None = None
    shard_size: float = 5.0  # of the largest file of a Hugging Face folder, in GB
    # Whether adapters are written with their base to Hugging Face's form; None: if there are some
    merged: bool | None = None

    def base_source(self) -> Source | None:
        """`UserError`: it does not exist or does not load."""
        return None if self.base is None else open_source(self.base, "--base")

    def bar(self, total: int = 0) -> tqdm:
        return tqdm(
            total=total, unit="B", unit_scale=True, disable=not self.progress, desc="weights"
        )


def check_target(source: Path, target: Path, options: Options) -> Path:
    """The absolute path to write; `UserError` if something stands there."""
    target = target.expanduser().absolute()
    if source.expanduser().resolve().is_relative_to(target.resolve()):
        raise UserError(f"{target} holds the source; name another target.")
    a_model = target.is_file() or any((target / file).is_file() for file in _CONFIG_FILES)
    if options.overwrite and target.exists() and not a_model and any(target.iterdir()):
        raise UserError(f"{target} is a folder of something else; name another target.")
    if target.exists() and not options.overwrite:
        raise UserError(f"{target} exists; name another target, or replace it with --overwrite.")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} is not a folder; make it first.")
    return target


# --- to .nemo: a file that ends in `.nemo`, or a folder, which appears when it is complete ---


def to_nemo(source: Path, target: Path, options: Options) -> None:
    """Write a Hugging Face folder's model, or a folder of PEFT's adapters, as a `.nemo`; in one
    process. `UserError`: the folder or the base is damaged or not computed here, or the target
    exists.
    """
    target = check_target(source, target, options)
    if not source.expanduser().exists():
        source = forms.hub_folder(str(source), "HF_FOLDER") or source
    source = source.expanduser().absolute()
    if forms.form_of_path(source) == "peft":
        checkpoint = open_source(source, "HF_FOLDER")
        with checkpoint.opened(options.base_source()) as (section, base, weights, _merged):
            assert base is not None
            section[adapters.BASE_SECTION] = base.to_config()
            _write_nemo(target, section, weights, options)
        return
    if not forms.is_hugging_face(source):
        raise UserError(f"{source} is not a Hugging Face folder: it has no {forms.HF_CONFIG}.")
    if options.base is not None:
        raise UserError(
            f"--base is for adapters, but {source} holds a model with all its weights; leave it "
            "out."
        )
    section = reading.model_section(source)
    weights = reading.weights(source)
    if OmegaConf.select(section, "tokenizer.library"):
        ids = build_tokenizer(complete_model(section).tokenizer).vocab_size
        if ids > section.override_vocab_size:
            raise UserError(
                f"the tokenizer in {section.tokenizer.type} has {ids} ids, the embedding table "
                f"{section.override_vocab_size} rows; resize the model's embeddings, or use the "
                "tokenizer that belongs to it."
            )
    _write_nemo(target, section, weights, options)


def merge(source: Path, target: Path, options: Options) -> None:
    """Write adapters merged with their base as a `.nemo`. `UserError`: there are no adapters, the
    base is absent or another one, or the target exists.
    """
    target = check_target(source, target, options)
    with _opened(source, options, "ADAPTERS", option="merge-lora") as (section, _base, weights):
        _write_nemo(target, section, weights, options)


def _write_nemo(
    target: Path, section: DictConfig, weights: TensorSource, options: Options
) -> None:
    parts = _parts_of(weights, options)
    with options.bar(sum(map(_nbytes, parts))) as bar:

        def read(chunk: Chunk) -> Tensor:
            bar.update(_nbytes(chunk))
            return weights.read(chunk.key, parts[chunk]).to(chunk.dtype).reshape(chunk.size)

        write_weights = functools.partial(dist_ckpt.write, list(parts), read)
        nemo_archive.write(target, section, target.suffix != ".nemo", write_weights)


def _parts_of(weights: TensorSource, options: Options) -> dict[Chunk, Slice]:
    """What is written, by layers and experts in order, and the part that it is read from."""
    found: dict[Chunk, Slice] = {}
    shapes = weights.shapes()
    dtype_of = functools.cache(
        lambda key: DTYPES.get(options.dtype) or stored_weights.stored_dtype(weights, key)
    )
    for key, index in stored_weights.pieces(weights):
        shape = shapes[key]
        rest = shape[len(index) :]
        offset, size = (*index, *(0 for _ in rest)), (*(1 for _ in index), *rest)
        chunk = Chunk(key, shape, offset, size, dtype_of(key))
        found[chunk] = (*index, *(slice(0, length) for length in rest))
    return found


def _nbytes(chunk: Chunk) -> int:
    return torch.Size(chunk.size).numel() * chunk.dtype.itemsize


# --- from any form ---


@contextlib.contextmanager
def _opened(
    source: Path, options: Options, key: str, is_merged: bool = True, option: str = ""
) -> Iterator[tuple[DictConfig, adapters.Base | None, TensorSource]]:
    """Configuration, the base of adapters (None: there are none) and weights, or without
    `is_merged` those of adapters alone; `UserError`: `source`, called `key`, does not load, or
    holds no adapters although `option` is given.
    """
    checkpoint, own = open_source(source, key), options.tokenizer
    if own is not None and not own.exists():
        raise UserError(f"--tokenizer={own} does not exist; give a folder or a file.")
    opened = checkpoint.opened(options.base_source(), is_merged, option)
    with opened as (section, base, alone, weights):
        if own is not None:
            kind = ("huggingface", "type") if own.is_dir() else ("sentencepiece", "model")
            section.tokenizer = {"library": kind[0], kind[1]: str(own.expanduser().absolute())}
        if base is not None and is_merged:
            for part in (adapters.BASE_SECTION, "peft"):
                section.pop(part, None)
        yield section, base, weights if is_merged else alone


def _rows_of(section: DictConfig) -> int:
    """Rows of the tables without padding; 0: not known without the tokenizer."""
    settings = section.get("tokenizer") or OmegaConf.create({})
    outside = any(str(value).startswith(OUTSIDE) for value in settings.values())
    return reading.vocab_rows(
        section, lambda: 0 if outside else build_tokenizer(settings).vocab_size
    )


def from_nemo(source: Path, target: Path, options: Options) -> None:
    """Write a checkpoint's model as a Hugging Face folder, or adapters alone, which name
    `options.base`, else their own base, as one of PEFT; in one process. `UserError`: it is
    damaged, Hugging Face cannot express it, or the target exists.
    """
    target = check_target(source, target, options)
    is_merged, dtype = options.merged is not False, DTYPES.get(options.dtype)
    option = "--merged" * bool(options.merged)
    with _opened(source, options, "NEMO", is_merged, option) as (section, base, weights):
        if base is not None and not is_merged:
            if options.architecture is not None:
                raise UserError(
                    f"--architecture chooses how all weights are written, but {source} holds "
                    "adapters; add --merged to write them with their base, or leave it out."
                )
            settings, bias = adapters.settings_in(section), options.drop_head_bias
            peft.write_folder(
                target, weights, section, settings, base, dtype=dtype, drop_head_bias=bias
            )
            return
        with options.bar() as bar:

            def show(written: int, total: int) -> None:
                bar.total = total
                bar.update(written)

            writing.write_folder(
                target,
                weights,
                section,
                _rows_of(section) or section.override_vocab_size,
                model_type=options.architecture,
                dtype=dtype,
                shard_bytes=int(options.shard_size * 1e9),
                drop_head_bias=options.drop_head_bias,
                progress=show,
            )


def to_megatron(source: Path, target: Path, options: Options) -> str:
    """Write a language model as a root for Megatron-LM's `--load` (torch_dist), which appears when
    complete; in one process. Returns the options to go on with it. `UserError`: the source is
    damaged, Megatron-LM cannot express it, or the target exists.
    """
    target = check_target(source, target, options)
    with _opened(source, options, "SOURCE") as (section, _base, weights):
        args = megatron_keys.arguments(section)
        rows = weights.shapes()[TABLES[0]][0]
        padded = pad_vocab_size(rows, args["make_vocab_size_divisible_by"], 1)
        args |= {"padded_vocab_size": padded, "vocab_size": _rows_of(section) or None}
        args[reading.ORIGIN] = plain_dict(section).get(reading.ORIGIN)
        parts: dict[Chunk, tuple[Chunk, Slice]] = {}  # of Megatron-LM -> own, and where it is
        for own, part in _parts_of(weights, options).items():
            megatron.check_place(own.key, source)
            name, shape, size = own.key.removeprefix("model."), own.shape, own.size
            if own.key in TABLES:
                shape = size = (padded, own.shape[1])
            parts[Chunk(name, shape, own.offset, size, own.dtype)] = own, part
        total = sum(map(_nbytes, parts))
        with options.bar(total) as bar, replaced_folder(target) as folder:

            def read(chunk: Chunk) -> Tensor:
                own, part = parts[chunk]
                values = weights.read(own.key, part).to(chunk.dtype).reshape(own.size)
                bar.update(_nbytes(chunk))
                return F.pad(values, (0, 0, 0, padded - rows)) if own.key in TABLES else values

            release = folder / forms.RELEASE
            (release / megatron.TOKENIZER).mkdir(parents=True)
            writing.copy_tokenizer(section, release / megatron.TOKENIZER)
            if any((release / megatron.TOKENIZER).iterdir()):
                place = target / forms.RELEASE / megatron.TOKENIZER
                args |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(place)}
            common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0}
            dist_ckpt.write(
                list(parts), read, release, common={**common, "iteration": 0}, states=True
            )
            (folder / forms.TRACKER).write_text(forms.RELEASE)
    more = megatron_keys.command_line(args)
    return f"--load {target} --finetune --use-checkpoint-args {more}".strip()


# --- what a checkpoint holds, without loading it ---


def info(path: Path) -> dict[str, Any]:
    """Keys, parameters and tensors of a checkpoint; `UserError`: it is damaged, or unreadable. A
    folder of PEFT does not hold the keys of its model; its base is not read.
    """
    source = open_source(path, "PATH")
    found: dict[str, Any] = {"path": str(source)}
    keys: dict[str, Any] = {}
    opened: contextlib.AbstractContextManager[TensorSource]
    if source.form == "peft":
        folder = Path(source)
        config = peft.read_config(folder)
        opened = contextlib.nullcontext(peft.file_tensors(folder))
        base: adapters.Base | None = adapters.Base(config.base, peft.base_checksum(folder))
        tuning = {
            "target_modules": list(config.targets),
            "adapter_dim": config.rank,
            "alpha": config.alpha,
            "layer_selection": config.layers and [layer + 1 for layer in config.layers],
        }
    else:
        section = source.stored_config()
        keys, base = plain_dict(section), adapters.base_in(section)
        tuning = {} if base is None else adapters.settings_in(section).to_config()
        opened = source.own_tensors()
    if base is not None:
        names = "target_modules adapter_dim alpha variant layer_selection".split()
        known = {name: tuning[name] for name in names if name in tuning}
        found["adapters"] = known | {"base": base.path, "base_checksum": base.checksum}
    with opened as weights:
        shapes = {key: weights.shapes()[key] for key in stored_weights.distinct(weights.shapes())}
        dtypes = {
            key: str(stored_weights.stored_dtype(weights, key)).removeprefix("torch.")
            for key in shapes
        }
    return found | {
        "parameters": sum(map(math.prod, shapes.values())),
        "tensors": {
            key: {"shape": list(shape), "dtype": dtypes[key]} for key, shape in shapes.items()
        },
        "keys": {
            key: keys[key]
            for key in ARCHITECTURE_KEYS
            if keys.get(key) is not None and not key.endswith("_parallel_size")
        },
        "tokenizer": keys.get("tokenizer"),
    }


def show_info(source: Path, as_json: bool = False) -> None:
    found = info(source)
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
