# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The forms of checkpoints of NeMo and others, what happens to each (`FORMS`, from which messages
and the page on migration are made), which one lies at a path, by the names of its files, and
models by their names on the Hugging Face Hub. Imports nothing heavy: a wrong path is told before
the packages of a job are imported.
"""

import json
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from nemo_aligner.core.errors import UserError

CONFIG_FILE = "model_config.yaml"
WEIGHTS_FOLDER = "model_weights"
WEIGHTS_FILE = "model_weights.ckpt"
BACKEND_FILE = "metadata.json"  # names the format of a distributed checkpoint
# A checkpoint of a job
MARKER = "COMPLETE"  # written last; a folder without it is ignored
CHECKPOINT_WEIGHTS = "weights"
RNG_FOLDER = "rng"
REFERENCE = "reference_policy"  # prefix of the keys of a reference policy among the weights
NEMO2_CONTEXT = "context"
NEMO2_WEIGHTS = "weights"
RELEASE = "release"  # in the place of a number of iterations, of a converted model
# Folder of one rank, of NeMo and Megatron-LM: with one pipeline stage, and with several.
RANK_FOLDER = re.compile(r"(mp|tp)_rank_(?P<rank>\d+)(_(pp_rank_)?(?P<stage>\d+))?")

CONVERTERS = "scripts/checkpoint_converters of NeMo 2.0 to 2.4"


@dataclass(frozen=True)
class Form:
    name: str  # of the form, as messages say it
    holds: str  # the files that it is recognised by
    remedy: str = ""  # what to do with one that does not load; empty for one that does

    @property
    def loads(self) -> bool:
        """Whether `restore_from_path` may name it."""
        return not self.remedy


FORMS = {
    "torch_dist": Form(
        ".nemo file or folder with a distributed checkpoint (torch_dist)",
        f"{CONFIG_FILE}, {WEIGHTS_FOLDER}/{BACKEND_FILE}",
    ),
    "zarr": Form(
        ".nemo file or folder with a distributed checkpoint (zarr, uncompressed)",
        f"{CONFIG_FILE}, {WEIGHTS_FOLDER}/{BACKEND_FILE} that says zarr",
    ),
    "ranks": Form(
        ".nemo file or folder with the weights of each rank, for any sizes",
        f"{CONFIG_FILE}, mp_rank_XX/{WEIGHTS_FILE} or tp_rank_XX_pp_rank_XXX/{WEIGHTS_FILE}",
    ),
    "one_file": Form(
        ".nemo file or folder with the weights of one rank",
        f"{CONFIG_FILE}, {WEIGHTS_FILE}",
    ),
    "nemo2": Form(
        "NeMo 2.0 folder",
        f"{NEMO2_CONTEXT}/model.yaml or {NEMO2_CONTEXT}/io.json, {NEMO2_WEIGHTS}/",
    ),
    "checkpoint": Form(
        "checkpoint folder of a job", f"{CONFIG_FILE}, {CHECKPOINT_WEIGHTS}/, {MARKER}"
    ),
    "legacy_layers": Form(
        ".nemo file or folder with NeMo's own layers (mcore_gpt=False)",
        "weights that start with model.language_model",
        remedy=f"convert it with convert_gpt_nemo_to_mcore.py in {CONVERTERS}",
    ),
    "rank_experts": Form(
        ".nemo file or folder with the weights of each rank and a mixture of experts",
        f"mp_rank_XX/{WEIGHTS_FILE} with mlp.experts",
        remedy="load and save it with NeMo 2.0 to 2.4, which writes a distributed checkpoint",
    ),
    "compressed_zarr": Form(
        ".nemo file or folder with a distributed checkpoint (zarr, compressed)",
        "a compressor or filters in a .zarray file",
        remedy=f"convert it with convert_zarr_to_torch_dist.py in {CONVERTERS}",
    ),
    "hugging_face": Form(
        "Hugging Face folder",
        "config.json, model.safetensors or model.safetensors.index.json",
    ),
    "megatron": Form(
        "checkpoint of Megatron-LM or Megatron-Bridge, or the root of several",
        "latest_checkpointed_iteration.txt, or .metadata and common.pt, or run_config.yaml, or "
        "mp_rank_XX/model_optim_rng.pt",
    ),
    "training": Form(
        "checkpoint of a training run without a model configuration",
        f"{BACKEND_FILE} or checkpoint files, no {CONFIG_FILE}",
        remedy="name the .nemo that the run wrote, or write one from it "
        "(exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True)",
    ),
}


def refusal(form: str, path: object, detail: str = "") -> UserError:
    """The error about a checkpoint at `path` whose form does not load."""
    entry = FORMS[form]
    found = f" ({detail})" if detail else ""
    return UserError(f"{path} is a {entry.name}{found}, which is not read; {entry.remedy}.")


def loadable_forms() -> str:
    return "; ".join(form.name for form in FORMS.values() if form.loads)


def _top_name(member: str) -> str:
    return member.removeprefix("./").split("/", 1)[0]


def is_weight(member: str) -> bool:
    """Whether `member` of a `.nemo` belongs to the weights."""
    top = _top_name(member)
    return top in (WEIGHTS_FOLDER, WEIGHTS_FILE) or RANK_FOLDER.fullmatch(top) is not None


def is_weight_of_any(member: str) -> bool:
    """Whether `member` of a `.nemo` or checkpoint is read for weights or a resume alone."""
    return is_weight(member) or _top_name(member) in (CHECKPOINT_WEIGHTS, RNG_FOLDER)


def form_of_weights(
    names: Iterable[str],
    backend: bytes | None,
    path: Path,
    formats: Sequence[str] = ("torch_dist", "zarr"),
) -> str | None:
    """The key in `FORMS` of weights in files and folders `names`; `backend`: content of their
    `BACKEND_FILE`, if any. `UserError`: its format is none of `formats`, or it is missing.
    """
    names = set(names)
    if backend is not None:
        try:
            found = json.loads(backend)["sharded_backend"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged: its {BACKEND_FILE} names no format ({error}); copy it again."
            ) from error
        if found not in formats:
            raise UserError(
                f"{path}: {BACKEND_FILE} names the format {found!r}; formats that load: "
                f"{', '.join(formats)}."
            )
        return found
    if WEIGHTS_FOLDER in names:
        raise UserError(
            f"{path} is incomplete: it lacks {WEIGHTS_FOLDER}/{BACKEND_FILE}; copy it again."
        )
    if any(RANK_FOLDER.fullmatch(name) for name in names):
        return "ranks"
    return "one_file" if WEIGHTS_FILE in names else None


NEMO2_MODEL, NEMO2_JSON = "model.yaml", "io.json"
HF_CONFIG, HF_WEIGHTS = "config.json", ("model.safetensors", "model.safetensors.index.json")
PEFT_CONFIG = "adapter_config.json"
TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_FILE = "run_config.yaml"
RANK_FILE = "model_optim_rng.pt"
METADATA_FILE = ".metadata"  # of a distributed checkpoint
# What is beside its tensors: Megatron Core 0.16 reads the file; 0.19 an object, or the file if
# there.
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state"


def check_restore_path(
    path: str | PathLike[str] | None, key: str = "pretrained_checkpoint.restore_from_path"
) -> Path:
    """`path`, of the configuration key `key`, as an existing file or directory, or the folder of a
    model by its name on the Hugging Face Hub; `UserError`: it is None, does not exist, or has a
    form that does not load.
    """
    if path is None:
        raise UserError(f"{key} is not set; give the path of a .nemo file or directory.")
    path = Path(path).expanduser()
    if not path.exists():
        path = hub_folder(str(path), key) or path
    if not path.exists():
        raise UserError(
            f"{key}={path} does not exist; give the path of a .nemo file or directory."
        )
    if not path.is_dir():
        if not tarfile.is_tarfile(path):
            raise UserError(
                f"{key}={path} is not a tar file; a .nemo is a tar file or a directory."
            )
        return path
    if form_of_path(path) != "nemo" or (path / CONFIG_FILE).is_file():
        return path
    if (path / BACKEND_FILE).is_file() or (path / MARKER).is_file():
        raise refusal("training", f"{key}={path}")
    marks = [*path.glob(f"checkpoints/*/{MARKER}"), *path.glob(f"*/{MARKER}")]
    if marks:
        newest = max(marks, key=lambda mark: mark.stat().st_mtime).parent
        files = " or ".join(map(str, [*sorted(newest.parent.glob("*.nemo")), newest]))
        raise UserError(f"{key}={path} is the folder of a job; name what it has written: {files}.")
    raise UserError(
        f"{key}={path} is a directory without {CONFIG_FILE}; it is not an unpacked .nemo. "
        f"Forms that load: {loadable_forms()}."
    )


def check_complete(folder: Path) -> None:
    """`UserError` unless a job can resume from `folder`."""
    if not (folder / MARKER).is_file():
        raise UserError(
            f"{folder} is not a complete checkpoint (no {MARKER} file); give another one in "
            "exp_manager.resume_from_checkpoint. From a checkpoint of NeMo-Aligner itself no "
            "job can resume: start from its .nemo file in another folder."
        )


def form_of_path(path: Path) -> str:
    """The form at `path`: "peft" (without all weights), "nemo2", "hugging_face", "megatron", or
    else "nemo".
    """
    if (path / PEFT_CONFIG).is_file() and not any((path / n).is_file() for n in HF_WEIGHTS):
        return "peft"
    if any((path / NEMO2_CONTEXT / name).is_file() for name in (NEMO2_MODEL, NEMO2_JSON)):
        return "nemo2"
    if is_hugging_face(path):
        return "hugging_face"
    return "megatron" if (path / TRACKER).is_file() or is_iteration(path) else "nemo"


def is_hugging_face(path: Path) -> bool:
    return path.is_dir() and (path / HF_CONFIG).is_file()


def is_iteration(path: Path) -> bool:
    if (path / CONFIG_FILE).exists() or (path / NEMO2_CONTEXT).exists():
        return False
    distributed = (path / METADATA_FILE).is_file() and (path / BACKEND_FILE).is_file()
    return distributed or (path / BRIDGE_FILE).is_file() or bool(rank_folders(path))


def rank_folders(path: Path) -> list[Path]:
    return sorted(file.parent for file in path.glob(f"mp_rank_*/{RANK_FILE}"))


def locate(path: Path) -> Path:
    """The checkpoint at `path`, or the newest of a root; `UserError`: the root names none."""
    if not (path / TRACKER).is_file():
        return path
    newest = (path / TRACKER).read_text(errors="replace").strip()
    if newest != RELEASE and not newest.isdecimal():
        raise UserError(
            f"{path / TRACKER} says {newest[:80]!r}, neither a number nor {RELEASE}; "
            "name one of the folders beside it."
        )
    folder = path / (RELEASE if newest == RELEASE else f"iter_{int(newest):07d}")
    if not is_iteration(folder):
        raise UserError(
            f"{path / TRACKER} names {folder.name}, which is not there or no checkpoint of "
            "Megatron-LM or Megatron-Bridge; copy it, or name another folder beside it."
        )
    return folder


HUB = "hf://"  # before a name: the model may be downloaded
_NAME = re.compile(r"(hf:/{1,2})?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")  # a Path has one slash
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def hub_folder(path: str, key: str) -> Path | None:
    """The folder in the local cache for `ORGANISATION/MODEL[@REVISION]`, the value of `key`; None:
    `path` is no such name. With `hf://` before it, the model is downloaded first.

    Raises:
        UserError: it is not in the cache, or cannot be downloaded.
    """
    match = _NAME.fullmatch(path)
    if match is None or path.endswith(".nemo"):
        return None
    scheme, name, revision = match.groups()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns="consolidated*",  # the same weights again
                local_files_only=scheme is None,
            )
        )
    except Exception as error:  # of the network, the Hub or its licences, in many classes
        if scheme is None:
            command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
            raise UserError(
                f"{key}={path} does not exist, and no model of this name is in the local Hugging "
                f"Face cache; give a path, run `{command}`, or write {HUB}{path}."
            ) from None
        first = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(f"{key}={path} cannot be downloaded: {first}") from error
