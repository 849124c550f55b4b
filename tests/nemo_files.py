# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the layouts of NeMo, made from a model of ours: per-rank files, zarr arrays and
folders of NeMo 2.0. The layouts are stated here anew, not taken from the package.
"""

import io
import json
import os
import queue
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import dist_ckpt, sources
from nemo_aligner.checkpoint.file_references import unmarked
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

COLUMN = ("word_embeddings.weight", "output_layer.weight")
COLUMN += ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
ROW = ("linear_proj.weight", "linear_fc2.weight")
TE_NAMES = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
TE_NAMES["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"


def whole_weights(model) -> dict[str, torch.Tensor]:
    """Weights of a model of one rank under the names of NeMo's layers (Transformer Engine)."""
    weights = {}
    for name, value in model.unwrapped()[0].state_dict().items():
        if isinstance(value, torch.Tensor):
            for ours, theirs in TE_NAMES.items():
                name = name.replace(ours, theirs)
            weights[name] = value.detach().clone()
    return weights


def shard(name: str, value: torch.Tensor, rank: int, size: int, gated: bool) -> torch.Tensor:
    """What tensor-parallel rank `rank` of `size` holds of a weight."""
    if gated and "linear_fc1." in name and "layer_norm" not in name:
        gate, up = value.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(COLUMN):
        return value.chunk(size)[rank].clone()
    return value.chunk(size, 1)[rank].clone() if name.endswith(ROW) else value.clone()


def states_of_ranks(weights: dict, tp: int, layers: list[int], gated: bool):
    """The state dict of each of `tp` tensor-parallel ranks, by pipeline stage or virtual stage in
    the order of the layers, of which each has the number in `layers`.
    """
    first = 0
    for stage, count in enumerate(layers):
        last = stage == len(layers) - 1
        mine = {}
        for name, value in weights.items():
            number = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
            if number and first <= int(number[1]) < first + count:
                mine[f"decoder.layers.{int(number[1]) - first}.{number[2]}"] = value
            elif not number and (stage == 0 if name.startswith("embedding.") else last):
                mine[name] = value
        if last and len(layers) > 1 and "output_layer.weight" not in weights:
            # A tied output layer of another stage than the embedding is a copy.
            mine["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
        first += count
        yield [{n: shard(n, v, rank, tp, gated) for n, v in mine.items()} for rank in range(tp)]


def write_rank_files(model, folder: Path, tp: int, stages: list[int], wrapper="model.") -> Path:
    """A `.nemo` folder with the weights of each rank.

    Args:
        tp: tensor-parallel size of the job that wrote it.
        stages: number of layers of each of its pipeline stages.
        wrapper: what precedes the names.
    """
    gated = model.transformer_config.gated_linear_unit
    folder.mkdir()
    write_config(model, folder, tensor_model_parallel_size=tp, mcore_gpt=True)
    for stage, ranks in enumerate(states_of_ranks(whole_weights(model), tp, stages, gated)):
        for rank, mine in enumerate(ranks):
            state = {wrapper + name: value for name, value in mine.items()}
            empty = io.BytesIO()
            torch.save(None, empty)
            state[wrapper + "decoder.layers.0.mlp.linear_fc1._extra_state"] = empty
            name = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}" if len(stages) > 1 else ""
            name = name or (f"mp_rank_{rank:02d}" if tp > 1 else "")
            (folder / name).mkdir(exist_ok=True)
            torch.save(state, folder / name / "model_weights.ckpt")
    return folder


def write_config(model, folder: Path, **changes) -> None:
    """`model_config.yaml` with the keys that NeMo wrote; the tokenizer is named by its path."""
    config = OmegaConf.create(OmegaConf.to_container(model.cfg) | changes)
    OmegaConf.save(config, folder / "model_config.yaml")


def with_own_tokenizer(config):
    """`config` as a user's who names the tokenizer of the file, which does not hold it."""
    config.tokenizer.type = unmarked(config.tokenizer.type)
    return config


