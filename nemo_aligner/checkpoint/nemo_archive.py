# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The `.nemo` exchange format: a tar file or a folder with

    model_config.yaml    the model's configuration; `nemo:<name>` refers to a file beside it
    <tokenizer files>    SentencePiece model, or the folder of a Hugging Face tokenizer
    model_weights/       Megatron Core distributed checkpoint; loads at any TP / PP / DP

Reading the configuration or the tokenizer does not unpack the weights.
"""

import atexit
import contextlib
import functools
import os
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nemo.utils.tar_utils import safe_extract
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_aligner.checkpoint import dist_ckpt
from nemo_aligner.checkpoint.dist_ckpt import barrier
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state

CONFIG_FILE = "model_config.yaml"
WEIGHTS_FOLDER = "model_weights"
ARTIFACT_PREFIX = "nemo:"
# Configuration keys whose value may name a file or folder that belongs in the archive.
ARTIFACT_KEYS = (
    "tokenizer.model",
    "tokenizer.type",
    "tokenizer.vocab_file",
    "tokenizer.merge_file",
)


def check_restore_path(
    path: str | Path | None, key: str = "pretrained_checkpoint.restore_from_path"
) -> Path:
    """`path` as an existing `.nemo` file or directory.

    Args:
        path: to check.
        key: configuration key that `path` comes from, for the messages.

    Raises:
        UserError: the path is None, does not exist or is not a `.nemo`.
    """
    if path is None:
        raise UserError(f"{key} is not set; give the path of a .nemo file or directory.")
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(
            f"{key}={path} does not exist; give the path of a .nemo file or directory."
        )
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise UserError(
                f"{key}={path} is a directory without {CONFIG_FILE}; it is not an unpacked .nemo."
            )
    elif not tarfile.is_tarfile(path):
        raise UserError(f"{key}={path} is not a tar file; a .nemo is a tar file or a directory.")
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The tar file of a `.nemo`, open for reading.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with tarfile.open(path) as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{path} is damaged or incomplete ({error}); copy it again.") from error


def _member_name(member: tarfile.TarInfo) -> str:
    return member.name.removeprefix("./")


def _unpack_small_members(path: Path) -> Path:
    """Folder with everything but the weights; a file is unpacked once per process, and again after
    it was replaced.
    """
    return path if path.is_dir() else _unpack_file(path, path.stat().st_mtime_ns)


@functools.cache
def _unpack_file(path: Path, _modified_ns: int) -> Path:
    """`_unpack_small_members` of a file, into a folder that lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="nemo_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with _opened(path) as tar:
        members = [
            m for m in tar.getmembers() if not _member_name(m).startswith(WEIGHTS_FOLDER + "/")
        ]
        safe_extract(tar, str(folder), members=members)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{path} holds no {CONFIG_FILE}; it is not a .nemo file.")
    return folder


def read_config(path: str | Path) -> DictConfig:
    """The model configuration in a `.nemo`; `nemo:` references become absolute paths."""
    folder = _unpack_small_members(Path(path).resolve())
    config = OmegaConf.load(folder / CONFIG_FILE)
    with open_dict(config):
        for key in ARTIFACT_KEYS:
            value = OmegaConf.select(config, key)
            if isinstance(value, str) and value.startswith(ARTIFACT_PREFIX):
                OmegaConf.update(config, key, str(folder / value.removeprefix(ARTIFACT_PREFIX)))
    return config


@contextlib.contextmanager
def weights_folder(path: str | Path) -> Iterator[Path]:
    """Folder with the distributed checkpoint of a `.nemo`; all ranks enter it together.

    A tar file is unpacked once per node, by its first rank, into a temporary folder.

    Raises:
        UserError: the archive holds no distributed checkpoint.
    """
    path = Path(path).resolve()
    if path.is_dir():
        yield _existing_weights(path, path)
        return
    token = [uuid.uuid4().hex]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(token, src=0)
    folder = Path(tempfile.gettempdir()) / f"nemo_weights_{token[0]}"
    first_on_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
    try:
        if first_on_node:
            with _opened(path) as tar:
                members = [
                    m for m in tar.getmembers() if _member_name(m).startswith(WEIGHTS_FOLDER + "/")
                ]
                folder.mkdir()
                safe_extract(tar, str(folder), members=members)
        barrier()
        yield _existing_weights(folder, path)
        barrier()
    finally:
        if first_on_node:
            shutil.rmtree(folder, ignore_errors=True)


def _existing_weights(folder: Path, path: Path) -> Path:
    """The weights in `folder`, unpacked from the `.nemo` at `path`.

    Raises:
        UserError: there are none.
    """
    weights = folder / WEIGHTS_FOLDER
    if not weights.is_dir():
        raise UserError(
            f"{path} has no {WEIGHTS_FOLDER} folder (a distributed checkpoint); convert it first."
        )
    return weights


def _pack_artifacts(config: DictConfig, folder: Path) -> DictConfig:
    """Copy the files that `config` names into `folder`; return a configuration that refers to the
    copies.
    """
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for key in ARTIFACT_KEYS:
        value = OmegaConf.select(config, key)
        if not isinstance(value, str) or not os.path.exists(value):
            continue
        source = Path(value)
        name = source.name if source.name.startswith("tokenizer") else f"tokenizer_{source.name}"
        if source.is_dir():
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, folder / name)
        OmegaConf.update(config, key, ARTIFACT_PREFIX + name)
    return config


def write_nemo(
    path: str | Path,
    config: DictConfig,
    sharded_weights: dict[str, Any],
    *,
    as_directory: bool = False,
) -> None:
    """Write a `.nemo` to a file system that all ranks share; all ranks call it.

    It is written beside its final place and renamed, so that a reader never sees half of it.

    Args:
        path: of the `.nemo`.
        config: of the model.
        sharded_weights: Megatron Core's sharded state dict of the weights.
        as_directory: leave it as a directory instead of packing a tar file.
    """
    path = Path(path).expanduser().absolute()
    folder = path.with_name(path.name + ".writing")
    rank_zero = parallel_state.get_rank() == 0
    if rank_zero:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / WEIGHTS_FOLDER).mkdir(parents=True)
    barrier()
    dist_ckpt.save(sharded_weights, folder / WEIGHTS_FOLDER)
    barrier()
    if rank_zero:
        OmegaConf.save(_pack_artifacts(config, folder), folder / CONFIG_FILE)
        if path.is_dir():
            shutil.rmtree(path)
        if as_directory:
            folder.rename(path)
        else:
            packed = path.with_name(path.name + ".tar.writing")
            with tarfile.open(packed, "w:") as tar:
                tar.add(folder, arcname=".")
            packed.replace(path)
            shutil.rmtree(folder)
    barrier()
