# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `.nemo` files and folders (`nemo_archive.py` reads them) that NeMo-Aligner's NeMo (2.1)
loads too. Its archives hold single files only, and its `tokenizer.type` is a Hugging Face
tokenizer outside; so our copy has a key of its own, `tokenizer.folder`.
"""

import dataclasses
import functools
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_aligner.checkpoint import dist_ckpt, torch_dist_stream
from nemo_aligner.checkpoint.checksums import Checksums, check_space, write_manifest
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.file_references import ARTIFACT_KEYS, TOKENIZER_TYPE, unmarked
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replace
from nemo_aligner.checkpoint.forms import CONFIG_FILE, WEIGHTS_FOLDER
from nemo_aligner.checkpoint.nemo_archive import ARTIFACT_PREFIX, TOKENIZER_FOLDER
from nemo_aligner.checkpoint.torch_dist_stream import Chunk
from nemo_aligner.parallel import parallel_state

_WEIGHT_SUFFIXES = tuple(
    ".safetensors .bin .pt .pth .ckpt .gguf .onnx .msgpack .h5 .index.json".split()
)
_BESIDE_ATTENTION = "self_attention.linear_proj._extra_state"

# What NeMo reads and this package has no use for.
NEMO_ALWAYS = {
    "mcore_gpt": True,  # without it NeMo builds layers of its own, whose weights have other names
    "dist_ckpt_format": "torch_dist",
}
NEMO_UNLESS_SET = {
    "transformer_engine": True,
    # Versions of Transformer Engine differ in extra states, empty but in fp8. NeMo's own message
    # about a missing one recommends this; a missing weight is still an error.
    "dist_ckpt_load_strictness": "log_all",
}
# Classes of this package: the module that has them in NeMo or NeMo-Aligner, where it is another.
_GPT = "nemo_aligner.models.nlp.gpt"
NEMO_MODULES = {
    "GPTSteerLMModel": f"{_GPT}.gpt_steerlm_model",
    "MegatronGPTActorModel": f"{_GPT}.megatron_gpt_ppo_actor",
    "MegatronGPTKTOModel": f"{_GPT}.megatron_gpt_kto_model",
    "MegatronGPTModel": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model",
    "MegatronGPTRegressionRewardModel": f"{_GPT}.megatron_gpt_regression_reward_model",
    "MegatronGPTReinforceActorModel": f"{_GPT}.megatron_gpt_reinforce_actor",
    "MegatronGPTRSModel": f"{_GPT}.megatron_gpt_rs_actor",
}


def _large(source: str, names: list[str]) -> list[str]:
    """What not to copy of a tokenizer's folder, maybe a whole model's."""
    return [n for n in names if Path(source, n).is_dir() or n.endswith(_WEIGHT_SUFFIXES)]


def _pack_artifacts(config: DictConfig, folder: Path) -> DictConfig:
    """Copy the files that `config` names into `folder`; return it with references to these."""
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for key in ARTIFACT_KEYS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and os.path.isfile(value):
            name = _archive_name(value)
            shutil.copyfile(value, folder / name)
            OmegaConf.update(config, key, ARTIFACT_PREFIX + name)
    source = OmegaConf.select(config, TOKENIZER_TYPE)
    if isinstance(source, str) and os.path.isdir(source):
        name = _archive_name(source)
        shutil.copytree(source, folder / name, ignore=_large, dirs_exist_ok=True)
        OmegaConf.update(config, TOKENIZER_FOLDER, ARTIFACT_PREFIX + name, force_add=True)
        OmegaConf.update(config, TOKENIZER_TYPE, _first_name(Path(source)))
    for key in (*ARTIFACT_KEYS, TOKENIZER_TYPE):  # a file outside is named as before, not copied
        value = OmegaConf.select(config, key)
        if value != unmarked(value):
            OmegaConf.update(config, key, unmarked(value))
    return config


def _archive_name(path: str) -> str:
    name = Path(path).name
    return name if name.startswith("tokenizer") else f"tokenizer_{name}"


def _first_name(tokenizer: Path) -> str:
    """Where the model first got a tokenizer from, as a `.nemo` has noted."""
    config_file = tokenizer.parent / CONFIG_FILE
    if config_file.is_file():
        config: Any = OmegaConf.to_container(OmegaConf.load(config_file), resolve=False)
        section = config.get("tokenizer") if isinstance(config, dict) else None
        noted = section if isinstance(section, dict) else {}
        name = str(noted.get("type"))
        if noted.get("folder") == ARTIFACT_PREFIX + tokenizer.name and "${" not in name:
            return name
    return str(tokenizer.absolute())


def _nemo_config(config: DictConfig) -> DictConfig:
    given = {key: value for key, value in config.items() if value is not None}
    settings = NEMO_UNLESS_SET | given | NEMO_ALWAYS
    if "target" in given:
        module, _, name = given["target"].rpartition(".")
        if module.startswith(_GPT):
            settings["target"] = f"{NEMO_MODULES.get(name, module)}.{name}"
    if "add_qkv_bias" in given:  # our name; NeMo's wins there
        settings["qkv_bias"] = given["add_qkv_bias"]
    return OmegaConf.merge(config, settings)


def _with_attention_states(sharded_weights: dict[str, Any]) -> dict[str, Any]:
    """Add the empty extra state that Transformer Engine's attention asks for."""
    result = {}
    for chunk, items in sharded_weights.items():
        result[chunk] = dict(items)
        for name, item in items.items():
            if isinstance(item, ShardedObject) and name.endswith(_BESIDE_ATTENTION):
                wanted = name.replace("linear_proj", "core_attention")
                key = item.key.replace("linear_proj", "core_attention")
                result[chunk].setdefault(wanted, dataclasses.replace(item, key=key))
    return result


