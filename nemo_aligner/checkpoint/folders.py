# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of training checkpoints: their names, and which of them are complete and to be kept.

A folder is written under a temporary name, renamed, and marked as complete; the mark goes first
when it is removed. Nothing that a job resumes from is read out of its name.

Death between two saves leaves actor and critic at different steps. Both keep their last two
checkpoints, and until then the critic its first weights as those of step 0, so that they have one
of the same step, to which both go back (`launch/rollout_job.py`).
"""

import contextlib
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from nemo.utils import logging

from nemo_aligner.checkpoint.checksums import (
    MANIFEST,
    file_checksum,
    sync_folder,
    warn_once,
    write_durably,
)
from nemo_aligner.checkpoint.forms import CONFIG_FILE, MARKER
from nemo_aligner.core.errors import DamagedFileError, SaveError

STATE_FILE = "state.json"
WRITING_SUFFIX = ".writing"
FORMER_SUFFIX = ".former"  # of what is being replaced
REMOVING_SUFFIX = ".removing"
DAMAGED_SUFFIX = ".damaged"  # of what was set aside
DAMAGED = "DAMAGED"  # in the place of the mark of such a folder: says what is wrong
# In a checkpoint that a job has gone back behind.
ABANDONED = "ABANDONED"
# In the last checkpoint of a job that has written its `.nemo` and other exports.
EXPORTED = "EXPORTED"
CHECKPOINTS = "checkpoints"  # in the folder of a job

Checkpoint = tuple[Path, dict[str, Any]]  # a complete folder and the contents of its state.json


def format_name(template: str, metrics: dict[str, float]) -> str:
    """`"gpt-{step}-{val:.3f}"` -> `"gpt-step=10-val=0.812"`; a missing metric reads `nan`."""

    def fill(match: re.Match[str]) -> str:
        key, spec = match.group(1), match.group(2) or ""
        value = metrics.get(key, math.nan)
        for_whole = spec[-1:] in tuple("bdoxX")
        if (for_whole or not spec) and float(value).is_integer():
            value = int(value)
        elif for_whole:
            spec = spec[:-1]
        return f"{key}={format(value, spec)}"

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", fill, template)


def try_names(root: Path, template: str, others: list[str]) -> None:
    """Try the longest names that a job will write in `root`; `SaveError`: one is not possible."""
    try:
        keys = re.findall(r"\{([^{}:]+)", template)
        # Long numbers, whole ones as counters are, and others, as metrics may be.
        names = [format_name(template, dict.fromkeys(keys, n)) for n in (-1e9, -1e9 + 0.5)]
        for name in (*names, *others):
            if "/" in name:
                raise ValueError(f"{name!r} contains /, and is no name")
            probe = root / (name + REMOVING_SUFFIX)
            if not probe.is_dir():  # what a dead job has left goes with the next save
                probe.mkdir(parents=True)
                probe.rmdir()
    except (OSError, ValueError) as error:
        raise SaveError(
            f"the files of this job cannot be written in {root}: {error}. Nothing was trained; "
            "change exp_manager.name, exp_manager.checkpoint_callback_params.filename or the "
            "folder (exp_manager.explicit_log_dir)."
        ) from None


def mark(folder: Path, manifest_checksum: str) -> None:
    """Mark a checkpoint in its final place as complete, by the checksum of its manifest."""
    write_durably(folder / MARKER, f"{manifest_checksum}  {MANIFEST}\n".encode())


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or another folder or file; the mark first: a rest is not taken for a
    whole one.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    (path / MARKER).unlink(missing_ok=True)
    sync_folder(path)
    removing = path.with_name(path.name + REMOVING_SUFFIX)
    if removing.exists():
        shutil.rmtree(removing)
    path.rename(removing)
    shutil.rmtree(removing)


def set_aside(folder: Path, why: DamagedFileError) -> None:
    """Give a damaged checkpoint another name, under which no job takes it."""
    aside = folder.with_name(folder.name + DAMAGED_SUFFIX)
    if aside.exists():
        shutil.rmtree(aside)
    write_durably(folder / DAMAGED, f"{why}\n".encode())
    (folder / MARKER).unlink()
    folder.rename(aside)
    sync_folder(folder.parent)
    logging.error(f"{why} It now lies in {aside}, and the checkpoint before it is taken.")


def read_state(folder: Path) -> dict[str, Any] | None:
    """`state.json`, or None of an incomplete checkpoint; `DamagedFileError`: it is damaged."""
    if not (folder / MARKER).is_file():
        return None
    try:
        manifest, marked = folder / MANIFEST, (folder / MARKER).read_bytes()
        expected = b""  # without checksums
        if manifest.is_file():
            with manifest.open("rb") as file:
                expected = f"{file_checksum(file)}  {MANIFEST}\n".encode()
        if marked != expected:
            raise ValueError(f"{MARKER} and {MANIFEST} do not belong together")
        state = json.loads((folder / STATE_FILE).read_text())
        for key, kind in (("save_number", int), ("trainer", dict), ("metrics", dict)):
            if not isinstance(state[key], kind):
                raise ValueError(f"{key} is {state[key]!r}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        if not (folder / MARKER).is_file():  # another thread or job is removing the folder
            return None
        raise DamagedFileError(
            f"{folder} is marked as complete, but is damaged: {STATE_FILE} cannot be used "
            f"({type(error).__name__}: {error}). Copy it again, or use another checkpoint."
        ) from error
    return state


def extract_value_from_ckpt(key: str, ckpt_path: str | Path) -> int:
    """The counter `key` of a checkpoint, by NeMo-Aligner's function; without it 0 and a warning.

    It is read from `state.json`, or, for a folder of another origin, out of the folder's name.
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


