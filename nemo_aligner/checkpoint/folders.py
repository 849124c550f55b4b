# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of training checkpoints: their names, and which of them are complete and to be kept.

A folder is written under a temporary name and renamed when it is complete. Nothing that a job
resumes from is ever read out of its name.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from nemo.utils import logging

from nemo_aligner.checkpoint.forms import CONFIG_FILE, MARKER

STATE_FILE = "state.json"
WRITING_SUFFIX = ".writing"
FORMER_SUFFIX = ".former"  # of what is being replaced
CHECKPOINTS = "checkpoints"  # in the folder of a job

Checkpoint = tuple[Path, dict[str, Any]]  # a complete folder and the contents of its state.json


def format_name(template: str, metrics: dict[str, float]) -> str:
    """`"gpt-{step}-{val:.3f}"` -> `"gpt-step=10-val=0.812"`; a missing metric reads `nan`."""

    def fill(match: re.Match[str]) -> str:
        key, spec = match.group(1), match.group(2) or ""
        value = metrics.get(key, math.nan)
        if not spec and float(value).is_integer():
            value = int(value)
        return f"{key}={format(value, spec)}"

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", fill, template)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Contents of `state.json` of a complete checkpoint, else None."""
    if not (folder / MARKER).is_file():
        return None
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except FileNotFoundError:  # another thread or job is removing the folder
        return None


def extract_value_from_ckpt(key: str, ckpt_path: str | Path) -> int:
    """The counter `key` of a checkpoint, by NeMo-Aligner's function; 0, with a warning, if it does
    not say.

    It stands in the checkpoint's own `state.json`; NeMo-Aligner read it out of the folder's name,
    which is done here for a folder of another origin.
    """
    state = read_state(Path(ckpt_path))
    if state is not None:
        for counters in (state["trainer"], state["metrics"]):
            if key in counters:
                return int(counters[key])
    found = re.search(rf"{re.escape(key)}=(\d+(?:\.\d+)?)", str(ckpt_path))
    if found is None:
        logging.warning(f"{ckpt_path} does not say its {key}; using 0.")
        return 0
    return int(float(found.group(1)))


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(path, read_state(path)) for path in root.iterdir() if path.is_dir()]
    complete = [(path, state) for path, state in found if state is not None]
    return sorted(complete, key=lambda checkpoint: checkpoint[1]["save_number"])


def checkpoints_of_others(root: Path) -> list[str]:
    """Names under `root` that look like training checkpoints of NeMo-Aligner or Lightning: files
    `.ckpt`, and folders with a distributed checkpoint or the files of each rank at their top.
    """
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if _is_of_others(path))


def _is_of_others(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".ckpt"
    ours = path.name.endswith(WRITING_SUFFIX) or (path / MARKER).exists()
    if ours or (path / CONFIG_FILE).exists():  # the second is a .nemo folder
        return False
    tops = ("metadata.json", "common.pt", "mp_rank_*", "tp_rank_*")
    return any(next(path.glob(top), None) is not None for top in tops)


def replace_folder(target: Path, written: Path) -> None:
    """Give the folder `written` the place `target`; what stands there goes when it is safe."""
    former = target.with_name(target.name + FORMER_SUFFIX)
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    written.rename(target)
    if former.is_dir():
        shutil.rmtree(former)
    else:
        former.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a job.

    Args:
        folder: of the job, or its folder of checkpoints.
    """
    for root in (folder / CHECKPOINTS, folder):
        found = complete_checkpoints(root)
        if found:
            return found[-1][0]
    return None


def why_unranked(metrics: dict[str, float], monitor: str | None, save_top_k: int) -> str | None:
    """Text of a warning for a checkpoint without the metric that checkpoints are ranked by, else
    None.
    """
    if save_top_k <= 0 or monitor is None or monitor in metrics:
        return None
    return (
        f"this checkpoint has no metric exp_manager.checkpoint_callback_params.monitor={monitor}, "
        f"so it ranks last. It has {', '.join(sorted(metrics)) or 'none'}."
    )


def outdated(
    checkpoints: list[Checkpoint], monitor: str | None, mode: str, save_top_k: int
) -> list[Path]:
    """Folders that are neither among the best nor the last two.

    If a job dies between the critic's save and the actor's, the older of the last two match.

    Args:
        checkpoints: complete ones, oldest first.
        monitor: metric that they are ranked by. A checkpoint where it is missing or NaN ranks
            last; of equals the newer one wins.
        mode: "max" or "min".
        save_top_k: how many of the best to keep; below 0: all.
    """
    if save_top_k < 0:
        return []
    sign = 1 if mode == "min" else -1

    def rank(checkpoint: Checkpoint) -> tuple[float, int]:
        state = checkpoint[1]
        value = sign * state["metrics"].get(monitor, math.nan)
        return (math.inf if math.isnan(value) else value, -state["save_number"])

    best = sorted(checkpoints, key=rank)[:save_top_k]
    keep = {path for path, _ in [*best, *checkpoints[-2:]]}
    return [path for path, _ in checkpoints if path not in keep]