def write_zarr(model, folder: Path, chunk_rows: int = 3, dtype="<f4", **array) -> Path:
    """A `.nemo` folder with a distributed checkpoint in the format zarr."""
    weights = whole_weights(model)
    arrays: dict[str, torch.Tensor] = {}
    layers = model.cfg.num_layers
    for name, value in weights.items():
        number = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if number is None:
            arrays["model." + name] = value
        else:
            key = "model.decoder.layers." + number[2]
            arrays.setdefault(key, torch.empty(layers, *value.shape))[int(number[1])] = value
    target = folder / "model_weights"
    target.mkdir(parents=True)
    write_config(model, folder, dist_ckpt_format="zarr")
    backend = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (target / "metadata.json").write_text(json.dumps(backend | common))
    torch.save({}, target / "common.pt")
    for key, value in arrays.items():
        write_zarr_array(target / key, value, chunk_rows, dtype, **array)
    return folder


def write_zarr_array(folder: Path, value: torch.Tensor, chunk_rows: int, dtype: str, **other):
    """One array in chunks of one layer and `chunk_rows` rows (the last may be beyond its end)."""
    folder.mkdir()
    by_layer = ".layers." in folder.name
    chunks = [1 if by_layer and axis == 0 else size for axis, size in enumerate(value.shape)]
    rows = 1 if by_layer else 0
    chunks[rows] = min(chunk_rows, chunks[rows])
    described = {"zarr_format": 2, "shape": list(value.shape), "chunks": chunks, "dtype": dtype}
    described |= {"compressor": None, "fill_value": None, "filters": None, "order": "C"}
    (folder / ".zarray").write_text(json.dumps(described | other))
    if dtype == "<f4":
        numbers = value.float().numpy()
    else:
        numbers = value.bfloat16().view(torch.int16).numpy()
    counts = [-(-size // chunk) for size, chunk in zip(value.shape, chunks, strict=True)]
    for index in np.ndindex(*counts):
        spans = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))
        part = numbers[spans]
        padded = np.full(chunks, 77, numbers.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        (folder / ".".join(map(str, index))).write_bytes(padded.tobytes())


def write_nemo2(model, folder: Path, model_class: str, config: dict, tokenizer: dict) -> Path:
    """A folder of NeMo 2.0 with the weights of `model`."""
    (folder / "weights").mkdir(parents=True)
    (folder / "context").mkdir()
    (folder / "context" / "io.json").write_text("{}")
    target = f"nemo.collections.llm.gpt.model.{model_class.removesuffix('Model').lower()}."
    described = {"_target_": target + model_class, "config": config, "optim": None}
    described |= {"tokenizer": tokenizer, "model_transform": None}
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump(described))
    dist_ckpt.save(under_prefix(model.sharded_weights(), "module."), folder / "weights")
    return folder


def under_prefix(sharded: dict, prefix: str) -> dict:
    """The weights of a model under NeMo 2.0's or another prefix."""
    for items in sharded.values():
        for item in items.values():
            item.key = prefix + item.key.removeprefix("model.")
    return sharded


def save_as_megatron_core(state: dict, folder: Path) -> Path:
    """`state` as Megatron Core's own `dist_checkpointing.save` writes it into `folder`: with the
    savers' plans in `.metadata`, and what is beside tensors where its release puts it.
    """
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        # Without CUDA these are errors; and a process that only holds a queue takes seconds.
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "current_stream", lambda: None)
        patch.setattr(filesystem_async, "_results_queue", queue.Queue())
        dist_checkpointing.save(state, str(folder))
    assert b"SavePlan" in (folder / ".metadata").read_bytes()
    return folder


def write_by_megatron_core(model, folder: Path) -> Path:
    """A `.nemo` folder with the weights as Megatron Core itself saves them."""
    save_as_megatron_core(model.sharded_weights(), folder / "model_weights")
    write_config(model, folder)
    return folder


def packed(folder: Path) -> Path:
    """A `.nemo` tar file of a folder, with names that start with `./`, as NeMo packs it."""
    path = folder.with_suffix(".nemo")
    with tarfile.open(path, "w:") as tar:
        tar.add(folder, arcname=".")
    shutil.rmtree(folder)
    return path


def restore(path) -> None:
    """As a job does."""
    MegatronGPTModel.restore_from(path)


def convert(path) -> None:
    """What the converter reads first."""
    sources.read_config(path)
    with sources.open_source(path).tensors() as tensors:
        tensors.shapes()


class Harmful:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