def complete_checkpoints(
    root: Path,
    damaged: Callable[[Path, DamagedFileError], None] = lambda _path, why: warn_once(str(why)),
) -> list[Checkpoint]:
    """Complete checkpoints under `root`, oldest first. `damaged` gets those that are marked as
    complete, but cannot be listed, and why; by default it warns once.
    """
    complete = []
    for path in sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else ():
        try:
            if (state := read_state(path)) is not None:
                complete.append((path, state))
        except DamagedFileError as error:
            damaged(path, error)
    return sorted(complete, key=lambda checkpoint: checkpoint[1]["save_number"])


def is_leftover(path: Path) -> bool:
    """Whether `path` is what a job left that died while it wrote or removed a checkpoint."""
    if not path.is_dir() or (path / DAMAGED).exists():
        return False
    torn = (path / STATE_FILE).exists() and not (path / MARKER).exists()
    return path.name.endswith((WRITING_SUFFIX, REMOVING_SUFFIX)) or torn


def abandon_after(root: Path, save_number: int) -> None:
    """Note that the job has gone back behind the checkpoints newer than `save_number`."""
    for path, state in complete_checkpoints(root):
        if state["save_number"] > save_number:
            (path / ABANDONED).touch()
            sync_folder(path)


def is_abandoned(path: Path) -> bool:
    return (path / ABANDONED).exists()


def checkpoints_of_others(root: Path) -> list[str]:
    """Names under `root` that look like training checkpoints of NeMo-Aligner or Lightning."""
    tops = ("*.ckpt", "*/metadata.json", "*/common.pt", "*/mp_rank_*", "*/tp_rank_*")
    found = {root / path.relative_to(root).parts[0] for top in tops for path in root.glob(top)}
    ours = (MARKER, CONFIG_FILE)  # the second is in a .nemo folder too
    return sorted(
        path.name
        for path in found
        if not (path.name.endswith(WRITING_SUFFIX) or any((path / n).exists() for n in ours))
    )


def replace(target: Path, written: Path, complete: Callable[[], None] = lambda: None) -> None:
    """Give the file or folder `written` the place `target`, and `complete` it there; what stands
    there stays a whole one until then.
    """
    former = target.with_name(target.name + FORMER_SUFFIX)
    if target.exists() and (target.is_dir() or written.is_dir()):
        remove_checkpoint(former)
        target.rename(former)
    written.replace(target)
    sync_folder(target.parent)
    complete()
    remove_checkpoint(former)


