# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The `.nemo` exchange format: a tar file or a folder with

    model_config.yaml    the model's configuration; `nemo:<name>` refers to a file beside it
    <tokenizer files>    SentencePiece model, or the folder of a Hugging Face tokenizer
    model_weights/       Megatron Core distributed checkpoint; loads at any TP / PP / DP
    CHECKSUMS.xxh128     checksums of all of these (`checksums.py`), compared when they are read

Checkpoint folders of jobs (`checkpointing.py`) and weights in NeMo's older forms are read too.
Reading the configuration or the tokenizer does not unpack the weights.

NeMo-Aligner's NeMo (2.1) loads what is written. Its archives hold single files only, and its
`tokenizer.type` is a Hugging Face tokenizer outside; so our copy has a key of its own,
`tokenizer.folder`.
"""

import contextlib
import dataclasses
import functools
import io
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from nemo.utils import logging
from nemo.utils.tar_utils import TarPathTraversalError, safe_extract
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint import checksums, dist_ckpt, file_references, forms
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.file_references import ARTIFACT_KEYS, TOKENIZER_TYPE, unmarked
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replace
from nemo_aligner.checkpoint.forms import CONFIG_FILE, WEIGHTS_FOLDER
from nemo_aligner.checkpoint.stored_weights import TensorSource, is_gated
from nemo_aligner.checkpoint.torch_dist_stream import TarFiles, TorchDistTensors
from nemo_aligner.core.errors import DamagedFileError, UserError
from nemo_aligner.core.leftovers import claim, temporary_folder, token_of_machine
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered

ARTIFACT_PREFIX = "nemo:"
REMOTE_CODE = "tokenizer.trust_remote_code"
TOKENIZER_FOLDER = "tokenizer.folder"  # our copy of a Hugging Face tokenizer


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The tar file of a `.nemo`; `UserError`: damaged, or a member would be unpacked outside."""
    try:
        with tarfile.open(path) as tar:
            # Reading ends at a damaged header. A compressed file has checksums of its own.
            if isinstance(tar.fileobj, io.BufferedReader):
                members = tar.getmembers()
                with path.open("rb") as file:
                    file.seek(tar.offset)
                    if any(file.read(tarfile.BLOCKSIZE)):
                        raise DamagedFileError(
                            f"{path} is damaged: what comes after {members[-1].name} cannot be "
                            "read. Copy it again."
                        )
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{path} is damaged or incomplete ({error}); copy it again.") from error
    except TarPathTraversalError as error:
        raise UserError(
            f"{path} holds a link or a path that leads out of it ({error}); do not use this file."
        ) from error


def _member_name(member: tarfile.TarInfo) -> str:
    return member.name.removeprefix("./")


@functools.cache
def _unpack_file(path: Path, _modified_ns: int) -> Path:
    """Unpack a file into a folder that lives as long as the process."""
    folder = temporary_folder("nemo_")
    _extract(path, folder, lambda name: not forms.is_weight(name))
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{path} holds no {CONFIG_FILE}; it is not a .nemo file.")
    return folder


def _extract(path: Path, folder: Path, select: Callable[[str], bool]) -> None:
    """Unpack the members that `select` takes by name, checked."""
    with _opened(path) as tar:
        members = [member for member in tar.getmembers() if select(_member_name(member))]
        safe_extract(tar, str(folder), members=members)
        checksums.check_members(tar, path, select)


