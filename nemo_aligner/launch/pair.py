# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Resumes an actor and its critic from the same step, however each of them has ended.

The two save side by side, and a death can come between. When they start again, the actor asks
which checkpoints the critic has, takes the newest step that both have, and has the critic go to
its own. So the same commands, started again by a scheduler, continue as if nothing had happened.
"""

from pathlib import Path
from typing import Any, Protocol

from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import read_state
from nemo_aligner.checkpoint.resume_pair import step_to_resume
from nemo_aligner.config.defaults import complete
from nemo_aligner.launch.experiment import load_trainer_state
from nemo_aligner.launch.processes import no_checkpoint_error
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.servers.critic_client import CriticStatus


class ResumableCritic(Protocol):
    """The remote critic (`servers/critic_client.py`), or what stands in its place."""

    def status(self) -> CriticStatus | None:
        """Where it stands; None if it cannot say. Every rank calls it."""

    def go_to(self, actor_step: int) -> bool:
        """Have it load its checkpoint of a step; False if that is damaged. Every rank calls it."""


def load_state_of_pair(
    cfg: DictConfig, ckpt_callback: CheckpointCallback, rm_critic: ResumableCritic
) -> dict[str, Any] | None:
    """Resume the actor as `exp_manager` asks, and the critic at the same step; all ranks call it.

    Where they have no step in common, the actor resumes alone, and the check before its first
    rollout says what to do (`check_status`).

    Returns:
        The counters of the checkpoint that was loaded, None for a fresh start.

    Raises:
        UserError: as `load_trainer_state`.
    """
    status = None if cfg.exp_manager is None else rm_critic.status()
    while status is not None:
        folders = _checkpoints(cfg, ckpt_callback)
        step = step_to_resume(folders, status["checkpoints"])
        folder = None if step is None else folders.get(step)
        if step is None or (_is_named(cfg) and folder is None):
            break
        if folder is not None and not _is_named(cfg) and not ckpt_callback.is_sound(folder):
            continue
        if not rm_critic.go_to(step):
            status = rm_critic.status()
            continue
        if step < max(folders, default=0):
            logging.warning(
                f"the critic has no checkpoint of actor step {max(folders)}: the actor goes back "
                f"to step {step}, the newest of both."
            )
        if _is_named(cfg):
            return ckpt_callback.load_latest(folder)
        if folder is not None:
            return ckpt_callback.load_sound(folder)
        if _must_resume(cfg):
            raise no_checkpoint_error(ckpt_callback.root)
        ckpt_callback.start_anew()
        return None
    return load_trainer_state(cfg, ckpt_callback)


def _checkpoints(cfg: DictConfig, ckpt_callback: CheckpointCallback) -> dict[int, Path]:
    """Folders that the actor may resume from, by its step, as rank 0 sees them."""
    options = complete(cfg.exp_manager, "gpt_ppo_actor", "exp_manager")
    found: dict[int, str] = {}
    if options.resume_from_checkpoint:
        stored = read_state(Path(options.resume_from_checkpoint))
        if stored is not None:
            found = {int(stored["trainer"]["step"]): options.resume_from_checkpoint}
    elif options.resume_if_exists:
        found = ckpt_callback.saved_at("step")
    return {step: Path(folder) for step, folder in gathered(found)[0].items()}


def _is_named(cfg: DictConfig) -> bool:
    """Whether the user has named the checkpoint to resume from."""
    return bool(cfg.exp_manager.get("resume_from_checkpoint"))


def _must_resume(cfg: DictConfig) -> bool:
    options = complete(cfg.exp_manager, "gpt_ppo_actor", "exp_manager")
    return bool(options.resume_if_exists and not options.resume_ignore_no_checkpoint)
