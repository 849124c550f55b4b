# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints: between Hugging Face folders, folders of PEFT and `.nemo`, adapters
merged with their base, and to Megatron-LM; one tensor in memory at a time.
"""

import argparse
import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.checkpoint import (
    adapters,
    forms,
    hugging_face,
    megatron,
    megatron_keys,
    nemo_archive,
    nemo_writing,
    torch_dist_stream,
)
from nemo_aligner.checkpoint.file_references import is_outside
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replace_folder
from nemo_aligner.checkpoint.forms import HF_CONFIG, is_peft
from nemo_aligner.checkpoint.hugging_face import peft, peft_config
from nemo_aligner.checkpoint.hugging_face.architecture import EXPERTS
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN
from nemo_aligner.checkpoint.hugging_face.writing import copy_tokenizer
from nemo_aligner.checkpoint.stored_weights import (
    LAYERS,
    Slice,
    TensorSource,
    distinct,
    stored_dtype,
    unnumbered,
)
from nemo_aligner.checkpoint.torch_dist_stream import Chunk
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.parallel_rules import pad_vocab_size
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

_CONFIG_FILES = (HF_CONFIG, forms.CONFIG_FILE, peft_config.CONFIG_FILE, megatron.TRACKER)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What both directions have."""

    # of the weights that are written (`fp32`, `bf16`, `fp16`), or `as-stored`
    dtype: str = "as-stored"
    overwrite: bool = False  # replace what stands at the target
    progress: bool = True  # show a progress bar

    def torch_dtype(self) -> torch.dtype | None:
        """None: as stored."""
        return DTYPES.get(self.dtype)


def check_target(source: Path, target: Path, options: Options) -> Path:
    """The absolute path of what is written; `UserError` if something stands there."""
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
    return tqdm(
        total=total, unit="B", unit_scale=True, disable=not options.progress, desc="weights"
    )


# --- to .nemo ---


def to_nemo(source: Path, target: Path, options: Options | None = None) -> None:
    """Write the model in a Hugging Face folder as a `.nemo`; in one process.

    Args:
        target: a file that ends in `.nemo`, or a folder, which appears when it is complete.

    Raises:
        UserError: the folder is damaged or describes what cannot be computed here, or the target
            exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    source = source.expanduser().absolute()
    if not hugging_face.is_folder(source):
        raise UserError(f"{source} is not a Hugging Face folder: it has no {HF_CONFIG}.")
    section = hugging_face.read_config(source)
    weights = hugging_face.weights(source)
    _check_vocabulary(section)
    write_chunks(target, section, weights, options)


def write_chunks(
    target: Path, section: DictConfig, weights: TensorSource, options: Options
) -> None:
    """Write `weights` as a `.nemo`, or a folder (see `to_nemo`), with a progress bar."""
    parts = parts_of(weights, options)
    with progress_bar(sum(nbytes(chunk) for chunk in parts), options) as bar:

        def read(chunk: Chunk) -> Tensor:
            bar.update(nbytes(chunk))
            return weights.read(chunk.key, parts[chunk]).to(chunk.dtype).reshape(chunk.size)

        nemo_writing.write_streamed(
            target, section, list(parts), read, as_directory=target.suffix != ".nemo"
        )


def parts_of(weights: TensorSource, options: Options) -> dict[Chunk, Slice]:
    """What is written, cut by layers and experts, in order, and the part that it is read from."""
    found: list[tuple[int, Chunk, Slice]] = []
    for key in distinct(weights.shapes()):
        shape, (_, layer) = weights.shapes()[key], unnumbered(key)
        stacked = key.startswith(LAYERS) and layer is None and not adapters.is_adapter(key)
        axes = (1 if stacked else 0) + (1 if EXPERTS in key else 0)
        rest = shape[axes:]
        dtype = options.torch_dtype() or stored_dtype(weights, key)
        for index in itertools.product(*(range(size) for size in shape[:axes])):
            offset = (*index, *(0 for _ in rest))
            chunk = Chunk(key, shape, offset, (*(1 for _ in index), *rest), dtype)
            number = index[0] if stacked else -1 if layer is None else layer
            found.append((number, chunk, (*index, *(slice(0, size) for size in rest))))
    return {chunk: part for _, chunk, part in sorted(found, key=lambda item: item[0])}


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
    return torch.Size(chunk.size).numel() * chunk.dtype.itemsize


# --- from any form ---


def read_section(
    source: Path, base: Path | None = None, tokenizer: Path | None = None
) -> tuple[Path, DictConfig]:
    """A checkpoint of any form, and the configuration of its model.

    Args:
        base: where the base of adapters lies; None: where they say.
        tokenizer: folder of Hugging Face, or SentencePiece model, in the place of its own.

    Raises:
        UserError: the checkpoint is not there, or its form does not load.
    """
    source = nemo_archive.check_restore_path(source, key="SOURCE")
    section = nemo_archive.read_config(source, base)
    if tokenizer is not None:
        if not tokenizer.exists():
            raise UserError(f"--tokenizer={tokenizer} does not exist; give a folder or a file.")
        kind = ("huggingface", "type") if tokenizer.is_dir() else ("sentencepiece", "model")
        section.tokenizer = {"library": kind[0], kind[1]: str(tokenizer.expanduser().absolute())}
    return source, section


def rows_of(section: DictConfig) -> int:
    """Rows of the tables without padding; 0: nobody knows, without the tokenizer."""
    settings = section.get("tokenizer") or OmegaConf.create({})
    outside = is_outside(settings)
    return hugging_face.vocab_rows(
        section, lambda: 0 if outside else build_tokenizer(settings).vocab_size
    )


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
    tokenizer: Path | None = None,
) -> None:
    """Write the model in a `.nemo` as a Hugging Face folder; in one process. That of adapters is
    their base with them merged in.

    Args:
        base: where the base of adapters lies; None: where they say.
        model_type, shard_bytes, drop_head_bias: as for `hugging_face.write_folder`.
        tokenizer: as for `read_section`.

    Raises:
        UserError: the checkpoint is damaged, Hugging Face cannot express the model, or the target
            exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    source, section = read_section(source, base, tokenizer)
    with nemo_archive.stored_tensors(source, base) as weights, progress_bar(0, options) as bar:

        def show(written: int, total: int) -> None:
            bar.total = total
            bar.update(written)

        hugging_face.write_folder(
            target,
            weights,
            section,
            rows_of(section) or section.override_vocab_size,
            model_type=model_type,
            dtype=options.torch_dtype(),
            shard_bytes=shard_bytes,
            drop_head_bias=drop_head_bias,
            progress=show,
        )


