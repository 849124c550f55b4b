# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion between Hugging Face folders and `.nemo`, one tensor in memory at a time."""

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.checkpoint import hugging_face, nemo_archive
from nemo_aligner.checkpoint.hugging_face import export
from nemo_aligner.checkpoint.hugging_face.architecture import (
    CAUSAL_LM,
    PER_SAMPLE,
    PER_TOKEN,
    Architecture,
    Unsupported,
    hugging_face_config,
)
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.folder import CONFIG_FILE
from nemo_aligner.checkpoint.hugging_face.weights import FolderWeights, Layout
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource, stored_dtype
from nemo_aligner.checkpoint.torch_dist_stream import Chunk
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = "rm_head.weight"
HEAD_BIAS = "rm_head.bias"
# transformers 5 writes the one, reads both; 4 knows the other
_DTYPE_KEYS = ("torch_dtype", "dtype")


@dataclass(frozen=True)
class Options:
    """What both directions have.

    Attributes:
        dtype: of the weights that are written (`fp32`, `bf16`, `fp16`), or `as-stored`.
        overwrite: replace what stands at the target.
        progress: show a progress bar.
    """

    dtype: str = "as-stored"
    overwrite: bool = False
    progress: bool = True

    def torch_dtype(self) -> torch.dtype | None:
        """None: as stored."""
        return DTYPES.get(self.dtype)


def _check_target(target: Path, options: Options) -> Path:
    target = target.expanduser().absolute()
    if target.exists() and not options.overwrite:
        raise UserError(f"{target} exists; name another target, or replace it with --overwrite.")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} is not a folder; make it first.")
    return target


def _progress(total: int, options: Options) -> tqdm:
    return tqdm(
        total=total, unit="B", unit_scale=True, disable=not options.progress, desc="weights"
    )


# --- to .nemo ---


def to_nemo(source: Path, target: Path, options: Options | None = None) -> None:
    """Write the model in a Hugging Face folder as a `.nemo`; in one process.

    Args:
        source: the folder.
        target: a file that ends in `.nemo`, or a folder, which appears when it is complete.

    Raises:
        UserError: the folder is damaged or describes what cannot be computed here, or the target
            exists.
    """
    options = options or Options()
    target = _check_target(target, options)
    source = source.expanduser().absolute()
    if not hugging_face.is_folder(source):
        raise UserError(f"{source} is not a Hugging Face folder: it has no {CONFIG_FILE}.")
    section = hugging_face.model_section(source)
    weights = hugging_face.weights(source)
    _check_vocabulary(section)
    parts = _chunks(weights, options.torch_dtype())
    with _progress(sum(_nbytes(chunk) for chunk in parts), options) as bar:

        def read(chunk: Chunk) -> Tensor:
            bar.update(_nbytes(chunk))
            return weights.read(chunk.key, parts[chunk]).to(chunk.dtype).reshape(chunk.size)

        nemo_archive.write_streamed(
            target, section, list(parts), read, as_directory=not target.suffix
        )


def _chunks(weights: FolderWeights, dtype: torch.dtype | None) -> dict[Chunk, Slice]:
    """What is written, and the part of the tensor that it is read from."""
    result = {}
    shapes = weights.shapes()
    for key, part in weights.parts():
        chunk = Chunk(
            key,
            shapes[key],
            offset=tuple(axis if isinstance(axis, int) else 0 for axis in part),
            size=tuple(1 if isinstance(axis, int) else axis.stop for axis in part),
            dtype=dtype or stored_dtype(weights, key),
        )
        result[chunk] = part
    return result


def _check_vocabulary(section: DictConfig) -> None:
    """Check that the table has a row for each id of the tokenizer."""
    if "tokenizer" not in section:
        return
    ids = build_tokenizer(complete_model(section).tokenizer).vocab_size
    if ids > section.override_vocab_size:
        raise UserError(
            f"the tokenizer in {section.tokenizer.type} has {ids} ids, the embedding table "
            f"{section.override_vocab_size} rows; resize the model's embeddings, or use the "
            "tokenizer that belongs to it."
        )


def _nbytes(chunk: Chunk) -> int:
    return torch.Size(chunk.size).numel() * chunk.dtype.itemsize


# --- to Hugging Face ---