def write_config(folder: Path, config: DictConfig) -> None:
    """Write a model's configuration and its tokenizer's files; one rank calls it."""
    OmegaConf.save(_nemo_config(_pack_artifacts(config, folder)), folder / CONFIG_FILE)


def write_nemo(
    path: str | Path,
    config: DictConfig,
    sharded_weights: dict[str, Any],
    *,
    as_directory: bool = False,
) -> None:
    """Write a `.nemo` to a shared file system; all ranks call it. It is renamed when complete:
    a reader never sees half of it. `SaveError`, on all ranks: nothing is left.
    """
    weights = _with_attention_states(sharded_weights)
    _write(path, config, as_directory, functools.partial(dist_ckpt.save, weights))


def write_streamed(
    path: str | Path,
    config: DictConfig,
    chunks: Sequence[Chunk],
    read: Callable[[Chunk], Tensor],
    *,
    as_directory: bool = False,
) -> None:
    """Write a `.nemo` by `torch_dist_stream.write` in one process; a failure leaves nothing."""
    _write(path, config, as_directory, functools.partial(torch_dist_stream.write, chunks, read))


def _write(
    path: str | Path,
    config: DictConfig,
    as_directory: bool,
    write_weights: Callable[[Path], Checksums],
) -> None:
    """Write a `.nemo` beside `path`, and give it this place; after an error nothing is left."""
    path = Path(path).expanduser().absolute()
    folder = path.with_name(path.name + WRITING_SUFFIX)
    packed = path.with_name(path.name + ".tar.writing")
    is_writer = parallel_state.get_rank() == 0
    try:
        with failing_together(folder):
            if is_writer:
                shutil.rmtree(folder, ignore_errors=True)
                (folder / WEIGHTS_FOLDER).mkdir(parents=True)
        checksums = write_weights(folder / WEIGHTS_FOLDER)
        with failing_together(path):
            if is_writer:
                write_config(folder, config)
                known = {f"{WEIGHTS_FOLDER}/{name}": found for name, found in checksums.items()}
                write_manifest(folder, known)
                replace(path, folder if as_directory else _pack(folder, packed))
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
            packed.unlink(missing_ok=True)


def _pack(folder: Path, packed: Path) -> Path:
    """The tar file `packed` of a folder; `SaveError`: there is no space for it."""
    files = (file for file in folder.rglob("*") if file.is_file())
    check_space(folder, sum(file.stat().st_size for file in files))
    with tarfile.open(packed, "w:") as tar:
        tar.add(folder, arcname=".")
    with packed.open("rb") as file:
        os.fsync(file.fileno())
    return packed