def read_archive(path: Path) -> DictConfig:
    """The configuration of a `.nemo` or a job's checkpoint; see `sources.Source.stored_config`."""
    folder = path
    if path.is_dir():
        checksums.check_folder(path, lambda name: not forms.is_weight_of_any(name))
    else:
        folder = _unpack_file(path, path.stat().st_mtime_ns)
    config = file_references.read_yaml(folder / CONFIG_FILE, path)
    file_references.refuse_resolvers(config, path)
    if "bias_activation_fusion" not in config:  # True in NeMo: GELU then has its tanh form
        plain = bool(config.get("bias", True)) and not config.get("openai_gelu", False)
        config.bias_activation_fusion = is_gated(config) or plain
    for key in (*ARTIFACT_KEYS, TOKENIZER_TYPE, TOKENIZER_FOLDER):
        value = OmegaConf.select(config, key, throw_on_missing=False)
        if isinstance(value, str) and value.startswith(ARTIFACT_PREFIX):
            name = Path(value.removeprefix(ARTIFACT_PREFIX))
            file = folder / name
            if name.is_absolute() or ".." in name.parts or file_references.leads_out(file, folder):
                raise UserError(f"{path}: {value} leads out of the archive; do not use this file.")
            OmegaConf.update(config, key, str(file))
        elif key in ARTIFACT_KEYS and isinstance(value, str) and value:
            # In old archives: a path on the machine that wrote them.
            beside = folder / Path(value).name
            if beside.is_file():
                OmegaConf.update(config, key, str(beside))
    if OmegaConf.select(config, REMOTE_CODE):
        logging.warning(
            f"{path} asks for {REMOTE_CODE}=True; a file cannot permit this, so it is dropped. If "
            f"you trust the tokenizer's code, set model.{REMOTE_CODE}=True yourself."
        )
        OmegaConf.update(config, REMOTE_CODE, False)
    if OmegaConf.select(config, TOKENIZER_FOLDER) is not None:
        config.tokenizer.type = config.tokenizer.pop(TOKENIZER_FOLDER.split(".")[1])
    file_references.mark_outside(config, folder)
    return config


@contextlib.contextmanager
def archive_tensors(path: Path) -> Iterator[TensorSource]:
    """The weights of a `.nemo` or a job's checkpoint, in place where possible; all ranks enter it
    together. `UserError`: there are none that load.
    """
    if path.is_file():
        with _opened(path) as tar:
            if _is_readable_in_place(tar, path):
                yield TorchDistTensors(path / WEIGHTS_FOLDER, files=TarFiles(tar, path))
                return
    with _unpacked_weights(path) as folder:
        yield _tensors_in(folder, path)


def _is_readable_in_place(tar: tarfile.TarFile, path: Path) -> bool:
    """Whether a `.nemo` is plain tar with torch_dist; all ranks call it, one per node checks."""
    if not isinstance(tar.fileobj, io.BufferedReader):  # of a compressed file it is another class
        return False
    members = {_member_name(member): member for member in tar.getmembers()}
    if not all((m.isreg() and not m.issparse()) or m.isdir() for m in members.values()):
        return False
    with failing_together():
        if _is_first_on_node():
            checksums.check_members(tar, path, select=forms.is_weight)
    backend = members.get(f"{WEIGHTS_FOLDER}/{forms.BACKEND_FILE}")
    stream = None if backend is None else tar.extractfile(backend)
    return stream is not None and forms.form_of_weights((), stream.read(), path) == "torch_dist"


def _is_first_on_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def _tensors_in(folder: Path, path: Path) -> TensorSource:
    if (folder / forms.MARKER).is_file():  # a checkpoint of a job
        return TorchDistTensors(folder / forms.CHECKPOINT_WEIGHTS)
    weights = folder / WEIGHTS_FOLDER
    backend = weights / forms.BACKEND_FILE
    form = forms.form_of_weights(
        (child.name for child in folder.iterdir()),
        backend.read_bytes() if backend.is_file() else None,
        path,
    )
    if form == "torch_dist":
        return TorchDistTensors(weights)
    if form is None:
        raise UserError(
            f"{path} holds no weights in a form that loads; these do: {forms.loadable_forms()}."
        )
    from nemo_aligner.checkpoint.old_weights import ZarrArrays, rank_files

    if form == "zarr":
        return ZarrArrays(weights, path)
    return rank_files(folder, path, is_gated(read_archive(path)))


@contextlib.contextmanager
def weights_folder(path: str | Path) -> Iterator[Path]:
    """Folder with a `.nemo`'s distributed checkpoint, else `UserError`; all ranks enter it."""
    with _unpacked_weights(Path(path).resolve()) as folder:
        if not (folder / WEIGHTS_FOLDER).is_dir():
            raise UserError(f"{path} has no {WEIGHTS_FOLDER} folder (a distributed checkpoint).")
        yield folder / WEIGHTS_FOLDER


@contextlib.contextmanager
def _unpacked_weights(path: Path) -> Iterator[Path]:
    """Folder with a `.nemo`'s weights, unpacked by each node's first rank; all ranks enter it."""
    if path.is_dir():
        checksums.check_files_together(path, select=forms.is_weight_of_any)
        yield path
        return
    token = token_of_machine(gathered(secrets.token_hex(8))[0])
    temporary = Path(tempfile.gettempdir()).absolute()
    folder = temporary / f"nemo_weights_{token}"
    try:
        with failing_together():
            if _is_first_on_node():
                claim(temporary, "nemo_weights_", token).mkdir()
                _extract(path, folder, forms.is_weight)
        yield folder
        gathered(None)  # all have read it
    finally:
        if _is_first_on_node():
            shutil.rmtree(folder, ignore_errors=True)