def from_nemo(
    source: Path,
    target: Path,
    options: Options | None = None,
    *,
    model_type: str | None = None,
    shard_bytes: int = export.SHARD_BYTES,
    drop_head_bias: bool = False,
) -> None:
    """Write the model in a `.nemo` as a Hugging Face folder; in one process.

    Args:
        source: `.nemo` of any form.
        target: the folder, which appears when it is complete.
        model_type: architecture to write; None: the one that the model came from, else the first
            that can express it.
        shard_bytes: largest size of a file of weights.
        drop_head_bias: leave out the bias of a reward model's head.

    Raises:
        UserError: the checkpoint is damaged, Hugging Face cannot express the model, or the target
            exists.
    """
    options = options or Options()
    target = _check_target(target, options)
    source = nemo_archive.check_restore_path(source, key="NEMO")
    section = nemo_archive.read_config(source)
    keys = plain_dict(complete_model(section), resolve=True)
    origin = keys.get(hugging_face.ORIGIN) or {}
    architecture, config = _described(keys, model_type or origin.get("model_type"))
    with nemo_archive.stored_tensors(source) as weights:
        role = _role(keys, weights)
        dropped = _left_out(role, keys, weights, drop_head_bias)
        rows = keys["override_vocab_size"] or build_tokenizer(section.tokenizer).vocab_size
        items = export.plan(weights, architecture, keys, rows, options.torch_dtype(), dropped)
        config = origin | config | _head_config(role, keys)
        config |= {
            "architectures": [architecture.class_for(role)],
            "vocab_size": rows,
            **dict.fromkeys(_DTYPE_KEYS, str(_main_dtype(items)).removeprefix("torch.")),
        }
        folder = target.with_name(target.name + ".writing")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            with _progress(sum(sum(item.sizes().values()) for item in items), options) as bar:
                layout = Layout(architecture, keys)
                export.write_tensors(folder, weights, layout, items, shard_bytes, bar.update)
            _copy_tokenizer(section, folder)
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _described(
    keys: Mapping[str, Any], model_type: str | None
) -> tuple[Architecture, dict[str, Any]]:
    """The architecture to write and its configuration.

    Raises:
        UserError: none can express the model.
    """
    if model_type is not None:
        if model_type not in ARCHITECTURES:
            raise UserError(
                f"the architecture {model_type!r} is not known; what is: "
                f"{', '.join(sorted(ARCHITECTURES))}."
            )
        return ARCHITECTURES[model_type], hugging_face_config(ARCHITECTURES[model_type], keys)
    reasons = []
    for architecture in ARCHITECTURES.values():
        try:
            return architecture, hugging_face_config(architecture, keys)
        except Unsupported as error:
            reasons.append(str(error))
    raise Unsupported(
        "no architecture of Hugging Face can express the model:\n" + "\n".join(reasons)
    )


def _role(keys: Mapping[str, Any], weights: TensorSource) -> str:
    """What the head of the model is for."""
    if f"model.{HEAD}" not in weights.shapes():
        return CAUSAL_LM
    return PER_TOKEN if keys["output_sequence"] else PER_SAMPLE


def _left_out(
    role: str, keys: Mapping[str, Any], weights: TensorSource, drop_head_bias: bool
) -> Sequence[str]:
    """Names of weights that Hugging Face has no place for, and that may be left out.

    Raises:
        Unsupported: leaving them out would change what the model computes.
    """
    if role == CAUSAL_LM:
        return ()
    for key, ask in (
        ("use_avg_pool", keys["use_avg_pool"]),
        ("reward_standardization.enable", keys["reward_standardization"]["enable"]),
        ("regression.merge_attributes", keys["regression"]["merge_attributes"]),
    ):
        if ask:
            raise Unsupported(
                f"Hugging Face's reward models cannot express model.{key}=True; the rewards would "
                "change."
            )
    if role == PER_TOKEN or f"model.{HEAD_BIAS}" not in weights.shapes():
        return ()
    numbers = weights.shapes()[f"model.{HEAD_BIAS}"][0]
    bias = weights.read(f"model.{HEAD_BIAS}", (slice(0, numbers),))
    if bias.any() and not drop_head_bias:
        raise Unsupported(
            f"the head of the reward model has the bias {bias.tolist()}, for which Hugging Face's "
            "has no place: all rewards would shift by it. Leave it out with --drop-head-bias."
        )
    return (HEAD_BIAS,)


def _head_config(role: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    if role == CAUSAL_LM:
        return {}
    names = [f"LABEL_{label}" for label in range(keys["regression"]["num_attributes"])]
    return {
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }


def _main_dtype(items: Sequence[export.Written]) -> torch.dtype:
    """That of most bytes: a reward model's head may be float32 in a bfloat16 model."""
    total: dict[torch.dtype, int] = {}
    for item in items:
        total[item.dtype] = total.get(item.dtype, 0) + sum(item.sizes().values())
    return max(total, key=lambda dtype: total[dtype])


def _copy_tokenizer(section: DictConfig, folder: Path) -> None:
    """Copy the tokenizer, its chat template and the generation settings."""
    tokenizer = section.get("tokenizer") or OmegaConf.create({})
    source = Path(str(tokenizer.get("type")))
    if tokenizer.get("library") == "huggingface" and source.is_dir():
        for file in itertools.chain(
            source.glob("*.json"),
            source.glob("*.model"),
            source.glob("*.jinja"),
            source.glob("*.txt"),
        ):
            if file.name != CONFIG_FILE and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    elif tokenizer.get("model"):
        shutil.copyfile(tokenizer.model, folder / "tokenizer.model")