@contextlib.contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """An empty folder that takes the place `target`; after an error it is gone."""
    folder = target.with_name(target.name + WRITING_SUFFIX)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield folder
        replace(target, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in the folder of a job, or in its folder of checkpoints."""
    found = complete_checkpoints(folder / CHECKPOINTS) or complete_checkpoints(folder)
    return found[-1][0] if found else None


def why_unranked(metrics: dict[str, float], monitor: str | None, save_top_k: int) -> str | None:
    """The warning about a checkpoint without `monitor`, such as one between validations."""
    has_validation = any(name.startswith("val") for name in metrics)
    if save_top_k <= 0 or monitor is None or monitor in metrics:
        return None
    if monitor.startswith("val_") and not has_validation:
        return None
    return (
        f"this checkpoint has no metric exp_manager.checkpoint_callback_params.monitor={monitor}, "
        f"so it ranks last. It has {', '.join(sorted(metrics)) or 'none'}."
    )


def outdated(
    checkpoints: list[Checkpoint], monitor: str | None, mode: str, save_top_k: int
) -> list[Path]:
    """Folders neither among the `save_top_k` best by `monitor` nor the last two, without abandoned
    ones. Below 0 keeps all; a missing or NaN metric ranks last, of equals the newer one wins.
    """
    if save_top_k < 0:
        return []
    sign = 1 if mode == "min" else -1

    def rank(checkpoint: Checkpoint) -> tuple[float, int]:
        state = checkpoint[1]
        value = sign * state["metrics"].get(monitor, math.nan)
        return (math.inf if math.isnan(value) else value, -state["save_number"])

    best = sorted(checkpoints, key=rank)[:save_top_k]
    last = [checkpoint for checkpoint in checkpoints if not is_abandoned(checkpoint[0])][-2:]
    keep = {path for path, _ in [*best, *last]}
    return [path for path, _ in checkpoints if path not in keep]


def step_to_resume(actor_steps: Collection[int], critic_steps: Collection[int]) -> int | None:
    """The newest step that actor and critic can both resume from, or None. The actor can start at
    0 too; `critic_steps` has 0 for the critic's first weights. 0 does not count if either has more
    than one later checkpoint: then a job was started with another folder.
    """
    step = max({0, *actor_steps} & set(critic_steps), default=None)
    if step == 0 and max(sum(s > 0 for s in steps) for steps in (actor_steps, critic_steps)) > 1:
        return None
    return step


def resume_argument(folder: str) -> str:
    """The argument that resumes a job from `folder`; its `=` is quoted for Hydra and a shell."""
    value = QuotedString(str(folder), Quote.double).with_quotes()
    return shlex.quote(f"exp_manager.resume_from_checkpoint={value}")


def mismatch_remedy(
    actor_step: int,
    critic_step: int,
    actor_checkpoints: dict[int, str],
    critic_checkpoints: dict[int, str],
) -> str:
    """How to bring actor and critic together again. `critic_step`: the actor step of the critic's
    last checkpoint; folders are given by actor step.
    """
    if critic_step == actor_step and (critic_step in critic_checkpoints or critic_step == 0):
        return "Restart the critic server with the same command: the pair then matches."
    common = max(actor_checkpoints.keys() & critic_checkpoints.keys(), default=None)
    if common is None:
        actor, critic = (
            ", ".join(map(str, sorted(own))) or "none"
            for own in (actor_checkpoints, critic_checkpoints)
        )
        return (
            f"No step has checkpoints of both (actor: {actor}; critic: {critic}). If one of them "
            "was started with another folder than before, give it the old one "
            "(exp_manager.explicit_log_dir); else start both anew in empty folders."
        )
    return (
        f"Both have a checkpoint of actor step {common}: restart the critic server with "
        f"{resume_argument(critic_checkpoints[common])}, and start the actor again with "
        f"{resume_argument(actor_checkpoints[common])}. These arguments are for this start only: "
        "leave them out once a newer checkpoint is saved."
    )