class CustomSaveRestoreConnector(SaveRestoreConnector):
    """Says which weights of a `.nemo` count:
    `Model.restore_from(path, save_restore_connector=CustomSaveRestoreConnector(...))`.

    Args:
        load_base_model_only: leave the head of a reward model at its initial values.
        replace_sharded_tensor_key: NeMo-Aligner's prefix for NeMo 2.0; not needed here.
    """

    def __init__(
        self,
        *args: Any,
        load_base_model_only: bool = False,
        replace_sharded_tensor_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.load_base_model_only = load_base_model_only
        self.replace_sharded_tensor_key = replace_sharded_tensor_key

    def restore_from(self, calling_cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return calling_cls.restore_from(*args, **{**kwargs, "save_restore_connector": self})


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
        shutil.copytree(
            source,
            folder / name,
            # It may be the folder of a whole model.
            ignore=lambda place, names: [
                n for n in names if Path(place, n).is_dir() or n.endswith(_WEIGHT_SUFFIXES)
            ],
            dirs_exist_ok=True,
        )
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


def write_config(folder: Path, config: DictConfig) -> None:
    """Write a model's configuration and its tokenizer's files; one rank calls it."""
    config = _pack_artifacts(config, folder)
    given = {key: value for key, value in config.items() if value is not None}
    settings = NEMO_UNLESS_SET | given | NEMO_ALWAYS
    if "target" in given:
        module, _, name = given["target"].rpartition(".")
        if module.startswith(_GPT):
            settings["target"] = f"{NEMO_MODULES.get(name, module)}.{name}"
    if "add_qkv_bias" in given:  # our name; NeMo's wins there
        settings["qkv_bias"] = given["add_qkv_bias"]
    OmegaConf.save(OmegaConf.merge(config, settings), folder / CONFIG_FILE)


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
    weights = {chunk: dict(items) for chunk, items in sharded_weights.items()}
    for chunk, items in sharded_weights.items():
        for name, item in items.items():
            if isinstance(item, ShardedObject) and name.endswith(_BESIDE_ATTENTION):
                # The empty extra state that Transformer Engine's attention asks for.
                wanted = name.replace("linear_proj", "core_attention")
                key = item.key.replace("linear_proj", "core_attention")
                weights[chunk].setdefault(wanted, dataclasses.replace(item, key=key))
    write(path, config, as_directory, functools.partial(dist_ckpt.save, weights))


def write(
    path: str | Path,
    config: DictConfig,
    as_directory: bool,
    write_weights: Callable[[Path], checksums.Checksums],
) -> None:
    """Write a `.nemo` beside `path`, and give it this place; after an error nothing is left.
    `write_weights`: into a folder, such as by `dist_ckpt.write`.
    """
    path = Path(path).expanduser().absolute()
    folder = path.with_name(path.name + WRITING_SUFFIX)
    packed = path.with_name(path.name + ".tar.writing")
    is_writer = parallel_state.get_rank() == 0
    try:
        with failing_together(folder):
            if is_writer:
                shutil.rmtree(folder, ignore_errors=True)
                (folder / WEIGHTS_FOLDER).mkdir(parents=True)
        written = write_weights(folder / WEIGHTS_FOLDER)
        with failing_together(path):
            if is_writer:
                write_config(folder, config)
                known = {f"{WEIGHTS_FOLDER}/{name}": found for name, found in written.items()}
                checksums.write_manifest(folder, known)
                replace(path, folder if as_directory else _pack(folder, packed))
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
            packed.unlink(missing_ok=True)


def _pack(folder: Path, packed: Path) -> Path:
    """The tar file `packed` of a folder; `SaveError`: there is no space for it."""
    files = (file for file in folder.rglob("*") if file.is_file())
    checksums.check_space(folder, sum(file.stat().st_size for file in files))
    with tarfile.open(packed, "w:") as tar:
        tar.add(folder, arcname=".")
    with packed.open("rb") as file:
        os.fsync(file.fileno())
    return packed
