# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints of any form to that of Megatron-LM, one tensor in memory at a time."""

import argparse
import dataclasses
import shutil
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint import megatron, megatron_args, nemo_archive, torch_dist_stream
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replace_folder
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN
from nemo_aligner.checkpoint.hugging_face.writing import copy_tokenizer
from nemo_aligner.checkpoint.torch_dist_stream import Chunk
from nemo_aligner.config.parallel_rules import pad_vocab_size
from nemo_aligner.config.values import plain_dict
from nemo_aligner.convert.hugging_face import (
    Options,
    check_target,
    nbytes,
    parts_of,
    progress_bar,
    read_section,
    rows_of,
)

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
    args = megatron_args.arguments(section)
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
    more = megatron_args.command_line(args)
    return f"--load {target} --finetune --use-checkpoint-args {more}".strip()
