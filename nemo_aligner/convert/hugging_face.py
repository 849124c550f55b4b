# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion between Hugging Face folders and `.nemo`, one tensor in memory at a time.

Folders of PEFT and checkpoints of adapters go the same ways: `convert/adapters.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.checkpoint import forms, hugging_face, nemo_archive, nemo_writing
from nemo_aligner.checkpoint.hugging_face import peft_config
from nemo_aligner.checkpoint.hugging_face.folder import CONFIG_FILE
from nemo_aligner.checkpoint.hugging_face.weights import FolderWeights
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource, stored_dtype
from nemo_aligner.checkpoint.torch_dist_stream import Chunk
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

_CONFIG_FILES = (CONFIG_FILE, forms.CONFIG_FILE, peft_config.CONFIG_FILE)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def check_target(source: Path, target: Path, options: Options) -> Path:
    """The absolute path of what is written.

    Raises:
        UserError: something stands there that may not be replaced.
    """
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


def progress_bar(total: int, options: Options) -> tqdm:
    """A bar that counts bytes."""
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
    target = check_target(source, target, options)
    source = source.expanduser().absolute()
    if not hugging_face.is_folder(source):
        raise UserError(f"{source} is not a Hugging Face folder: it has no {CONFIG_FILE}.")
    section = hugging_face.model_section(source)
    weights = hugging_face.weights(source)
    _check_vocabulary(section)
    write_chunks(target, section, weights, _chunks(weights, options.torch_dtype()), options)


def write_chunks(
    target: Path,
    section: DictConfig,
    weights: TensorSource,
    parts: Mapping[Chunk, Slice],
    options: Options,
) -> None:
    """Write a `.nemo`, or a folder, with a progress bar.

    Args:
        target: of what is written; see `to_nemo`.
        section: configuration of the model.
        weights: that are written.
        parts: what is written, and the part of its tensor that it is read from.
    """
    with progress_bar(sum(nbytes(chunk) for chunk in parts), options) as bar:

        def read(chunk: Chunk) -> Tensor:
            bar.update(nbytes(chunk))
            return weights.read(chunk.key, parts[chunk]).to(chunk.dtype).reshape(chunk.size)

        nemo_writing.write_streamed(
            target, section, list(parts), read, as_directory=target.suffix != ".nemo"
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


def nbytes(chunk: Chunk) -> int:
    """Bytes of what is written for one part."""
    return torch.Size(chunk.size).numel() * chunk.dtype.itemsize


# --- to Hugging Face ---


def from_nemo(
    source: Path,
    target: Path,
    options: Options | None = None,
    *,
    model_type: str | None = None,
    shard_bytes: int = hugging_face.SHARD_BYTES,
    drop_head_bias: bool = False,
    base: Path | None = None,
) -> None:
    """Write the model in a `.nemo` as a Hugging Face folder; in one process. That of adapters is
    their base with them merged in.

    Args:
        source: `.nemo` of any form.
        base: where the base of adapters lies; None: where they say.
        target: the folder, which appears when it is complete.
        model_type, shard_bytes, drop_head_bias: as for `hugging_face.write_folder`.

    Raises:
        UserError: the checkpoint is damaged, Hugging Face cannot express the model, or the target
            exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    source = nemo_archive.check_restore_path(source, key="NEMO")
    section = nemo_archive.read_config(source, base)
    with nemo_archive.stored_tensors(source, base) as weights, progress_bar(0, options) as bar:

        def show(written: int, total: int) -> None:
            bar.total = total
            bar.update(written)

        hugging_face.write_folder(
            target,
            weights,
            section,
            section.get("override_vocab_size") or build_tokenizer(section.tokenizer).vocab_size,
            model_type=model_type,
            dtype=options.torch_dtype(),
            shard_bytes=shard_bytes,
            drop_head_bias=drop_head_bias,
            progress=show,
        )