def is_peft_folder(source: Path) -> bool:
    return is_peft(source.expanduser())


def are_adapters(source: Path, key: str = "ADAPTERS") -> bool:
    """Whether the checkpoint `source`, called `key`, holds adapters; `UserError`: no such one."""
    source = nemo_archive.check_restore_path(source, key=key)
    if is_peft(source):
        return True
    return adapters.base_in(nemo_archive.read_stored_config(source)) is not None


def merge(
    source: Path, target: Path, options: Options | None = None, base: Path | None = None
) -> None:
    """Write adapters merged with their base as a `.nemo`, one tensor in memory at a time.

    Args:
        target: a file that ends in `.nemo`, or a folder, which appears when it is complete.
        base: where the base lies; None: where the adapters say.

    Raises:
        UserError: the source holds no adapters, their base is absent or another one, or the
            target exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    if not are_adapters(source):
        raise UserError(f"{source} holds a model with all its weights; there is nothing to merge.")
    base = _checked_base(base)
    section = nemo_archive.read_config(source, base)
    with nemo_archive.stored_tensors(source, base) as weights:
        write_chunks(target, section, weights, options)


def peft_to_nemo(
    source: Path, target: Path, options: Options | None = None, base: Path | None = None
) -> None:
    """Write a folder of PEFT as a `.nemo` of adapters; arguments and errors as for `merge`."""
    options = options or Options()
    target = check_target(source, target, options)
    with _opened(source, base) as (section, weights):
        found = adapters.base_in(section)
        assert found is not None
        path = base or found.path
        if path is None or not Path(path).exists():
            raise UserError(
                f"{source} names {found.path!r} as its base, which is not on this machine; give "
                "it with --base."
            )
        where = str(Path(path).resolve())
        with nemo_archive.stored_tensors(path) as tensors:
            checksum = adapters.checksum_of_source(tensors)
            adapters.check_base(found, checksum, str(source), where)
            # Checks that the base has what the adapters belong to.
            adapters.MergedTensors(tensors, weights, adapters.settings_in(section), section)
        section[adapters.BASE_SECTION] = adapters.Base(where, checksum).to_config()
        write_chunks(target, section, weights, options)


def to_peft(
    source: Path,
    target: Path,
    options: Options | None = None,
    *,
    drop_head_bias: bool = False,
    base: Path | None = None,
) -> None:
    """Write adapters as a folder of PEFT; in one process.

    Args:
        target: the folder, which appears when it is complete.
        base: the base that the folder names; None: the one that the adapters name.

    Raises:
        UserError: Hugging Face cannot express the model, the base is another one, or the target
            exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    with _opened(source, base) as (section, weights):
        found = adapters.base_in(section)
        assert found is not None
        if base is not None:
            with nemo_archive.stored_tensors(base) as tensors:
                checksum = adapters.checksum_of_source(tensors)
            adapters.check_base(found, checksum, str(source), str(base))
            found = replace(found, path=str(base.resolve()), checksum=checksum)
        peft.write_folder(
            target,
            weights,
            section,
            adapters.settings_in(section),
            found,
            dtype=options.torch_dtype(),
            drop_head_bias=drop_head_bias,
        )


