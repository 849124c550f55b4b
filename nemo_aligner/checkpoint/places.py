# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which form a checkpoint at a path has, by the names of its files, and whether it is one that
loads. Imports nothing heavy: a wrong path is told before the packages of a job are imported.
"""

import tarfile
from pathlib import Path

from nemo_aligner.checkpoint import forms
from nemo_aligner.checkpoint.forms import BACKEND_FILE, CONFIG_FILE, MARKER, NEMO2_CONTEXT
from nemo_aligner.core.errors import UserError

NEMO2_MODEL, NEMO2_JSON = "model.yaml", "io.json"
HF_CONFIG, HF_WEIGHTS = "config.json", ("model.safetensors", "model.safetensors.index.json")
PEFT_CONFIG = "adapter_config.json"
TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_FILE = "run_config.yaml"
RANK_FILE = "model_optim_rng.pt"
METADATA_FILE = ".metadata"  # of a distributed checkpoint


def check_restore_path(
    path: str | Path | None, key: str = "pretrained_checkpoint.restore_from_path"
) -> Path:
    """`path` as an existing `.nemo` file or directory.

    Args:
        key: configuration key that `path` comes from, for the messages.

    Raises:
        UserError: the path is None, does not exist, or has a form that does not load.
    """
    if path is None:
        raise UserError(f"{key} is not set; give the path of a .nemo file or directory.")
    path = Path(path).expanduser()
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
    if is_peft(path) or is_foreign(path) or (path / CONFIG_FILE).is_file():
        return path
    if (path / BACKEND_FILE).is_file() or (path / MARKER).is_file():
        raise forms.refusal("training", f"{key}={path}")
    marks = [*path.glob(f"checkpoints/*/{MARKER}"), *path.glob(f"*/{MARKER}")]
    if marks:
        newest = max(marks, key=lambda mark: mark.stat().st_mtime).parent
        files = " or ".join(map(str, [*sorted(newest.parent.glob("*.nemo")), newest]))
        raise UserError(f"{key}={path} is the folder of a job; name what it has written: {files}.")
    raise UserError(
        f"{key}={path} is a directory without {CONFIG_FILE}; it is not an unpacked .nemo. "
        f"Forms that load: {forms.loadable_forms()}."
    )


def check_complete(folder: Path) -> None:
    """Raise `UserError` unless a job can resume from `folder`."""
    if not (folder / MARKER).is_file():
        raise UserError(
            f"{folder} is not a complete checkpoint (no {MARKER} file); give another one in "
            "exp_manager.resume_from_checkpoint. From a checkpoint of NeMo-Aligner itself no "
            "job can resume: start from its .nemo file in another folder."
        )


def is_foreign(path: Path) -> bool:
    """Whether `path` is a folder of a form that has a configuration of its own."""
    return is_nemo2(path) or is_hugging_face(path) or is_megatron(path)


def is_nemo2(path: Path) -> bool:
    context = path / NEMO2_CONTEXT
    return context.is_dir() and any((context / n).is_file() for n in (NEMO2_MODEL, NEMO2_JSON))


def is_hugging_face(path: Path) -> bool:
    return path.is_dir() and (path / HF_CONFIG).is_file()


def is_peft(path: Path) -> bool:
    """Whether `path` is a folder of PEFT: adapters, not a model with all weights."""
    return (path / PEFT_CONFIG).is_file() and not any((path / n).is_file() for n in HF_WEIGHTS)


def is_megatron(path: Path) -> bool:
    return (path / TRACKER).is_file() or is_iteration(path)


def is_iteration(path: Path) -> bool:
    if (path / CONFIG_FILE).exists() or (path / NEMO2_CONTEXT).exists():
        return False
    distributed = (path / METADATA_FILE).is_file() and (path / BACKEND_FILE).is_file()
    return distributed or (path / BRIDGE_FILE).is_file() or bool(rank_folders(path))


def rank_folders(path: Path) -> list[Path]:
    return sorted(file.parent for file in path.glob(f"mp_rank_*/{RANK_FILE}"))