def _checked_base(base: Path | None) -> Path | None:
    return None if base is None else nemo_archive.check_restore_path(base, key="--base")


@contextlib.contextmanager
def _opened(source: Path, base: Path | None) -> Iterator[tuple[DictConfig, TensorSource]]:
    source = nemo_archive.check_restore_path(source, key="ADAPTERS")
    base = _checked_base(base)
    model = None if base is None else nemo_archive.read_config(base)
    section = nemo_archive.read_stored_config(source, model)
    with nemo_archive.own_tensors(source, model) as weights:
        yield section, weights


_TABLES = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")


def to_megatron(
    source: Path,
    target: Path,
    options: Options | None = None,
    base: Path | None = None,
    tokenizer: Path | None = None,
) -> str:
    """Write a language model as a checkpoint of Megatron-LM (torch_dist); in one process.

    Args:
        target: the root, which appears when it is complete; `--load` of Megatron-LM.
        base: where the base of adapters lies; None: where they say.
        tokenizer: as for `read_section`.

    Returns the options with which Megatron-LM goes on with it.

    Raises:
        UserError: the source is damaged, Megatron-LM cannot express it, or the target exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    source, section = read_section(source, base, tokenizer)
    args = megatron_keys.arguments(section)
    folder = target.with_name(target.name + WRITING_SUFFIX)
    shutil.rmtree(folder, ignore_errors=True)
    release = folder / megatron.RELEASE
    with nemo_archive.stored_tensors(source, base) as weights:
        parts = parts_of(weights, options)
        for chunk in parts:
            megatron.check_place(chunk.key, source)
        rows = weights.shapes()[_TABLES[0]][0]
        padded = pad_vocab_size(rows, args["make_vocab_size_divisible_by"], 1)
        args |= {"padded_vocab_size": padded, "vocab_size": rows_of(section) or None}
        args[ORIGIN] = plain_dict(section).get(ORIGIN)
        read_as = {}
        for chunk in parts:
            size = (padded, chunk.shape[1]) if chunk.key in _TABLES else chunk.size
            shape = size if chunk.key in _TABLES else chunk.shape
            name = chunk.key.removeprefix("model.")
            read_as[dataclasses.replace(chunk, key=name, shape=shape, size=size)] = chunk
        with progress_bar(sum(map(nbytes, read_as)), options) as bar:

            def read(chunk: Chunk) -> Tensor:
                own = read_as[chunk]
                values = weights.read(own.key, parts[own]).to(chunk.dtype).reshape(own.size)
                bar.update(nbytes(chunk))
                return F.pad(values, (0, 0, 0, padded - rows)) if own.key in _TABLES else values

            try:
                (release / megatron.TOKENIZER).mkdir(parents=True)
                copy_tokenizer(section, release / megatron.TOKENIZER)
                if any((release / megatron.TOKENIZER).iterdir()):
                    place = target / megatron.RELEASE / megatron.TOKENIZER
                    args |= {
                        "tokenizer_type": "HuggingFaceTokenizer",
                        "tokenizer_model": str(place),
                    }
                common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0}
                torch_dist_stream.write(
                    list(read_as), read, release, common={**common, "iteration": 0}, states=True
                )
                (folder / megatron.TRACKER).write_text(megatron.RELEASE)
                replace_folder(target, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    more = megatron_keys.command_line(args)
    return f"--load {target} --finetune --use-checkpoint-args {more}".strip()
